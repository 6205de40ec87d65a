"""A model with adapters is what it says: what moves with it are the two factors of each target, and its head.

In: a model record. Out: diagnostics RL0612. The division that each factor must have is derived here once more, from
the weight that it belongs to: A is divided as the weight's columns are, B as its rows; a factor that is whole where
the other is divided gets a part of its gradient on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from rldsl.diag import Diagnostic
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.plan.model import Lora, Model, ParamSpec
from rldsl.verify.tables import problem

A, B = ".lora_A.weight", ".lora_B.weight"


def check_adapters(m: Model, lora: Lora) -> Iterator[Diagnostic]:
    if lora.r < 1 or not lora.alpha > 0 or not lora.targets:
        yield _bad(m, f"has rank {lora.r}, alpha {lora.alpha:g} and {len(lora.targets)} targets")
        return
    weights = {p.name.removesuffix(".weight"): p for p in m.base if p.name.endswith(".weight")}
    own = {p.name: p for p in m.params}
    modules = [p.name.removesuffix(A) for p in m.params if p.name.endswith(A)]
    named = {x for x in weights if any(f".{x}".endswith(f".{t}") for t in lora.targets) and len(weights[x].shape) == 2
             and weights[x].stage == "layer"}
    for x in sorted(named - set(modules)):
        yield _bad(m, f"has no adapter on {x}, although it is a target")
    allowed = {*(x + end for x in modules for end in (A, B)), SCORE_WEIGHT}
    for x in sorted(own.keys() - allowed):
        yield _bad(m, f"trains {x}, which is not an adapter")
    if m.head.vocabulary and SCORE_WEIGHT in own:
        yield _bad(m, f"trains {SCORE_WEIGHT}, which it does not have")
    for x in modules:
        a, b = own[x + A], own.get(x + B)
        if x not in named or b is None:
            yield _bad(m, f"has an adapter on {x}, which " + ("lacks a factor" if b is None else "is not a target"))
        elif not _fits(weights[x], a, b, lora):
            yield _bad(m, f"has an adapter on {x} with a shape or sharding that does not match")


def _fits(weight: ParamSpec, a: ParamSpec, b: ParamSpec, lora: Lora) -> bool:
    rows, columns = weight.shape[::-1] if lora.transposed else weight.shape
    if a.shape != (lora.r, columns) or b.shape != (rows, lora.r):
        return False
    if any((x.stage, x.layers, x.layer) != (weight.stage, weight.layers, weight.layer) for x in (a, b)):
        return False
    if any((x.style, x.experts, x.stored) != ("replicated", 0, ()) for x in (a, b)):
        return False
    split = weight.split
    side = None if split is None else (split.dim == 0) != lora.transposed  # whether the output is divided
    divided, whole = (b, a) if side else (a, b)
    if split is None or divided.split is None:
        return split is a.split is b.split and a.partial_grad == b.partial_grad == weight.partial_grad
    return (whole.split is None and whole.partial_grad and divided.split.parts == split.parts
            and divided.split.dim == (0 if side else 1) and divided.partial_grad == weight.partial_grad)


def _bad(m: Model, what: str) -> Diagnostic:
    return problem("RL0612", f"model {m.name} {what}")
