"""Forged plans with picks, pairs and the others of a prompt that the verifier refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Derive, Event, When, Item, Lengths, Loop, Train
from rldsl.plan.model import Plan
from rldsl.verify import verify
from tests.verify.mutate import projected
from tests.verify.plans import folder

PROGRAM = """
use std.simpo (simpo)
use py "rewards.py" (size: gen -> seq)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=8, max_prompt_tokens=16)
data further = jsonl("data/prompts.jsonl", batch=8, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
flow f(steps=2) {
  prompt = prompts.next()
  second = further.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6)   on mesh(0:4) dp=4
  more   = actor.generate(second, n=4, max_new_tokens=6)   on mesh(0:4) dp=4
  some   = gen where size(gen) > 1
  best   = pick(some, size(some))
  duel   = pair(pick(gen, size(gen)), pick(gen, -size(gen)))
  clear  = duel where size(duel.chosen) > 2
  other  = pair(pick(more, size(more)), pick(more, -size(more)))
  rival  = others(some)
  again  = actor.generate(more, max_new_tokens=4)   on mesh(0:4) dp=4
  full   = whole(again)
  metric best = mean(len(best)) + mean(len(rival)) + mean(len(full))
  actor.train(clear.chosen, clear.rejected, loss=simpo())   on mesh(0:4) dp=4
  actor.train(other.chosen, other.rejected, loss=simpo())   on mesh(0:4) dp=4
}
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    with folder() as here:
        (here / "f.rlf").write_text(PROGRAM)
        return api.compile("f.rlf")


