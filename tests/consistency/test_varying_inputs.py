"""RL0908: what reaches the training of a model with `invariant=training` though it depends on the placement."""

from __future__ import annotations

import pytest

from rldsl import api

PROGRAM = """use std.sft (sft)
data prompts = jsonl("prompts.jsonl", batch=4)
model actor = causal_lm("models/a", invariant=training) train adamw(lr=1e-3)
model other = {other}
model ref = causal_lm("models/a", invariant=true)
state level = 0
flow run(steps=2) {{
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2)
{body}
  actor.train(gen, loss=sft())
{end}
}}
"""
VALUES, SCORES, MODEL = (f'{head}("models/a"{{}})' for head in ("value_model", "reward_model", "causal_lm"))
TRAINED = " train adamw(lr=1e-3)"
FIT = """  v = other.values(gen)
  other.train(gen, loss=fit(target=len(gen)))
"""
LOSS = """loss fit(values: token; target: seq) {
  return mean((values - target) * (values - target))
}
loss lean(logprobs: token; weight: seq) {
  return mean(-logprobs * weight)
}
"""


def warned(other: str, body: str, end: str = "") -> list[tuple[str, str]]:
    """(title, help) of each warning."""
    text = PROGRAM.format(other=other, body=body, end=end)
    found = api.examine(text.replace("flow run", LOSS + "flow run"), "p.rlf")
    assert not [d for d in found if d.severity == "error"], found
    return [(d.title, str(d.help)) for d in found if d.code == "RL0908"]


# name -> (how `other` is made, with options to be filled in; before the training of `actor`; behind it)
REACH = {
    "values": (VALUES + TRAINED, FIT + "  actor.train(gen, loss=lean(weight=mean(v by seq)))", ""),
    "a copy": (MODEL + TRAINED, """  other.train(gen, loss=sft())
  sync ref from other
  w = sum(ref.logprobs(gen) by seq)
  actor.train(gen, loss=lean(weight=w))""", ""),
    "an average": (MODEL + TRAINED, """  w = sum(ref.logprobs(gen) by seq)
  actor.train(gen, loss=lean(weight=w))""", "  other.train(gen, loss=sft())\n  ema ref from other 0.9"),
    "a state": (VALUES + TRAINED, FIT + "  actor.train(gen, loss=lean(weight=len(gen) + level))",
                "  level = mean(v)"),
    "the end": (VALUES + TRAINED, FIT, "  stop when mean(v) > 3"),
    "a repeat": (VALUES + TRAINED, """  repeat {
    more = prompts.next()
    long = actor.generate(more, n=2)
    u = other.values(long)
  } until mean(u) > 1 max 3
  other.train(long, loss=fit(target=len(long)))
  actor.train(long, loss=sft())""", ""),
}


@pytest.mark.parametrize("way", REACH)
def test_gradients_of_another_model_are_pointed_out(way: str) -> None:
    other, body, end = REACH[way]
    ((title, help),) = warned(other.format(", invariant=true"), body, end)
    assert title == "the gradients of `other` are not invariant, so the training of `actor` is not either"
    assert help == "declare `other` with `invariant=training`"
    assert warned(other.format(", invariant=training"), body, end) == []


@pytest.mark.parametrize("way", REACH)
def test_the_help_for_a_trained_model_is_enough(way: str) -> None:
    other, body, end = REACH[way]
    ((_, help),) = warned(other.format(""), body, end)
    assert help == "declare `other` with `invariant=training`"


def test_a_frozen_one_needs_no_more_than_true() -> None:
    body = "  s = other.score(gen)\n  actor.train(gen, loss=lean(weight=s))"
    assert [help for _, help in warned(SCORES.format(""), body)] == ["declare `other` with `invariant=true`"]
    assert warned(SCORES.format(", invariant=true"), body) == []


def test_what_is_only_logged_reaches_nothing() -> None:
    assert warned((VALUES + TRAINED).format(""), FIT + "  metric v = mean(v)") == []
