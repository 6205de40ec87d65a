"""What a page docs/howto/add-*.md asks to write, applied to a copy of the repository.

A fence ```diff begins with a line `--- PATH`: its lines that begin with a space or a minus are in the file, exactly
once, and are replaced by those that begin with a space or a plus. A fence after `<!-- file: PATH -->` is a new file.
Programs run on a copy in processes of their own, whatever this process has imported. Those that need torch are forked
from the server of `tests/world.py`, where it is loaded, and import rldsl anew, from the copy.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rldsl.runtime.local_ranks import held_port
from tests import forked

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/howto"
FOLDERS = ("rldsl", "backends", "grammar", "stdlib", "tests", "examples", "docs")
FILES = ("README.md", "Makefile", "mkdocs.yml", "pyproject.toml")
PRODUCT = ("rldsl/", "backends/")
OWN = ("rldsl", "tests", "examples")  # the top-level packages of a copy

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

    @contextmanager
    def changed(self, path: str, old: str, new: str) -> Iterator[None]:
        """In the block, a file has `new` for `old`."""
        file = self.root / path
        text, times = file.read_text(), file.stat()
        assert old in text
        try:
            file.write_text(text.replace(old, new))
            yield
        finally:
            file.write_text(text)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # the bytecode of the change is not taken for its

    def python(self, *arguments: str, timeout: float = 200.0, fails: bool | None = False, **env: str) -> str:
        """What `python ARGUMENTS` prints, in the copy. fails: whether it has to fail; None: it may."""
        done = subprocess.run([sys.executable, *arguments], cwd=self.root, env=self.environment(**env),
                              capture_output=True, text=True, timeout=timeout)
        said = done.stdout + done.stderr
        assert fails is None or (done.returncode != 0) == fails, said
        return said

    def rlc(self, *arguments: str, fails: bool = False, **env: str) -> str:
        return self.python("-m", "rldsl.cli", *arguments, fails=fails, **env)

    def run(self, *arguments: str, fails: bool = False, **env: str) -> str:
        """`python -m rldsl.run ARGUMENTS`, in a world of one."""
        return self.forked("rldsl.run", *arguments, fails=fails, **env)

    def forked(self, module: str, *arguments: str, fails: bool = False, **env: str) -> str:
        """What `python -m MODULE ARGUMENTS`, or `python FILE.py ARGUMENTS`, prints."""
        done = forked.command(module, *arguments, timeout=200.0, env=self.environment(**env), before=self._enter)
        said = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, said
        return said

    def _enter(self) -> None:
        """In a forked process, instead of a new interpreter's start."""
        for name, module in sys.modules.items():
            if name.partition(".")[0] in OWN and hasattr(module, "_OPERATORS"):
                module._OPERATORS._destroy()  # the copy registers its own under the same names
        for name in [x for x in sys.modules if x.partition(".")[0] in OWN]:
            del sys.modules[name]
        os.chdir(self.root)
        sys.path[:] = [str(self.root), *os.environ["PYTHONPATH"].split(os.pathsep),
                       *(x for x in sys.path if x and Path(x) != ROOT)]
        sys.dont_write_bytecode = False
        runpy.run_path(str(self.root / "sitecustomize.py"))
        importlib.invalidate_caches()

    def ranks(self, world: int, *arguments: str, **env: str) -> None:
        """`torchrun -m rldsl.run ARGUMENTS`, without the agent."""
        self.together(world, "rldsl.run", *arguments, **env)

    def together(self, world: int, module: str, *arguments: str, **env: str) -> None:
        """`python -m MODULE ARGUMENTS`, or `python FILE.py ARGUMENTS`, as each rank of a world."""
        with held_port() as port, ThreadPoolExecutor(world) as ranks:
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(world)} | env
            list(ranks.map(lambda rank: self.forked(module, *arguments, **meet, RANK=str(rank), LOCAL_RANK=str(rank)),
                           range(world)))


def fences(text: str, language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
