"""Plans with prefixes that were changed by hand: the verifier refuses each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rldsl import api
from rldsl.plan.events import Derive, Generate, Lengths
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from tests.continued.test_forged import dropped, frame, space
from tests.selection.programs import folder
from tests.verify.faults import change, codes, row

PROGRAM = """
data prompts = jsonl("prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("model") train adamw(lr=0.01)
loss nll(logprobs: token; weight: token) { return -mean(weight * logprobs) }
flow f(steps=2) {
  prompt = prompts.next()
  gen   = actor.generate(prompt, n=2, max_new_tokens=6)
  cuts  = prefixes(gen, every=2, most=3)
  tails = actor.generate(cuts, n=2, max_new_tokens=4)
  v     = mean(len(tails) by prompt)
  good  = gen where len(gen) > 2
  adv   = along(next(v by prompt) + at_end(len(gen), cuts) - v + cuts.at, gen) + over(len(good), gen, 1)
  actor.train(gen, loss=nll(weight=adv))
}
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    base = folder(tmp_path_factory.mktemp("forged"))
    (base / "p.rlf").write_text(PROGRAM)
    (base / "place.rlf").write_text(
        "place @gen on mesh(0:2) dp=2\nplace @tails on mesh(0:4) dp=4\nplace actor.train on mesh(0:4) dp=2 tp=2\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        return api.compile("p.rlf", {}, "place.rlf")


def cut(plan: Plan, **new: object) -> Plan:
    return change(plan, next(e for e, _ in event_paths(plan) if isinstance(e, Derive)).id, **new)


def node(plan: Plan, op: str, **new: object) -> Plan:
    """Other fields of the first node `op`. attrs: by name, instead of those with the same names."""
    for i, p in enumerate(plan.programs):
        at = next((k for k, n in enumerate(p.nodes) if n.op == op), None)
        if at is None:
            continue
        old = p.nodes[at]
        if "attrs" in new:
            new["attrs"] = tuple((dict(old.attrs) | dict(new["attrs"])).items())  # type: ignore[call-overload]
        return row(plan, "programs", i, nodes=(*p.nodes[:at], replace(old, **new), *p.nodes[at + 1 :]))
    raise AssertionError(f"no {op}")


FORGED: dict[str, Callable[[Plan], Plan]] = {
    "in two ways": lambda p: cut(p, cut_at="a"),
    "in no way": lambda p: cut(p, cut_every=0),
    "every so many below none": lambda p: cut(p, cut_every=-2),
    "at the end": lambda p: cut(p, cut_every=0, cut_fractions=(0.5, 1.0)),
    "in another order": lambda p: cut(p, cut_every=0, cut_fractions=(0.5, 0.25)),
    "of the prompts": lambda p: cut(p, source="prompt"),
    "as others": lambda p: cut(p, op="others"),
    "as a text": lambda p: cut(p, op="text"),
    "with a key": lambda p: cut(p, key="cuts.at"),
    "below the prompts": lambda p: space(p, "cuts", parent="prompt", fan=6),
    "another fan": lambda p: space(p, "cuts", fan=2),
    "another count": lambda p: space(p, "cuts", count=16),
    "shorter than what is cut": lambda p: frame(p, "cuts", max_prompt_tokens=16),
    "with a response": lambda p: frame(p, "cuts", max_response_tokens=4),
    "all present": lambda p: frame(p, "cuts", present_in=""),
    "at another temperature": lambda p: frame(p, "cuts", temperature=0.5),
    "a selection": lambda p: frame(p, "cuts", selected_from="gen"),
    "lengths of the prefixes not exchanged": lambda p: dropped(
        p, lambda e: isinstance(e, Lengths) and e.frame == "cuts"),
    "never cut": lambda p: dropped(p, lambda e: isinstance(e, Derive)),
    "continued from themselves": lambda p: change(
        p, next(e.id for e, _ in event_paths(p) if isinstance(e, Generate) and e.frame == "tails"), prompts="tails"),
    "along other sequences": lambda p: node(p, "along", space="tails", attrs=(("frame", "tails"),)),
    "along with one argument": lambda p: node(p, "along", args=(0,)),
    "the next of other sequences": lambda p: node(p, "next_row", space="tails"),
    "the next of rows that are not there": lambda p: node(p, "next_row", space="nothing"),
    "values of a selection of other rows": lambda p: node(p, "over", space="cuts"),
    "a default per row": lambda p: node(p, "over", args=(0, 0)),
    "the next at another level": lambda p: node(p, "next_row", level="prompt"),
}


def test_the_plan_itself_is_sound(plan: Plan) -> None:
    assert not codes(plan)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_plan_is_refused_with_a_code(plan: Plan, name: str) -> None:
    forged = FORGED[name](plan)
    assert forged != plan
    found = codes(forged)
    assert found and all(code.startswith("RL") for code in found)
