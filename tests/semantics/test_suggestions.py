"""Which name was meant, and when that is sure enough to be written unseen."""

from __future__ import annotations

import pytest

from rldsl import api
from rldsl.semantics.errors import Advice, likeness, suggest

OPTIONS = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "greedy", "stop")


@pytest.mark.parametrize("typed, meant", [
    ("max_new_token", "max_new_tokens"), ("temprature", "temperature"), ("gready", "greedy"), ("Stop", "stop"),
    ("pto_p", "top_p"), ("max_tokens", "max_new_tokens"), ("TEMPERATURE", "temperature")])
def test_one_near_name_is_a_fix(typed: str, meant: str) -> None:
    advice = suggest(typed, OPTIONS)
    assert isinstance(advice, Advice) and advice.word == meant and f"`{meant}`" in advice


@pytest.mark.parametrize("typed", ["top_", "top", "mi_new_tokens_max", "x", "t"])
def test_no_fix_where_two_are_near_or_none_is(typed: str) -> None:
    assert not isinstance(suggest(typed, OPTIONS), Advice)


def test_short_lists_are_shown_and_long_ones_not() -> None:
    assert suggest("zzz", OPTIONS).startswith("names defined here: ")
    assert suggest("zzz", [f"name{i}" for i in range(13)]) == "" and suggest("zzz", []) == ""


def test_own_names_come_first() -> None:
    assert suggest("gan", {"gen", "gun"}, {"gun"}) == "did you mean `gun`?"
    assert suggest("gan", {"gen", "gun"}, {"gen"}) == "did you mean `gen`?"


@pytest.mark.parametrize("a, b, least, most", [("gen", "gne", 0.9, 1), ("gen", "GEN", 0.9, 1), ("gen", "x", 0, 0.1),
                                               ("ab", "ba", 0, 0.6), ("score", "scores", 0.8, 1)])
def test_likeness(a: str, b: str, least: float, most: float) -> None:
    assert least <= likeness(a, b) <= most


FLOW = """data d = jsonl("d.jsonl", batch=4)
model m = causal_lm("m")
flow f(steps=2) {
  p = d.next()
  gen = m.generate(p)
%s}
"""


def test_an_unknown_name_is_told_once_and_mended_everywhere() -> None:
    text = FLOW % "  a = mean(len(genn))\n  b = mean(genn.logprobs) + a\n  metric c = b + mean(len(genn))\n"
    [found] = api.check(text)
    assert found.code == "RL0101" and found.fix is not None
    assert [s.line for s, new in found.fix.edits if new == "gen"] == [6, 7, 8]


def test_a_name_of_the_library_says_where_it_is() -> None:
    [found] = api.check(FLOW % "  a, b = gae(gen.logprobs, gen.logprobs)\n")
    assert "use std.ppo (gae)" in found.help and found.fix is None


def test_names_unknown_in_two_modules_are_two_mistakes() -> None:
    text = "fn f1(x: seq) -> seq {\n  return y1\n}\n" + FLOW % "  a = mean(y2)\n  metric z = a\n"
    assert [d.code for d in api.check(text)] == ["RL0101", "RL0101"]


def test_errors_of_all_kinds_in_one_run() -> None:
    text = (FLOW % "  a = mean(lenn(gen))\n  metric b = gen.logprobs\n  x = m.logprobs(gen) on mesh(0:8) dp=3\n")
    assert [d.code for d in api.check(text)] == ["RL0101", "RL0201", "RL0304"]


def test_a_wrong_cluster_does_not_make_meshes_wrong() -> None:
    text = "cluster nodes=2 gpu=8\n" + FLOW % "  x = m.logprobs(gen) on mesh(0:2, 0:8) dp=16\n  metric y = mean(x)\n"
    assert [d.code for d in api.check(text)] == ["RL0107"]


ANSWERS = """use std.sft (sft)
data rows = jsonl("rows.jsonl", batch=4, kind=answersMORE)
model actor = causal_lm("m") train adamw(lr=1e-5)
flow f(steps=3) {
  row = rows.next()
  gen = actor.generate(row.prompts, n=2)
  actor.train(row, loss=sft())
  LINE
}
"""


@pytest.mark.parametrize(("line", "more", "code", "says"), [
    ("metric x = mean(row.prompts.index)", ", answers=2", "RL0112", "`row.index` of `row = d.next()`"),
    ("metric x = count(row.prompts.prompts)", ", answers=2", "RL0112", "write `row.prompts`"),
    ("metric x = mean(len(gen.prompts))", ", answers=2", "RL0112", "`mean(len(gen) by prompt)`"),
    ("metric x = mean(row.prompt)", ", answers=2", "RL0112", "several answers"),
    ("stop when true", ", answers=2", "RL0203", "`steps=1`"),
    ("stop when false", ", answers=2", "RL0203", "a comparison"),
    ("metric x = quantile(len(gen) by prompt, .5)", ", answers=2", "RL0001", "write `0.5`"),
])
def test_advice_on_rows_and_conditions(line: str, more: str, code: str, says: str) -> None:
    found = api.check(ANSWERS.replace("MORE", more).replace("LINE", line), "x.rlf")
    assert [d.code for d in found] == [code] and found[0].span is not None and says in found[0].help


@pytest.mark.parametrize("line", ["stop when mean(len(gen)) > 5", "metric x = mean(quantile(len(gen) by prompt, 0.5))",
                                  "metric x = mean(row.index)"])
def test_what_the_advice_leads_to(line: str) -> None:
    assert api.check(ANSWERS.replace("MORE", ", answers=2").replace("LINE", line), "x.rlf") == ()


@pytest.mark.parametrize("word", ["true", "false"])
def test_a_loss_that_always_or_never_stops(word: str) -> None:
    text = ANSWERS.replace("MORE", ", answers=2").replace("LINE", "").replace("sft()", "mine()") + f"""
loss mine(logprobs: token) {{
  stop when {word}
  return -mean(logprobs)
}}
"""
    (found,) = api.check(text, "x.rlf")
    assert found.code == "RL0203" and f"stop when {word}" in found.title
