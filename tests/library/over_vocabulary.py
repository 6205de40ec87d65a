"""Losses of the library over whole distributions of the frame `gen`, compiled on their own."""

from __future__ import annotations

from rldsl.plan.entries import EntrySpace
from rldsl.plan.expr import Program
from rldsl.plan.heads import HEADS
from rldsl.semantics.errors import Bad
from rldsl.semantics.losses import bind_loss
from rldsl.semantics.terms import input_
from rldsl.semantics.values import LossUse
from tests.library.harness import Batch, Given, _compile

SPACE = {"gen.vocabulary": "gen"}  # the entry space of the whole vocabulary


def vocabulary_loss(modules: str, call: str, data: dict[str, Given | float] | None = None, text: str = "") -> Program:
    """The program of a loss whose argument `teacher` is a whole distribution. Otherwise as `harness.run_loss`."""
    batch = Batch.random(1, 4, 3)
    made = _compile(modules, call, batch, data or {}, text)
    made.exprs.spaces.entries["gen.vocabulary"] = EntrySpace("gen", 0)
    made.scope.names["teacher"] = input_("teacher", "entry", "gen.vocabulary", made.trees[0].span)
    use = made.meaning()
    if not isinstance(use, LossUse):
        raise ValueError(f"{call} is not a loss")
    bound = bind_loss(use, HEADS["causal_lm"], tuple(batch.frames.values()), "harness", made.exprs)
    made.errors.check()
    if isinstance(bound, Bad):
        raise ValueError(f"{call} is wrong")
    return bound.program
