"""RL0910: equality of numbers that only rounding may tell apart, and what is no such comparison."""

from __future__ import annotations

import pytest

from rldsl import api

PROGRAM = """data prompts = jsonl("prompts.jsonl", batch=4)
model actor = causal_lm("models/a"{actor})
model other = causal_lm("models/b"{other})
flow run(steps=2) {{
  prompt = prompts.next()
  gen = actor.generate(prompt, n=4)
  s = sum(actor.logprobs(gen) by seq)
  t = sum(other.logprobs(gen) by seq)
  metric sums = mean(s + t + len(gen))
{body}
}}
"""
INVARIANT = ", invariant=true"


def warned(body: str, actor: str = "", other: str = "") -> list[str]:
    """The texts of the comparisons that are warned of."""
    found = [d for d in api.examine(PROGRAM.format(body=body, actor=actor, other=other), "p.rlf") if d.code != "RL0901"]
    assert all((d.code, d.severity) == ("RL0910", "warning") and d.span is not None for d in found), found
    return [d.span.text for d in found if d.span is not None]


@pytest.mark.parametrize("compared", [
    "actor.logprobs(gen) == other.logprobs(gen)", "gen.logprobs != actor.logprobs(gen)", "s == t", "exp(s) == 1",
    "s == max(t by prompt)", "max(s by prompt) == max(t by prompt)", "s == mean(s by prompt)",
    "s == -max(-s by prompt)", "s == max(s + t by prompt)", "actor.logprobs(gen) == max(actor.logprobs(gen))",
    "where(s > 0, s, t) == 0"])
def test_is_warned_of(compared: str) -> None:
    assert warned(f"  metric m = mean({compared})") == [f"metric m = mean({compared})"]
    assert warned(f"  metric m = mean({compared})", INVARIANT, INVARIANT) == []


@pytest.mark.parametrize("body", [
    "  metric m = mean(s == max(s by prompt))", "  metric m = mean(min(s) != s)",
    "  metric m = mean(len(gen) == max(len(gen) by prompt))", "  metric m = mean(abs(s - t) < 1e-4)",
    "  metric m = mean((s > 0) == (t > 0))",
    "  top = max(s by prompt)\n  metric top = mean(top)\n  metric m = mean(s == top)"])
def test_is_not_warned_of(body: str) -> None:
    assert warned(body) == []


@pytest.mark.parametrize("actor, other", [(INVARIANT, ""), ("", INVARIANT)])
def test_one_model_that_rounds_is_enough(actor: str, other: str) -> None:
    assert warned("  metric m = mean(s == t)", actor, other) == ["metric m = mean(s == t)"]


def test_the_largest_of_something_else_with_its_name_is_warned_of() -> None:
    body = "  top = max(t by prompt)\n  metric top = mean(top)\n  metric m = mean(s == top)"
    assert warned(body) == ["metric m = mean(s == top)"]
