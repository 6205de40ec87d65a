"""Plans with carried responses that no compiler would write are refused, with a code; and programs that make no sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.events import Fetch, Generate, Item, Loop, When
from rldsl.plan.model import Plan
from rldsl.verify import verify
from tests.carried.programs import MORE
from tests.carried.test_placements import LAGGED
from tests.end_to_end.test_invariance import HERE
from tests.tiny import make_all


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("forged")
    tiny = make_all(folder / "tiny")
    (folder / "recorder.py").write_text((HERE / "rewards_small.py").read_text())
    (folder / "carried.rlf").write_text(MORE.format(flow=", lag=1", more=""))
    (folder / "place.rlf").write_text(LAGGED["disjoint"])
    return api.compile(str(folder / "carried.rlf"), {"base": str(tiny / "models/sft"),
                                                     "rows": str(tiny / "data/prompts.jsonl")},
                       str(folder / "place.rlf"))


def again(e: Item) -> bool:
    return isinstance(e, Fetch) and bool(e.newest)


def carrying(e: Item) -> bool:
    return isinstance(e, Generate) and bool(e.per_step)


def changed(which: Callable[[Item], bool], **fields: Any) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        body = tuple(replace(x, body=tuple(replace(e, **fields) if which(e) else e for e in x.body))  # type: ignore
                     if isinstance(x, Loop) else x for x in plan.body)
        assert body != plan.body
        return replace(plan, body=body)
    return change


def record(table: str, which: str, **fields: Any) -> Callable[[Plan], Plan]:
    """A record of a plan with other fields. which: its id, or the beginning of it."""
    def change(plan: Plan) -> Plan:
        records = getattr(plan, table)
        made = tuple(replace(r, **fields) if r.id == which else r for r in records)
        assert made != records
        return replace(plan, **{table: made})
    return change


def sampled(**fields: Any) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        loop = next(x for x in plan.body if isinstance(x, Loop))
        sampling = next(e for e in loop.body if carrying(e)).sampling  # type: ignore[union-attr]
        return changed(carrying, sampling=replace(sampling, **fields))(plan)
    return change


def in_a_block(which: Callable[[Item], bool]) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        body = tuple(replace(x, body=tuple(When(2, (e,)) if which(e) else e for e in x.body))
                     if isinstance(x, Loop) else x for x in plan.body)
        return replace(plan, body=body)
    return change


def spread(plan: Plan) -> Plan:
    """Responses are divided by count, as if they began anew in each step."""
    id = next(e.spread for x in plan.body if isinstance(x, Loop) for e in x.body if carrying(e))  # type: ignore
    return record("spreads", id, balance_by="count")(plan)


FORGED = {
    "half a part in each step": changed(carrying, per_step=1),
    "longer parts": changed(carrying, per_step=5),
    "all in one step": changed(carrying, per_step=0),
    "a negative part": changed(carrying, per_step=-3),
    "no response takes so long": sampled(max_new_tokens=6),
    "longer responses": sampled(max_new_tokens=12),
    "responses move": spread,
    "prompts of one step": changed(again, newest=""),
    "prompts of another batch": changed(again, newest="asked"),
    "no batch": changed(again, newest="short"),
    "every second batch is left out": changed(again, stride=1),
    "a stride of none": changed(again, stride=0),
    "batches of the future": changed(again, stride=-2),
    "begins in every second step": in_a_block(carrying),
    "fetched in every second step": in_a_block(again),
    "prompts of fewer steps": record("spaces", "gen.rollouts.prompts", iterations=1),
    "nothing says which rows there are": record("frames", "gen.rollouts", present_in="gen.rollouts.prompts"),
    "all prompts are there": record("frames", "gen.rollouts.prompts", present_in=""),
    "room for less": record("frames", "gen.rollouts", max_response_tokens=6),
    "which ended is a number": record("values", "gen.rollouts.ended", dtype="f32"),
    "one version for a row": record("values", "gen.rollouts.version", extent="row", level="seq"),
}


def test_the_plan_is_right(plan: Plan) -> None:
    verify(plan)
    loop = next(x for x in plan.body if isinstance(x, Loop))
    (fetch,), (call,) = ([e for e in loop.body if which(e)] for which in (again, carrying))
    assert (fetch.newest, fetch.stride, call.per_step, call.ahead) == ("prompt", 2, 3, 1)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_plan_is_refused(name: str, plan: Plan) -> None:
    with pytest.raises(Failure) as refused:
        verify(FORGED[name](plan))
    assert {d.code for d in refused.value.diagnostics} <= {
        "RL0536", "RL0538", "RL0513", "RL0539", "RL0610", "RL0611", "RL0612", "RL0613", "RL0614", "RL0615"}


HEAD = '''use std.sft (sft)
use py "e.py" (Talk: env)
data prompts = jsonl("p.jsonl", batch=4, numbers=["hard"])
model actor = causal_lm("m") train adamw(lr=1e-3)
state rate of prompts = 0.5
'''
GEN = "gen = actor.generate(prompt, max_new_tokens=8, per_step=4)"
TRAIN = "actor.train(gen, loss=sft())"
MISTAKES = {
    "in a block": (f"every 2 {{\n prompt = prompts.next()\n {GEN}\n {TRAIN}\n }}", "RL0213", "block"),
    "prompts from outside its block": (f"prompt = prompts.next()\n every 2 {{\n {GEN}\n {TRAIN}\n }}", "RL0213", "block"),
    "its source is read in a block": (
        f"prompt = prompts.next()\n {GEN}\n {TRAIN}\n every 2 {{\n more = prompts.next()\n"
        " actor.train(actor.generate(more), loss=sft())\n }", "RL0213", "block"),
    "drawn prompts": (f"prompt = prompts.next(weight=prompts.rate)\n {GEN}\n {TRAIN}", "RL0213", "weight"),
    "selected prompts": (f"all = prompts.next()\n prompt = all where all.hard > 0\n {GEN}\n {TRAIN}", "RL0213", "contains others"),
    "responses": ("asked = prompts.next()\n prompt = actor.generate(asked, max_new_tokens=4)\n "
                  f"{GEN}\n {TRAIN}", "RL0213", "contains others"),
    "in an evaluation": (f"prompt = prompts.next()\n {GEN}\n {TRAIN}\n every 2 {{ eval prompts {{\n p = prompts.next()\n"
                         " g = actor.generate(p, max_new_tokens=8, per_step=4)\n metric m = mean(len(g))\n } }",
                         "RL0213", "block"),
    "an environment": ("prompt = prompts.next()\n gen = actor.generate(prompt, env=Talk, max_tokens=999, per_step=4)\n "
                       f"{TRAIN}", "RL0205", "conversation"),
    "nothing in a step": (f"prompt = prompts.next()\n {GEN.replace('per_step=4', 'per_step=0')}\n {TRAIN}", "RL0205", "at least 1"),
    "sequences instead of tokens": (
        f"prompt = prompts.next()\n {GEN.replace('per_step=4', 'per_step=4 sequences')}\n {TRAIN}", "RL0218", "tokens"),
    "values of this step's prompts": (
        f"prompt = prompts.next()\n {GEN}\n kept = gen where mean(gen.logprobs by prompt) > prompt.hard\n"
        " actor.train(kept, loss=sft())", "RL0202", "`gen.COLUMN`"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.py").write_text("class Talk:\n    def reset(self, **row): pass\n")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(name: str) -> None:
    body, code, part = MISTAKES[name]
    found = api.check(f"{HEAD}flow f(steps=4) {{\n {body}\n}}\n", "x.rlf")
    errors = [d for d in found if d.code == code]
    assert errors and part in " ".join((errors[0].title, errors[0].label, errors[0].help)), found


@pytest.mark.usefixtures("folder")
def test_values_of_its_own_prompts() -> None:
    body = f"prompt = prompts.next()\n {GEN}\n kept = gen where mean(gen.logprobs by prompt) > gen.hard\n" \
           " actor.train(kept, loss=sft())\n metric age = max(kept.version)"
    assert not api.check(f"{HEAD}flow f(steps=4) {{\n {body}\n}}\n", "x.rlf")


@pytest.mark.usefixtures("folder")
def test_as_many_tokens_as_there_may_be_continue_nothing() -> None:
    body = f"prompt = prompts.next()\n {GEN.replace('per_step=4', 'per_step=8')}\n {TRAIN}"
    assert not api.check(f"{HEAD}flow f(steps=4) {{\n {body}\n}}\n", "x.rlf")
