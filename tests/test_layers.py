"""Imports point one way (DESIGN 8): read from the sources, so that a lazy import counts too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAVES = {"source", "diag"}
# part -> the parts of ours that it may import
ALLOWED = {
    "source": set(), "diag": {"source"}, "report": LEAVES, "fix": LEAVES, "files": LEAVES, "explain": {"explain"},
    "plan": LEAVES | {"plan"},
    "syntax": LEAVES | {"syntax", "grammar"},
    "semantics": LEAVES | {"syntax", "semantics", "plan", "stdlib"},
    "graph": LEAVES | {"syntax", "semantics", "graph", "plan", "stdlib", "clusters"},
    "clusters": LEAVES | {"clusters"}, "simulate": LEAVES | {"plan", "clusters", "simulate"},
    "pages": LEAVES | {"plan", "clusters", "simulate", "pages"},
    "placement": LEAVES | {"graph", "placement", "plan"},
    "passes": LEAVES | {"graph", "placement", "passes", "plan"},
    "search": LEAVES | {"graph", "placement", "passes", "plan", "clusters", "simulate", "search"},
    "runtime": LEAVES | {"plan", "runtime", "backends", "report"},
    "run": LEAVES | {"plan", "runtime", "report"},
    "measure": LEAVES | {"plan", "runtime", "backends", "measure"},
    "backends": LEAVES | {"plan", "runtime", "backends"},
}
TORCH = {"torch", "transformers", "safetensors", "tokenizers", "accelerate", "flash_attn"}
MAY_TORCH = {"runtime", "backends", "run", "measure"}
LAZY_TORCH = {"placement"}


def sources() -> list[tuple[str, Path]]:
    """(part, file) of everything that is ours."""
    found = [(p.relative_to(ROOT / "rldsl").parts[0].removesuffix(".py"), p) for p in (ROOT / "rldsl").rglob("*.py")]
    found += [("backends", p) for p in (ROOT / "backends").rglob("*.py")]
    return sorted((part, path) for part, path in found if part != "__init__")


def imports(tree: ast.AST) -> list[tuple[str, bool, bool]]:
    """(module, at the top of the file, for type checkers only)"""
    found: list[tuple[str, bool, bool]] = []

    def visit(node: ast.AST, top: bool, types: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((a.name, top, types) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, "imports are absolute"
                found.extend((f"{child.module}.{a.name}", top, types) for a in child.names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typed = isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"
            visit(child, top and not inside, types or typed)

    visit(tree, True, False)
    return found


@pytest.mark.parametrize("part, path", sources(), ids=lambda x: str(x.relative_to(ROOT)) if isinstance(x, Path) else x)
def test_imports_point_one_way(part: str, path: Path) -> None:
    for module, top, types in imports(ast.parse(path.read_text())):
        first, *rest = module.split(".")
        if first == "rldsl" and part in ALLOWED:
            assert rest and rest[0] in ALLOWED[part], f"{path.name} ({part}) imports {module}"
        if first in TORCH and not types:
            assert part in MAY_TORCH or (part in LAZY_TORCH and not top), f"{path.name} ({part}) imports {module}"
        if first == "click":
            assert part == "cli", f"{path.name} imports click"
        if first == "pickle":
            raise AssertionError(f"{path.name} imports pickle")


def test_an_import_is_seen_wherever_it_stands() -> None:
    tree = ast.parse("import a\nif TYPE_CHECKING:\n    from b import c\ndef f():\n    import d.e\n")
    assert imports(tree) == [("a", True, False), ("b.c", True, True), ("d.e", False, False)]
