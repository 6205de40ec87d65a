"""The program of a run, as its checkpoints name it, and what has changed in it when a run resumes.

In: a plan. Out: facts for the manifest; from two sets of facts, lines for the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rldsl.plan.model import Plan
from rldsl.source import COMMAND_LINE


def program_identity(plan: Plan) -> dict[str, Any]:
    """What a checkpoint says of its program, so that a run that resumes from it can report what has changed."""
    header = plan.header
    functions = {f.path: f.sha256 for f in plan.functions}
    functions |= {path: sha256 for f in plan.functions for _, path, sha256 in f.modules}  # which these files import
    return {"sources": dict(header.sources), "functions": functions, "params": dict(header.params),
            "seed": header.seed}


def program_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What has changed in a program; a file under another name is the same file."""
    for name, value in now["params"].items():
        before = then["params"].get(name)
        if before != value:
            yield f"param {name}: {'none' if before is None else before} -> {value}"
    yield from (f"param {name}: {value} -> none" for name, value in then["params"].items()
                if name not in now["params"])
    for kind in ("sources", "functions"):
        before, after = dict(then.get(kind, now[kind])), dict(now[kind])
        for name in [*after, *(n for n in before if n not in after)]:
            old, new = before.get(name), after.get(name)
            moved = old is None and new in before.values() or new is None and old in after.values()
            if old != new and not moved:
                shown = "`--on` rules" if name == COMMAND_LINE else name
                yield f"{shown}: {_short(old)} -> {_short(new)}"
    if then["seed"] != now["seed"]:
        yield f"seed: {then['seed']} -> {now['seed']}; the rest of a shuffled epoch is read in a different order"


def _short(digest: Any) -> str:
    return "missing" if digest is None else str(digest)[:8]
