"""Forged plans with concatenated rows that the verifier refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Derive
from rldsl.plan.model import Plan
from rldsl.verify import verify
from tests.derive.test_forged import changed, derived, events, framed, spaced, without_lengths
from tests.verify.plans import folder

PROGRAM = """
use std.sft (sft)
use py "rewards.py" (size: gen -> seq)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=8, max_prompt_tokens=16)
data further = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=12)
buffer good = rows(capacity=9)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
flow f(steps=2) {
  old    = good.sample(5)
  prompt = prompts.next()
  second = further.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6)   on mesh(0:4) dp=4
  more   = actor.generate(second, n=4, max_new_tokens=4)   on mesh(0:4) dp=4
  again  = actor.generate(prompt, n=2, max_new_tokens=6)   on mesh(0:4) dp=4
  scored = gen with x=size(gen), y=gen.logprobs, z=size(gen) + 1
  kept   = scored where scored.x > 1
  good.add(kept)
  mix    = concat(kept, old)
  two    = concat(gen, more)
  one    = concat(gen, again)
  metric mix = mean(mix.x) + mean(mix.y * mix.logprobs) + mean(mix.z) + mean(mix.finished)
  metric two = mean(max(len(two) by prompt) + sum(two.finished by prompt))
  metric one = mean(max(len(one) by prompt) - max(size(gen) by prompt))
  actor.train(mix, loss=sft(), minibatches=2)   on mesh(0:4) dp=4
  actor.train(two, loss=sft(), minibatches=2)   on mesh(0:4) dp=4
  actor.train(one, loss=sft(), minibatches=2)   on mesh(0:4) dp=4
}
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    with folder() as here:
        (here / "f.rlf").write_text(PROGRAM)
        return api.compile("f.rlf")


def spread_of(frame: str, **changes: object) -> Callable[[Plan], Plan]:
    """The spread in which a frame is made, with other fields."""
    def forge(plan: Plan) -> Plan:
        (made,) = (e for e in events(plan) if isinstance(e, Derive) and e.frame == frame)
        return replace(plan, spreads=tuple(replace(s, **changes) if s.id == made.spread else s  # type: ignore[arg-type]
                                           for s in plan.spreads))
    return forge


def values(frame: str, change: Callable[[tuple[tuple[str, str], ...]], tuple[tuple[str, str], ...]],
           ) -> Callable[[Plan], Plan]:
    """The frame made of other values."""
    def forge(plan: Plan) -> Plan:
        return changed(plan, lambda e: replace(e, values=change(e.values))
                       if isinstance(e, Derive) and e.frame == frame else e)
    return forge


def swapped(a: str, b: str) -> Callable[[tuple[tuple[str, str], ...]], tuple[tuple[str, str], ...]]:
    return lambda pairs: tuple(({a: b, b: a}.get(v, v), w) for v, w in pairs)


FORGED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "one part": (derived("mix", parts=("kept",)), "RL0615"),
    "no parts": (derived("mix", parts=()), "RL0615"),
    "a part twice": (derived("two", parts=("gen", "gen")), "RL0615"),
    "parts in another order": (derived("two", parts=("more", "gen")), "RL0615"),
    "another source": (derived("two", source="more"), "RL0615"),
    "other parts": (derived("two", parts=("gen", "again")), "RL0615"),
    "called a selection": (derived("mix", op="where"), "RL0615"),
    "called whole": (derived("two", op="whole"), "RL0615"),
    "a pick that has parts": (derived("kept", op="concat"), "RL0615"),
    "by a number": (derived("two", key="gen.finished"), "RL0615"),
    "with a function": (derived("two", function="size"), "RL0615"),
    "rows that overlap": (spaced("two.prompts", parts=(("prompt", 0), ("second", 4))), "RL0612"),
    "rows with a gap": (spaced("mix", parts=(("kept", 0), ("old", 33))), "RL0612"),
    "rows of an unknown space": (spaced("mix", parts=(("kept", 0), ("gone", 32))), "RL0610"),
    "a row too many": (spaced("mix", count=38), "RL0612"),
    "rows of one space alone": (spaced("mix", parts=(("kept", 0),), count=32), "RL0612"),
    "rows that come from the same rows": (spaced("two.prompts", count=40, parts=(("prompt", 0), ("gen", 8))), "RL0612"),
    "a concatenation that has a parent": (spaced("two", parts=(("gen", 0), ("more", 32))), "RL0612"),
    "a concatenation that is a selection": (spaced("mix", of="gen"), "RL0612"),
    "prompts in another order": (spaced("two.prompts", parts=(("second", 0), ("prompt", 4))), "RL0615"),
    "rows where there were prompts": (framed("two", row_space="two.prompts"), "RL0615"),
    "fewer rows of each prompt": (spaced("one", fan=4, count=32), "RL0615"),
    "rows of the first part alone": (framed("one", row_space="gen"), "RL0615"),
    "rows of which all are present": (framed("mix", present_in=""), "RL0615"),
    "rows of which some are absent": (framed("two", present_in="two"), "RL0615"),
    "called a selection of a part": (framed("one", selected_from="gen"), "RL0612"),
    "another temperature": (framed("mix", temperature=0.5), "RL0615"),
    "a part at another temperature": (framed("more", temperature=0.5), "RL0615"),
    "another tokenizer": (framed("two", tokenizer="models/other"), "RL0615"),
    "a part of another tokenizer": (framed("more", tokenizer="models/other"), "RL0615"),
    "shorter prompts": (framed("two", max_prompt_tokens=12), "RL0615"),
    "shorter responses": (framed("two", max_response_tokens=4), "RL0615"),
    "another source of data": (framed("two", data="further"), "RL0615"),
    "values of the parts in another order": (values("two", swapped("gen.tokens", "more.tokens")), "RL0615"),
    "a field of other rows": (values("mix", swapped("old.x", "gen.finished")), "RL0615"),
    "another value as the log-probs": (values("mix", swapped("kept.logprobs", "old.logprobs")), "RL0615"),
    "a value of one part alone": (values("two", lambda pairs: pairs[:-1]), "RL0614"),
    "a spread by tokens": (spread_of("two", balance_by="tokens"), "RL0538"),
    "a spread of rows": (spread_of("two", granularity="row"), "RL0538"),
    "a spread of a part": (spread_of("two", frames=("gen",)), "RL0538"),
    "rows that are read before they exist": (without_lengths("mix"), "RL0518"),
}


def test_the_plan_is_good(plan: Plan) -> None:
    assert verify(decode(encode(plan), "f.plan")).events == len(events(plan))


@pytest.mark.parametrize("forge, code", FORGED.values(), ids=FORGED.keys())
def test_a_forged_plan_is_refused(plan: Plan, forge: Callable[[Plan], Plan], code: str) -> None:
    with pytest.raises(Failure) as refused:
        verify(forge(plan))
    assert code in {d.code for d in refused.value.diagnostics}, [str(d) for d in refused.value.diagnostics][:4]
