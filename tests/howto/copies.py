"""What a page docs/howto/add-*.md asks to write, applied to a copy of the repository.

A fence ```diff begins with a line `--- PATH`: its lines that begin with a space or a minus are in the file, exactly
once, and are replaced by those that begin with a space or a plus. A fence after `<!-- file: PATH -->` is a new file.
Programs run on a copy in processes of their own, whatever this process has imported.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/howto"
FOLDERS = ("rldsl", "backends", "grammar", "stdlib", "tests", "examples", "docs")
FILES = ("README.md", "Makefile", "mkdocs.yml", "pyproject.toml")
PRODUCT = ("rldsl/", "backends/")

_STEP = re.compile(r"^```diff\n--- (?P<changed>\S+)\n(?P<diff>.*?)^```$"
                   r"|<!-- file: (?P<made>\S+) -->\n```\w+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
# the first thing that a Python process imports; the copy comes before whatever is installed
_FINDER = '''"""The packages of the copy around this file."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parent
FOLDERS = {folders!r}


class Copy:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in FOLDERS:
            folder = ROOT / FOLDERS[name]
            return importlib.util.spec_from_file_location(name, folder / "__init__.py",
                                                          submodule_search_locations=[str(folder)])


sys.meta_path.insert(0, Copy)
'''


@dataclass(frozen=True, slots=True)
class Step:
    """One file that a page changes or makes."""

    path: str  # in the repository, or in the reader's folder
    text: str  # the diff, or the file
    new: bool


class PageError(AssertionError):
    """A page that cannot be followed."""


def steps(text: str) -> list[Step]:
    return [Step(m["changed"] or m["made"], m["diff"] or m["text"], bool(m["made"])) for m in _STEP.finditer(text)]


def product_files(text: str) -> list[str]:
    """The files of the product that a page changes or makes."""
    return sorted({s.path for s in steps(text) if s.path.startswith(PRODUCT)})


def patched(old: str, diff: str, path: str) -> str:
    """`old` with the change. Errors: PageError, unless its context is there exactly once."""
    lines = [line or " " for line in diff.splitlines()]
    if wrong := [line for line in lines if line[0] not in " +-"]:
        raise PageError(f"{path}: a line of a diff that begins with {wrong[0][0]!r}: {wrong[0]}")
    before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
    where = f"\n{old}".count(f"\n{before}")
    if where != 1 or before == after:
        raise PageError(f"{path} has this {where} times, or it changes nothing:\n{before}")
    return f"\n{old}".replace(f"\n{before}", f"\n{after}")[1:]


class Copy:
    """A copy of the repository with the steps of some pages."""

    def __init__(self, root: Path, *pages: str):
        self.root = root
        for name in FOLDERS:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
        for name in FILES:
            shutil.copy(ROOT / name, root)
        packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
        (root / "sitecustomize.py").write_text(_FINDER.format(folders=packages))
        for page in pages:
            self.apply((PAGES / page).read_text())

    def apply(self, text: str) -> None:
        for step in steps(text):
            file = self.root / step.path
            if step.new and step.path.startswith(PRODUCT) and file.exists():
                raise PageError(f"{step.path} exists already")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(step.text if step.new else patched(file.read_text(), step.text, step.path))

    def environment(self, **more: str) -> Mapping[str, str]:
        paths = os.pathsep.join(filter(None, (str(self.root), more.pop("PYTHONPATH", ""))))
        return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | more

    def python(self, *arguments: str, timeout: float = 200.0, fails: bool | None = False, **env: str) -> str:
        """What `python ARGUMENTS` prints, in the copy. fails: whether it has to fail; None: it may."""
        done = subprocess.run([sys.executable, *arguments], cwd=self.root, env=self.environment(**env),
                              capture_output=True, text=True, timeout=timeout)
        said = done.stdout + done.stderr
        assert fails is None or (done.returncode != 0) == fails, said
        return said

    def rlc(self, *arguments: str, fails: bool = False, **env: str) -> str:
        return self.python("-m", "rldsl.cli", *arguments, fails=fails, **env)

    def ranks(self, world: int, *arguments: str, timeout: float = 200.0, **env: str) -> None:
        """`torchrun -m rldsl.run ARGUMENTS`, without the agent."""
        self.together(world, "-m", "rldsl.run", *arguments, timeout=timeout, **env)

    def together(self, world: int, *arguments: str, timeout: float = 200.0, **env: str) -> None:
        """`python ARGUMENTS` as each rank of a world."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world)} | env
        ranks = [subprocess.Popen([sys.executable, *arguments], cwd=self.root, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  env=self.environment(**meet, RANK=str(r), LOCAL_RANK=str(r))) for r in range(world)]
        try:
            said = [p.communicate(timeout=timeout)[0] for p in ranks]
        finally:
            for p in ranks:
                p.kill()
        assert [p.returncode for p in ranks] == [0] * world, "\n".join(said)


def fences(text: str, language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
