"""Warnings about a program without errors: code that is valid, but most likely not what was meant.

In: the syntax trees of the program and of its placement file. Out: diagnostics of severity "warning": RL0901 a name
that nothing uses, RL0903 equality with a number that arithmetic seldom hits, RL0904 a model that follows one which
never changes, RL0905 a `repeat ... until` whose condition its block does not touch, RL0906 a flow that does nothing.
Rules of placement have their own (placement/lints.py). A name that begins with `_` may stay unused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rldsl.diag import Diagnostic, Label
from rldsl.syntax import ast


def lint(files: Sequence[ast.File]) -> tuple[Diagnostic, ...]:
    """The warnings, in the order of the text."""
    found = [d for f in files for d in (*_unused_declarations(f, files), *_unused_bindings(f), *_equalities(f),
                                        *_syncs_without_effect(f), *_idle_blocks(f))]
    order = {id(f.source): i for i, f in enumerate(files)}
    # a warning of a lint always has a span
    return tuple(sorted(found, key=lambda d: (order[id(d.span.file)], d.span.start)))  # type: ignore[union-attr]


def _unused_declarations(file: ast.File, files: Sequence[ast.File]) -> list[Diagnostic]:
    """Names of the file itself that are used in no file."""
    per_item = {id(item): set(_uses(item)) for f in files for item in f.items}
    used = Counter(name for names in per_item.values() for name in names)
    fields = {n.name.name for f in files for item in f.items for n in ast.walk(item) if isinstance(n, ast.Attribute)}
    found: list[Diagnostic] = []
    for item in file.items:
        match item:
            case ast.Use(names=names):
                found += [_unused(n, "imported here") for n in names if n.name not in used]
            case ast.UsePy(functions=functions):
                found += [_unused(fn.name, "imported here") for fn in functions if fn.name.name not in used]
            case ast.FnDecl(name=name) | ast.LossDecl(name=name):
                if used[name.name] == (name.name in per_item[id(item)]):  # by no other
                    found.append(_unused(name, "declared here"))
            case ast.State(name=name, data=ast.Ident()):
                if name.name not in fields:
                    found.append(_unused(name, "declared here"))
            case (ast.Param(name=name) | ast.State(name=name) | ast.MeshDecl(name=name) | ast.DataDecl(name=name)
                  | ast.ModelDecl(name=name)) if name.name not in used:
                found.append(_unused(name, "declared here"))
    return [d for d in found if not d.title.startswith("`_")]


def _unused_bindings(file: ast.File) -> list[Diagnostic]:
    """Names bound in a flow, function or loss that nothing there reads. Of `a, b = f(x)` one may stay unused."""
    states = {i.name.name for i in file.items if isinstance(i, ast.State)}
    found: list[Diagnostic] = []
    for item in file.items:
        if not isinstance(item, (ast.Flow, ast.FnDecl, ast.LossDecl)):
            continue
        used = set(_uses(item))
        for node in ast.walk(item):
            if isinstance(node, ast.Assign) and not any(
                    t.name in used or t.name in states or t.name.startswith("_") for t in node.targets):
                found.append(_unused(node.targets[0], "defined here"))
    return found


def _unused(ident: ast.Ident, label: str) -> Diagnostic:
    meant = f", or rename it to `_{ident.name}` if this is intended" if label != "imported here" else ""
    return Diagnostic("RL0901", f"`{ident.name}` is never used", ident.span, label, help=f"remove it{meant}",
                      severity="warning")


def _equalities(file: ast.File) -> Iterator[Diagnostic]:
    for item in file.items:
        for node in ast.walk(item):
            if isinstance(node, ast.Binary) and node.op in ("==", "!="):
                for side, other in ((node.left, node.right), (node.right, node.left)):
                    if isinstance(side, ast.Number) and isinstance(side.value, float) and not side.value.is_integer():
                        yield Diagnostic(
                            "RL0903", f"comparing rounded numbers with `{node.op} {side.span.text}`", node.span,
                            "arithmetic rarely gives exactly this number", (Label(side.span, "not an integer"),),
                            help=f"compare with a tolerance: `abs({other.span.text} - {side.span.text}) < 1e-6`",
                            severity="warning")


def _syncs_without_effect(file: ast.File) -> Iterator[Diagnostic]:
    """Models that take the parameters of others, none of which ever change."""
    moves = [n for item in file.items for n in ast.walk(item) if isinstance(n, (ast.Sync, ast.Ema))]
    declared = {i.name.name: i for i in file.items if isinstance(i, ast.ModelDecl)}
    changing = {name for name, d in declared.items() if d.optimizer is not None}
    while more := {m.target.name for m in moves if m.source.name in changing} - changing:
        changing |= more
    for m in moves:
        if m.target.name not in changing and m.source.name in declared:
            yield Diagnostic("RL0904",
                             f"`{m.source.name}` never changes, so copying it to `{m.target.name}` again has no effect",
                             m.source.span, "neither trained nor updated by a `sync`",
                             (Label(declared[m.source.name].span, "declared here"),),
                             help="copy from a model that is trained", severity="warning")


def _idle_blocks(file: ast.File) -> Iterator[Diagnostic]:
    """Flows that do nothing, and loops whose condition nothing in them can change."""
    for item in file.items:
        if isinstance(item, ast.Flow) and not item.body:
            yield Diagnostic("RL0906", "the flow does nothing", item.name.span, "empty block",
                             help="write the training step here, starting with `prompt = prompts.next()`",
                             severity="warning")
        for node in ast.walk(item):
            if isinstance(node, ast.RepeatUntil):
                bound = {t.name for s in ast.walk(node.body) if isinstance(s, ast.Assign) for t in s.targets}
                if not bound.intersection(_uses(node.condition)):
                    yield Diagnostic("RL0905", "this condition never changes", node.condition.span,
                                     "it uses nothing that the block computes",
                                     help="test what is collected, for example `count(kept) >= 512`",
                                     severity="warning")


def _uses(tree: ast.Tree) -> Iterator[str]:
    """Every name that is read somewhere in `tree`."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(name=name):
                yield name
            case ast.Save(models=models):
                yield from (m.name for m in models)
            case ast.Sync(target=target, source=source) | ast.Ema(target=target, source=source):
                yield from (target.name, source.name)
