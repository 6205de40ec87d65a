"""`pip install rldsl` without extras: what needs no model works, and what needs more says which extra brings it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rldsl.extras import DISTRIBUTION_OF, EXTRA_OF, missing_package
from tests.api.programs import make_files

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = {distribution: name for name, distribution in DISTRIBUTION_OF.items()}
TOOLS = {"dev", "docs", "bench"}  # extras for people who work on rldsl itself
# runs `rlc` with each list of arguments, in an interpreter that has none of the optional packages
SCRIPT = """
import json, sys
from importlib.abc import MetaPathFinder
from rldsl.extras import EXTRA_OF
class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRA_OF:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from click.testing import CliRunner
from rldsl.cli import main
import rldsl.lsp.server
ended = [CliRunner().invoke(main, args) for args in json.loads(sys.argv[1])]
print(json.dumps([[e.exit_code, e.output] for e in ended]))
"""


def distributions(extra: str) -> set[str]:
    """Packages that an extra lists itself, by the names under which they are imported."""
    found = {re.split(r"[><=;\[ ]", text)[0] for text in PROJECT["optional-dependencies"][extra]}
    return {NAMES.get(name, name) for name in found if name != "rldsl"}


def test_the_table_is_what_pyproject_says() -> None:
    extras = set(PROJECT["optional-dependencies"]) - TOOLS
    assert {p: e for e in extras for p in distributions(e)} == EXTRA_OF


def test_all_brings_every_extra_of_users() -> None:
    def closure(extra: str) -> set[str]:
        inner = {name for text in PROJECT["optional-dependencies"][extra] if (m := re.match(r"rldsl\[(.*)\]", text))
                 for name in m[1].split(",")}
        return {extra}.union(*map(closure, inner))

    assert closure("all") == set(PROJECT["optional-dependencies"]) - TOOLS - {"flash", "lsp", "openenv", "verifiers", "vllm"}


def test_without_extras(tmp_path: Path) -> None:
    make_files(tmp_path)
    works = [["check", "small.rlf"], ["fmt", "--diff", "small.rlf"], ["graph", "small.rlf"], ["explain", "RL0097"],
             ["new", "grpo"], ["runs", "."], ["--help"]]
    refused = [["compile", "--place", "search", "small.rlf"], ["profile", "small.rlf"],
               ["compile", "small.rlf", "--set", "base=lab/none"],  # the Hub would be asked
               ["compile", "small.rlf", "--json", "--set", "base=models/other"]]
    shutil.copytree(tmp_path / "models/tiny", tmp_path / "models/other")
    config = json.loads((tmp_path / "models/tiny/config.json").read_text())
    config |= {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}  # needs transformers to be described
    (tmp_path / "models/other/config.json").write_text(json.dumps(config))
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(works + refused)], cwd=tmp_path, text=True,
                          capture_output=True, check=True,
                          env={"RLDSL_CACHE": "off", "PATH": "", "HOME": str(tmp_path)})
    ended = dict(zip(map(" ".join, works + refused), json.loads(done.stdout), strict=True))
    for command in works:
        assert ended[" ".join(command)][0] == 0, ended[" ".join(command)]
    for command in refused:
        status, output = ended[" ".join(command)]
        assert status == 1 and "RL0097" in output and "rldsl[" in output, output
    assert json.loads(ended[" ".join(refused[-1])][1])["diagnostics"][0]["code"] == "RL0097"


@pytest.mark.parametrize("name", ["numbr", "lark", None])
def test_other_modules_are_no_extra(name: str | None) -> None:
    assert missing_package(ModuleNotFoundError(name=name)) is None
