"""Forged plans with buffers that the verifier refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Event, When, Item, Loop, Sample, Store
from rldsl.plan.model import Plan
from rldsl.verify import verify
from tests.derive.test_forged import changed
from tests.verify.mutate import projected
from tests.verify.plans import folder

PROGRAM = """
use py "rewards.py" (size: gen -> seq)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=8, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
loss nll(logprobs: token;) { return -mean(logprobs) }
buffer good = rows(capacity=16)
state heat = 0.5
flow f(steps=2) {
  heat = heat * 0.9
  checkpoint every 1
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6)   on mesh(0:4) dp=4
  scored = gen with x=size(gen), y=2 * size(gen)
  kept   = scored where scored.x > 1
  good.add(kept)
  old    = good.sample(6, weight=max(good.x, 1) ** heat + where(good.finished, 1, 0))
  good.add(scored)
  metric y = mean(old.y)
  actor.train(old, loss=nll())   on mesh(0:4) dp=4
}
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    with folder() as here:
        (here / "f.rlf").write_text(PROGRAM)
        return api.compile("f.rlf")


def of(kind: type[Event], at: int, **fields: object) -> Callable[[Plan], Plan]:
    """The plan with other fields of the event `at` of a kind."""
    def forge(plan: Plan) -> Plan:
        seen: list[int] = []

        def change(e: Event) -> Event:
            if not isinstance(e, kind):
                return e
            seen.append(e.id)
            made = {k: v(e) if callable(v) else v for k, v in fields.items()}
            return replace(e, **made) if len(seen) == at + 1 else e
        return changed(plan, change)
    return forge


def record(**fields: object) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, buffers=(replace(plan.buffers[0], **fields),))  # type: ignore[arg-type]


def frame(id_: str, **fields: object) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, frames=tuple(
        replace(f, **fields) if f.id == id_ else f for f in plan.frames))  # type: ignore[arg-type]


def swapped(plan: Plan) -> Plan:
    """The sample before the rows that it must see."""
    def block(items: tuple[Item, ...]) -> tuple[Item, ...]:
        items = tuple(replace(i, body=block(i.body)) if isinstance(i, Loop | When) else i for i in items)
        at = [i for i, x in enumerate(items) if isinstance(x, Store | Sample)]
        if len(at) < 3:
            return items
        out = list(items)
        sample = next(i for i in at if isinstance(items[i], Sample))
        moved = out.pop(sample)
        out.insert(at[0], moved)
        return tuple(out)
    return projected(replace(plan, body=block(plan.body)))


FORGED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "sampled before the rows that it must see": (swapped, "RL0528"),
    "another version": (of(Sample, 0, version="f.rlf:1:1"), "RL0528"),
    "stores in another order": (of(Store, 1, version=""), "RL0528"),
    "nothing is stored": (lambda p: changed(p, lambda e: None if isinstance(e, Store) else e), "RL0528"),
    "a store is lost": (lambda p: changed(p, lambda e: None if isinstance(e, Store) and not e.version else e),
                        "RL0528"),
    "fields are mixed up": (of(Store, 0, values=lambda e: (*e.values[:-2], (e.values[-1][0], e.values[-2][1]),
                                                            (e.values[-2][0], e.values[-1][1]))), "RL0614"),
    "a field is lost": (of(Store, 0, values=lambda e: e.values[:-1]), "RL0615"),
    "tokens of other rows": (of(Store, 0, frame="gen"), "RL0615"),
    "rows are not read": (of(Store, 0, reads=lambda e: e.reads[1:]), "RL0614"),
    "the buffer is not written": (of(Store, 0, writes=()), "RL0613"),
    "drawn by a field that is none": (of(Sample, 0, fields=lambda e: ((e.fields[0][0], "z"), *e.fields[1:])), "RL0615"),
    "drawn by tokens": (of(Sample, 0, fields=lambda e: ((e.fields[0][0], "logprobs"), *e.fields[1:])), "RL0615"),
    "drawn by another input": (of(Sample, 0, fields=(("x", "x"),)), "RL0617"),
    "drawn by no field": (of(Sample, 0, fields=()), "RL0617"),
    "drawn by a field twice": (of(Sample, 0, fields=lambda e: e.fields * 2), "RL0617"),
    "drawn by no program": (of(Sample, 0, program=""), "RL0615"),
    "drawn by an unknown program": (of(Sample, 0, program="gone"), "RL0610"),
    "drawn by another program": (lambda p: of(Sample, 0, program=next(
        x.id for x in p.programs if "weight" not in x.id))(p), "RL0617"),
    "drawn by a value that is no state": (of(Sample, 0, inputs=(("heat", "gen.finished"),)), "RL0615"),
    "a state is not read": (of(Sample, 0, reads=lambda e: e.reads[:1]), "RL0614"),
    "sampled fields are mixed up": (of(Sample, 0, values=lambda e: (
        *e.values[:-2], (e.values[-1][0], e.values[-2][1]), (e.values[-2][0], e.values[-1][1]))), "RL0615"),
    "lengths are not written": (of(Sample, 0, writes=lambda e: e.writes[:-1]), "RL0614"),
    "another frame": (of(Sample, 0, frame="gen"), "RL0615"),
    "the buffer is not read": (of(Sample, 0, reads=()), "RL0614"),
    "another tokenizer": (record(tokenizer="models/other"), "RL0615"),
    "another tokenizer of what is sampled": (frame("old", tokenizer="models/other"), "RL0615"),
    "another temperature": (record(temperature=2.0), "RL0615"),
    "shorter rows": (record(max_response_tokens=3), "RL0615"),
    "rows that are always there": (frame("old", present_in=""), "RL0615"),
    "fewer slots than are drawn": (record(capacity=3), "RL0615"),
    "no capacity": (record(capacity=0), "RL0612"),
    "no fields": (record(fields=()), "RL0612"),
    "another spread": (record(spread="nowhere"), "RL0610"),
    "another value": (record(value="gen.tokens"), "RL0612"),
    "no record": (lambda p: replace(p, buffers=()), "RL0612"),
    "twice": (lambda p: replace(p, buffers=p.buffers * 2), "RL0611"),
}


def test_the_plan_itself_is_sound(plan: Plan) -> None:
    verify(plan)
    assert decode(encode(plan), "p") == plan
    assert sum(isinstance(e, Store | Sample) for e in _events(plan.body)) == 3


def _events(items: tuple[Item, ...]) -> list[Event]:
    return [e for i in items for e in (_events(i.body) if isinstance(i, Loop | When) else [i])]


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_plan_is_refused_with_a_code(plan: Plan, name: str) -> None:
    forge, code = FORGED[name]
    with pytest.raises(Failure) as caught:
        verify(forge(plan))
    assert code in {d.code for d in caught.value.diagnostics}, caught.value.diagnostics
