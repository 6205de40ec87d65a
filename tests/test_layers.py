"""Imports point one way (DESIGN 8): read from the sources, so that a lazy import counts too."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAVES = {"source", "diag", "progress", "garbage_collection", "signals", "threads"}
PLAN = LEAVES | {"plan"}
PLACED = PLAN | {"sharding", "reshard"}
COMPILER = {"syntax", "semantics", "graph", "models", "placement", "passes"}
RUNTIME = {"runtime", "runtime.message_file", "runtime.parent", "runtime.comm", "runtime.data", "runtime.state",
           "runtime.rewards", "runtime.environments", "runtime.persist", "runtime.health", "runtime.metrics",
           "runtime.interpreter"}
TORCH_BACKEND = {"backends", "backends.torch", "backends.torch.kernels", "backends.torch.model",
                 "backends.torch.train", "backends.torch.generate"}
# package or module -> what of ours it may import besides itself
ALLOWED: dict[str, set[str]] = {
    "source": set(), "progress": set(), "garbage_collection": set(), "signals": set(), "highlight": set(), "explain": set(),
    "starters": set(), "output_format": set(),
    "diag": {"source"}, "threads": {"source", "diag"}, "report": LEAVES, "fix": LEAVES, "files": LEAVES, "extras": LEAVES,
    # the plan and what is derived from it alone
    "plan": LEAVES,
    "sharding": PLAN,
    "reshard": PLAN | {"sharding"},
    "memory": PLACED,
    "models": PLAN | {"extras", "files"},
    "verify": PLACED | {"memory", "models"},
    "inspect": PLAN,
    "postmortem": PLAN | {"sharding"},
    "clusters": LEAVES,
    "simulate": PLACED | {"memory", "clusters"},
    "pages": PLAN | {"inspect", "memory", "verify", "clusters", "simulate"},
    # the compiler
    "syntax": LEAVES,
    "semantics": PLAN | {"syntax"},
    "graph": PLAN | {"syntax", "semantics", "clusters"},
    "placement": PLACED | {"graph", "models"},
    "passes": PLACED | {"graph", "placement", "memory", "verify"},
    "search": PLACED | {"graph", "models", "placement", "passes", "memory", "verify", "clusters", "simulate"},
    # the runtime
    "runtime": PLAN | {"sharding", "runtime.environments"},
    "runtime.parent": LEAVES, "runtime.local_ranks": LEAVES,
    "runtime.message_file": LEAVES | {"report"},
    "runtime.launch": LEAVES | {"runtime.message_file", "runtime.parent", "runtime.local_ranks"},
    "runtime.comm": PLACED | {"runtime"},
    "runtime.data": PLAN | {"sharding", "runtime"},
    "runtime.rewards": PLAN,
    "runtime.environments": PLAN | {"runtime.rewards"},
    "runtime.state": PLACED | {"runtime", "runtime.comm", "runtime.data"},
    "runtime.health": PLAN | {"postmortem", "report", "runtime", "runtime.message_file", "runtime.parent"},
    "runtime.persist": PLACED | {"runtime", "runtime.comm", "runtime.data", "runtime.rewards", "runtime.state"},
    "runtime.metrics": PLAN | {"runtime", "runtime.data", "runtime.environments", "runtime.rewards", "runtime.state"},
    "runtime.interpreter": PLACED | {"models", "report", "verify"} | RUNTIME,
    "run": PLAN | {"report"} | RUNTIME,
    "measure": PLAN | {"sharding"} | RUNTIME,
    "backends.torch.kernels": PLAN | {"files", "memory", "runtime"},
    "backends.torch.model": PLACED | {"memory", "models", "runtime", "backends.torch.kernels"},
    "backends.torch.train": PLACED | {"runtime", "backends.torch.kernels", "backends.torch.model"},
    "backends.torch.generate": PLACED | {"memory", "runtime", "runtime.data", "runtime.environments", "backends.torch.kernels",
                                         "backends.torch.model"},
    "backends.torch": PLACED | {"runtime"} | TORCH_BACKEND,
    "backends.megatron": PLACED | {"runtime"} | TORCH_BACKEND,
    "backends.vllm": PLACED | {"memory", "runtime"} | TORCH_BACKEND,
    # what users touch
    "api": PLAN | COMPILER | {"files", "search"},
    "preview": PLAN | {"passes", "memory"},
    "python": PLAN | COMPILER | {"api", "clusters", "extras", "files", "inspect", "memory", "pages", "preview",
                                 "report", "runtime.message_file", "runtime.metrics", "search", "simulate", "verify"},
    "notebook": LEAVES | {"api", "files", "python"},
    "lsp": PLAN | COMPILER | {"api", "clusters", "explain", "memory", "simulate"},
    "commands": PLAN | COMPILER | {"api", "clusters", "extras", "files", "fix", "inspect", "lsp", "pages", "postmortem",
                                   "python", "report", "runtime.message_file", "runtime.metrics",
                                   "search", "simulate", "starters", "verify"},
    "cli": PLAN | {"api", "clusters", "commands", "explain", "extras", "files", "output_format", "report", "search",
                   "simulate", "syntax", "verify"},
    "rlc": {"cli", "garbage_collection", "output_format"},
}
TORCH = {"torch", "transformers", "safetensors", "tokenizers", "accelerate", "flash_attn"}
MAY_TORCH = {"runtime", "backends", "run", "measure"}
LAZY_TORCH = {"models", "python"}
NOT_CODE = {"grammar", "stdlib"}  # packages of files that anything may read


def part(module: str) -> str:
    """The package of a module of ours, as `ALLOWED` names it: "rldsl.runtime.data.rows" -> "runtime.data"."""
    path = module.split(".")[1:]
    return next((name for n in range(len(path), 0, -1) if (name := ".".join(path[:n])) in ALLOWED), ".".join(path[:1]))


def sources() -> list[tuple[str, Path]]:
    """(part, file) of everything that is ours."""
    files = [("rldsl", p, p.relative_to(ROOT)) for p in (ROOT / "rldsl").rglob("*.py")]
    files += [("backends", p, Path("rldsl") / p.relative_to(ROOT)) for p in (ROOT / "backends").rglob("*.py")]
    found = [(part(".".join(name.with_suffix("").parts)), path) for _, path, name in files]
    return sorted((part, path) for part, path in found if part not in ("__init__", "backends"))


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


@pytest.mark.parametrize("part_, path", sources(), ids=lambda x: str(x.relative_to(ROOT)) if isinstance(x, Path) else x)
def test_imports_point_one_way(part_: str, path: Path) -> None:
    for module, top, types in imports(ast.parse(path.read_text())):
        first = module.partition(".")[0]
        if first == "rldsl" and (target := part(module)) not in NOT_CODE:
            assert target in ALLOWED[part_] | {part_}, f"{path.name} ({part_}) imports {module}"
        if first in TORCH and not types:
            may = part_.partition(".")[0] in MAY_TORCH or (part_ in LAZY_TORCH and not top)
            assert may, f"{path.name} ({part_}) imports {module}"
        if first == "click":
            assert part_ == "cli", f"{path.name} imports click"
        if first == "pickle":
            raise AssertionError(f"{path.name} imports pickle")


def test_an_import_is_seen_wherever_it_stands() -> None:
    tree = ast.parse("import a\nif TYPE_CHECKING:\n    from b import c\ndef f():\n    import d.e\n")
    assert imports(tree) == [("a", True, False), ("b.c", True, True), ("d.e", False, False)]


def test_the_table_has_no_cycles_and_names_every_package() -> None:
    graphlib.TopologicalSorter({a: allowed - {a} for a, allowed in ALLOWED.items()}).prepare()  # raises CycleError
    assert {part for part, _ in sources()} == set(ALLOWED)
