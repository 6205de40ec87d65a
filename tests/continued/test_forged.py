"""Plans with continuations that were changed by hand: the verifier refuses each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rldsl import api
from rldsl.plan.events import Compute, Event, Generate, Lengths, Train, Transfer
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from tests.selection.programs import folder
from tests.verify.faults import change, codes, edited, row, with_body

PROGRAM = """
data prompts = jsonl("prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("model") train adamw(lr=0.01)
loss nll(logprobs: token; weight: seq) { return -mean(weight * mean(logprobs by seq)) }
flow f(steps=2) {
  prompt = prompts.next()
  gen  = actor.generate(prompt, n=3, max_new_tokens=5)
  more = actor.generate(gen, n=2, max_new_tokens=4)
  v    = mean(len(more) by prompt)
  own  = len(gen) + v - mean(v by prompt)
  actor.train(more, loss=nll(weight=own))
  metric own = mean(own)
}
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    base = folder(tmp_path_factory.mktemp("forged"))
    (base / "p.rlf").write_text(PROGRAM)
    (base / "place.rlf").write_text(
        "place @gen on mesh(0:2) dp=2\nplace @more on mesh(0:4) dp=4\nplace actor.train on mesh(0:4) dp=2 tp=2\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        return api.compile("p.rlf", {}, "place.rlf")


def more(plan: Plan) -> Generate:
    return next(e for e, _ in event_paths(plan) if isinstance(e, Generate) and e.frame == "more")


def space(plan: Plan, name: str, **new: object) -> Plan:
    return row(plan, "spaces", [s.id for s in plan.spaces].index(name), **new)


def frame(plan: Plan, name: str, **new: object) -> Plan:
    return row(plan, "frames", [f.id for f in plan.frames].index(name), **new)


def node(plan: Plan, op: str, **new: object) -> Plan:
    """Another field of the first reduction `op` to sequences."""
    for i, p in enumerate(plan.programs):
        at = next((k for k, n in enumerate(p.nodes) if n.op == op and n.level == "seq" and n.attr("to")), None)
        if at is not None:
            return row(plan, "programs", i, nodes=(*p.nodes[:at], replace(p.nodes[at], **new), *p.nodes[at + 1 :]))
    raise AssertionError(f"no {op}")


FORGED: dict[str, Callable[[Plan], Plan]] = {
    "from the prompts": lambda p: change(p, more(p).id, prompts="prompt"),
    "of itself": lambda p: change(p, more(p).id, prompts="more"),
    "another number of each": lambda p: change(p, more(p).id, sampling=replace(more(p).sampling, n=3)),
    "below the prompts": lambda p: space(p, "more", parent="prompt", fan=6),
    "another fan": lambda p: space(p, "more", fan=3),
    "fewer rows": lambda p: space(p, "more", count=12),
    "its own root": lambda p: space(p, "more", parent="", fan=1),
    "shorter texts": lambda p: frame(p, "more", max_prompt_tokens=16),
    "longer texts": lambda p: frame(p, "more", max_prompt_tokens=22),
    "parents without responses": lambda p: frame(p, "gen", max_response_tokens=0),
    "a reduction to the prompts": lambda p: node(p, "mean", space="prompt"),
    "a reduction to itself": lambda p: node(p, "mean", space="more"),
    "a reduction called one to prompts": lambda p: node(p, "mean", level="prompt"),
    "lengths of the parents not exchanged": lambda p: dropped(p, lambda e: isinstance(e, Lengths) and e.frame == "gen"),
    "texts of the parents not sent": lambda p: dropped(
        p, lambda e: isinstance(e, Transfer) and "gen.tokens" in e.values),
    "before the parents": lambda p: swapped(p),
}


def dropped(plan: Plan, which: Callable[[Event], bool]) -> Plan:
    ids = {e.id for e, _ in event_paths(plan) if which(e)}
    return with_body(plan, edited(plan.body, lambda e: () if e.id in ids else (e,)))


def swapped(plan: Plan) -> Plan:
    """The continuation in the place of what it continues, and the reverse."""
    first, second = [e for e, _ in event_paths(plan) if isinstance(e, Generate)]
    places = {first.id: second, second.id: first}
    return with_body(plan, edited(plan.body, lambda e: (places.get(e.id, e),)))


def test_the_plan_itself_is_sound(plan: Plan) -> None:
    assert not codes(plan)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_plan_is_refused_with_a_code(plan: Plan, name: str) -> None:
    forged = FORGED[name](plan)
    assert forged != plan
    found = codes(forged)
    assert found and all(code.startswith("RL") for code in found)


def test_the_reduction_divides_by_the_rows_that_are_continued(plan: Plan) -> None:
    """All continuations of a sequence are on one rank where their mean is taken."""
    for e, _ in event_paths(plan):
        if isinstance(e, Compute) and "more" in e.frames:
            spread = next(s for s in plan.spreads if s.id == e.spread)
            assert spread.granularity in ("prompt", "all")
        if isinstance(e, Train):
            assert e.frames == ("more",)