def changed(plan: Plan, change: Callable[[Event], Event | None]) -> Plan:
    """The plan with each event changed, or left out; classes follow."""
    def block(items: tuple[Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in items:
            new = replace(item, body=block(item.body)) if isinstance(item, Loop | When) else change(item)
            out += [new] if new is not None else []
        return tuple(out)
    return projected(replace(plan, body=block(plan.body)))


def derived(frame: str, **changes: Any) -> Callable[[Plan], Plan]:
    def forge(plan: Plan) -> Plan:
        return changed(plan, lambda e: replace(e, **changes) if isinstance(e, Derive) and e.frame == frame else e)
    return forge


def framed(frame: str, **changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, frames=tuple(replace(f, **changes) if f.id == frame else f for f in plan.frames))


def divides_rows(frame: str) -> Callable[[Plan], Plan]:
    """Derived across ranks: each has some rows of every prompt."""
    def forge(plan: Plan) -> Plan:
        (made,) = (e for e in events(plan) if isinstance(e, Derive) and e.frame == frame)
        return replace(plan, spreads=tuple(replace(s, granularity="row") if s.id == made.spread else s
                                           for s in plan.spreads))
    return forge


def spaced(space: str, **changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, spaces=tuple(replace(s, **changes) if s.id == space else s for s in plan.spaces))


def events(plan: Plan) -> list[Event]:
    found: list[Event] = []
    changed(plan, lambda e: found.append(e) or e)  # type: ignore[func-returns-value]
    return found


def trained_on(*frames: str) -> Callable[[Plan], Plan]:
    """The first training reads these frames, under a spread that names them."""
    def forge(plan: Plan) -> Plan:
        train = next(e for e in events(plan) if isinstance(e, Train))
        swap = dict(zip(train.frames, frames, strict=True))

        def renamed(text: str) -> str:
            frame, dot, rest = text.rpartition(".")
            return f"{swap.get(frame, frame)}{dot}{rest}"
        made = changed(plan, lambda e: replace(
            e, frames=frames, reads=tuple(map(renamed, e.reads)),
            model_outputs=tuple((n, swap[f], w) for n, f, w in e.model_outputs)) if e is train else e)
        return replace(made, spreads=tuple(replace(s, frames=frames) if s.id == train.spread else s
                                           for s in plan.spreads))
    return forge


def without_lengths(frame: str) -> Callable[[Plan], Plan]:
    """Values of derived rows are read before anybody knows which rows there are."""
    return lambda plan: changed(plan, lambda e: None if isinstance(e, Lengths) and e.frame == frame else e)


FORGED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a pick whose prompts are divided": (divides_rows("best"), "RL0538"),
    "a pick from another frame": (derived("best", source="more"), "RL0615"),
    "a pick by a number of other rows": (derived("best", key="more.finished"), "RL0615"),
    "a pick without a number": (derived("best", key=""), "RL0615"),
    "a pick that is called a selection": (derived("best", op="where"), "RL0615"),
    "a selection that is called a pick": (derived("some", op="pick"), "RL0615"),
    "a picked frame that is no pick": (framed("best", picked_from=""), "RL0612"),
    "a pick from a frame of other prompts": (framed("best", picked_from="more"), "RL0612"),
    "a pick in the rows that it is picked from": (framed("best", row_space="some"), "RL0612"),
    "a pick that forgets which prompts have rows": (framed("best", present_in=""), "RL0615"),
    "a pick at another temperature": (framed("best", temperature=0.5), "RL0615"),
    "pairs of rows of different prompts": (trained_on("clear.chosen", "other.rejected"), "RL0612"),
    "pairs of which one side was selected": (trained_on("clear.chosen", "duel.rejected"), "RL0612"),
    "pairs of which other rows are present": (derived("clear.rejected", key="more.finished"), "RL0538"),
    "rows that are read before they exist": (without_lengths("best"), "RL0518"),
    "others whose prompts are divided": (divides_rows("rival"), "RL0538"),
    "others of another frame": (derived("rival", source="more"), "RL0615"),
    "others that are called a pick": (derived("rival", op="pick"), "RL0615"),
    "others that are called a selection": (derived("rival", op="where"), "RL0615"),
    "a pick that is called others": (derived("best", op="others"), "RL0615"),
    "others by a number": (derived("rival", key="more.finished"), "RL0615"),
    "others with a row too many": (spaced("rival", fan=4, count=128), "RL0615"),
    "others in the rows that they belong to": (framed("rival", row_space="some"), "RL0615"),
    "others that forget which rows are present": (framed("rival", present_in="some"), "RL0615"),
    "others that are all present": (framed("rival", present_in=""), "RL0615"),
    "others at another temperature": (framed("rival", temperature=0.5), "RL0615"),
    "a whole that does not read how long its last part is": (
        derived("full", also_reads=("more.logprobs",)), "RL0615"),
    "a selection with shorter responses": (framed("some", max_response_tokens=5), "RL0615"),
    "a selection with shorter prompts": (framed("clear.chosen", max_prompt_tokens=15), "RL0615"),
    "a selection at another temperature": (framed("some", temperature=0.5), "RL0615"),
    "a whole without its first part": (derived("full", parts=("again",), also_reads=()), "RL0615"),
    "a whole of other parts": (derived("full", parts=("gen", "again"), also_reads=("gen.logprobs",)), "RL0615"),
    "a whole whose parts are in another order": (derived("full", parts=("again", "more")), "RL0615"),
    "a whole of another frame": (derived("full", source="more"), "RL0615"),
    "a whole that reads less": (derived("full", also_reads=()), "RL0615"),
    "a whole with shorter responses": (framed("full", max_response_tokens=4), "RL0615"),
    "a whole with longer prompts": (framed("full", max_prompt_tokens=22), "RL0615"),
    "a whole at another temperature": (framed("full", temperature=0.5), "RL0615"),
    "a whole in other rows": (framed("full", row_space="gen"), "RL0615"),
    "a whole that some rows lack": (framed("full", present_in="some"), "RL0612"),
    "a whole that is read before it exists": (without_lengths("full"), "RL0518"),
    "a pick with parts": (derived("best", parts=("gen", "some")), "RL0615"),
    "others that are read before they exist": (without_lengths("rival"), "RL0518"),
}


def test_the_plan_is_good(plan: Plan) -> None:
    assert verify(decode(encode(plan), "f.plan")).events == len(events(plan))
    assert changed(plan, lambda e: e) == plan


@pytest.mark.parametrize("forge, code", FORGED.values(), ids=FORGED.keys())
def test_a_forged_plan_is_refused(plan: Plan, forge: Callable[[Plan], Plan], code: str) -> None:
    with pytest.raises(Failure) as refused:
        verify(forge(plan))
    assert code in {d.code for d in refused.value.diagnostics}, [str(d) for d in refused.value.diagnostics][:4]
