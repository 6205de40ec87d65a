"""The row format of each data source: given by `kind=`, or else seen from how the flow uses its batches."""

from __future__ import annotations

from collections.abc import Mapping

from rldsl.graph import model as g
from rldsl.plan.heads import CALLS, GENERATE
from rldsl.syntax import ast

SIDES = ("chosen", "rejected")
ROWS = {"prompts": "prompts", "answers": "sequences", "pairs": "pairs"}  # row format -> the unit of its rows


def row_formats(flow: ast.Flow, data: Mapping[str, g.Data]) -> dict[str, str]:
    """Data source -> its row format. `.chosen` of a batch means pairs; a generation from it means prompts, even if the
    program also uses it in another, wrong way; another call on the rows themselves means answers."""
    trees = list(ast.walk(flow))
    batches = {t.targets[0].name: name for t in trees if isinstance(t, ast.Assign)
               for name in [_source(t.value)] if name in data}
    for t in trees:  # a selection of a batch is used as the batch is
        if (isinstance(t, ast.Assign) and (t.where is not None or t.named) and isinstance(t.value, ast.Name)
                and t.value.name in batches):
            batches[t.targets[0].name] = batches[t.value.name]
    seen: dict[str, set[str]] = {name: set() for name in data}
    for tree in trees:
        match tree:
            case ast.Attribute(value=ast.Name(name=batch), name=ast.Ident(name=side)) if batch in batches:
                if side in SIDES:
                    seen[batches[batch]].add("pairs")
            case ast.Call(func=ast.Attribute(name=ast.Ident(name=what)), args=args) if what in CALLS:
                for arg in args:
                    if arg.name is None and isinstance(arg.value, ast.Name) and arg.value.name in batches:
                        seen[batches[arg.value.name]].add("prompts" if what == GENERATE else "answers")
    strongest = ("pairs", "prompts", "answers")
    return {name: d.row_format or next((k for k in strongest if k in seen[name]), "prompts")
            for name, d in data.items()}


def _source(value: ast.Expr) -> str:
    """D of `D.next()`."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(name=name), name=ast.Ident(name="next"))):
            return name
    return ""
