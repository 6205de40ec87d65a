"""What `benchmarks/` imports from this repository exists: most of its files are run by hand, and rarely."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks").rglob("*.py"))
OURS = ("rldsl", "tests", "benchmarks", "examples")


def test_there_are_files() -> None:
    assert len(FILES) > 20


def exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # it would be in a module, not in a package
        return False


def missing(text: str) -> list[str]:
    """Names that the imports of a file ask for and that are not there. Only modules of this repository."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in OURS and not exists(a.name)]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            module = import_module(str(node.module))
            found += [f"{node.module}.{a.name}" for a in node.names
                      if not hasattr(module, a.name) and not exists(f"{node.module}.{a.name}")]
    return found


@pytest.mark.parametrize("path", FILES)
def test_what_a_benchmark_imports_exists(path: str) -> None:
    assert not missing((ROOT / path).read_text())


def test_a_name_that_moved_is_found() -> None:
    assert missing("from rldsl.source import SourceFile, Moved\nfrom pathlib import Nothing") == ["rldsl.source.Moved"]
