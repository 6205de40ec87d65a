"""Prompts, sequences, pairs and tokens, of a minibatch or of the whole batch, cannot be confused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.graph import model as g
from rldsl.graph.build import build
from rldsl.plan.expr import Scalar
from rldsl.semantics.units import PLAIN, UNITS, Unit, differ, reduced
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse

HEAD = '''use std.sft (sft)
use std.dpo (dpo)
data d = jsonl("d.jsonl", batch=64)
data a = jsonl("a.jsonl", batch=64)
data q = jsonl("q.jsonl", batch=64)
model actor = causal_lm("m") train adamw(lr=1e-3)
model ref = causal_lm("m")
model judge = reward_model("m")
'''
FLOW = '''flow f(steps=2) {
  p = d.next()
  gen = actor.generate(p, n=4)
  s = judge.score(gen)
  lp = ref.logprobs(gen)
  ans = a.next()
  ans_lp = ref.logprobs(ans)
  pair = q.next()
  won = judge.score(pair.chosen) - judge.score(pair.rejected)
  %s
}
'''
LOSS = "loss l(logprobs: token; n = 1.0, k: seq = 1.0) {\n  %s\n  return -mean(logprobs * k)\n}\n"


def graph(statement: str, top: str = "", **sets: Scalar) -> g.Graph:
    return build(parse(SourceFile("main.rlf", HEAD + top + FLOW % statement)), sets)


def errors(statement: str, top: str = "", **sets: Scalar) -> tuple[Diagnostic, ...]:
    with pytest.raises(Failure) as caught:
        graph(statement, top, **sets)
    return caught.value.diagnostics


def said(d: Diagnostic) -> str:
    return " ".join((d.title, d.label, d.help, *(x.text for x in d.labels)))


# ------------------------------------------------------------------------------------------------- arithmetic

FIT = [
    "count(gen) + 4 sequences", "count(gen) - count(s)", "count(gen) + 1", "count(lp) / count(gen)", "1 + count(gen)",
    "count(gen) / count(p) - 4", "mean(len(gen)) - 512 tokens", "sum(len(gen)) - count(lp)", "max(len(gen), 8 tokens)",
    "where(s > 0, len(gen), 512 tokens)", "clip(len(gen), 1, 512 tokens)", "4 * count(p) - 64 prompts", "count(p) * 4",
    "len(gen) - mean(len(gen) by prompt)", "count(lp by seq) - len(gen)", "count(won) - 64 pairs",
    "count(pair) + count(won)",
    "count(pair.chosen) - count(won)", "count(ans) - 64 sequences", "std(len(gen)) + 1",
    "(count(lp) + 4 tokens) / 2 tokens",
    "count(gen by prompt) - 4 sequences", "count(mean(s by prompt)) - count(p)", "abs(count(gen) - 3 sequences) + 1",
    "count(lp) * count(gen) + 3 prompts", "count(gen) > 3 sequences and count(lp) > 3 tokens",
    "512 prompts * 2 + 1 prompts",
    "mean(r_tokens) - 5 prompts",
]


@pytest.mark.parametrize("expr", FIT)
def test_units_that_fit(expr: str) -> None:
    graph(f"r_tokens = s * 2\n  x = {expr}")


# expression, both units, what the two labels underline
CLASH = [
    ("count(gen) + count(lp)", "sequences", "tokens", "count(gen)", "count(lp)"),
    ("count(gen) - count(p)", "sequences", "prompts", "count(gen)", "count(p)"),
    ("count(lp) > 512 sequences", "tokens", "sequences", "count(lp)", "512 sequences"),
    ("count(gen) >= 512 prompts", "sequences", "prompts", "count(gen)", "512 prompts"),
    ("512 tokens == count(s)", "tokens", "sequences", "512 tokens", "count(s)"),
    ("count(p) != 3 tokens", "prompts", "tokens", "count(p)", "3 tokens"),
    ("min(len(gen), 8 sequences)", "tokens", "sequences", "len(gen)", "8 sequences"),
    ("max(count(p), count(gen))", "prompts", "sequences", "count(p)", "count(gen)"),
    ("where(s > 0, len(gen), 1 prompts)", "tokens", "prompts", "len(gen)", "1 prompts"),
    ("clip(len(gen), 1, 8 sequences)", "tokens", "sequences", "clip(len(gen), 1, 8 sequences)", "8 sequences"),
    ("mean(len(gen)) + count(gen)", "tokens", "sequences", "mean(len(gen))", "count(gen)"),
    ("sum(len(gen)) < count(gen)", "tokens", "sequences", "sum(len(gen))", "count(gen)"),
    ("max(len(gen)) - 4 sequences", "tokens", "sequences", "max(len(gen))", "4 sequences"),
    ("len(gen) - count(gen by prompt)", "tokens", "sequences", "len(gen)", "count(gen by prompt)"),
    ("2 * count(gen) - count(lp)", "sequences", "tokens", "2 * count(gen)", "count(lp)"),
    ("count(gen) / 2 + count(lp)", "sequences", "tokens", "count(gen) / 2", "count(lp)"),
    ("-count(gen) + count(lp)", "sequences", "tokens", "-count(gen)", "count(lp)"),
    ("abs(count(gen)) + count(lp)", "sequences", "tokens", "abs(count(gen))", "count(lp)"),
    ("count(won) - 64 sequences", "pairs", "sequences", "count(won)", "64 sequences"),
    ("count(pair) - count(gen)", "pairs", "sequences", "count(pair)", "count(gen)"),
    ("count(ans) - 64 prompts", "sequences", "prompts", "count(ans)", "64 prompts"),
    ("count(ans_lp) - count(ans)", "tokens", "sequences", "count(ans_lp)", "count(ans)"),
    ("4 tokens + 4 sequences", "tokens", "sequences", "4 tokens", "4 sequences"),
    ("8 prompts * 2 - 4 pairs", "prompts", "pairs", "8 prompts * 2", "4 pairs"),
    ("count(mean(s by prompt)) - count(s)", "prompts", "sequences", "count(mean(s by prompt))", "count(s)"),
]


@pytest.mark.parametrize(("expr", "one", "other", "left", "right"), CLASH)
def test_units_that_clash_are_both_named_and_underlined(expr: str, one: str, other: str, left: str, right: str) -> None:
    [d] = errors(f"x = {expr}")
    assert d.code == "RL0218" and d.title == f"{one} and {other} are different units"
    assert [(x.span.text, x.text) for x in d.labels] == [(left, one), (right, other)]
    assert d.span is not None and d.span.text == expr and d.help


def test_a_unit_stays_with_a_name_a_parameter_and_through_functions() -> None:
    top = "param most = 512 sequences\nfn twice(n) { return 2 * n }\nfn same(x: any) -> any { return x }\n"
    graph("c = count(gen)\n  x = c - most", top)
    graph("x = twice(count(gen)) - most\n  y = same(len(gen)) - 4 tokens", top)
    for statement in ("c = count(lp)\n  x = c - most", "x = twice(count(lp)) - most", "x = same(len(gen)) - most"):
        [d] = errors(statement, top)
        assert d.code == "RL0218" and d.title == "tokens and sequences are different units"


def test_set_gives_a_number_in_the_unit_of_the_parameter() -> None:
    top = "param most = 512 sequences\n"
    [d] = errors("x = count(lp) - most", top, most="64")
    assert d.title == "tokens and sequences are different units"


def test_a_clash_in_a_function_is_told_once() -> None:
    [d] = errors("x = bad(lp)\n  y = bad(gen.logprobs)", "fn bad(x: token) { return count(x) + 3 prompts }\n")
    assert d.code == "RL0218" and d.span is not None and d.span.text == "count(x) + 3 prompts"


def test_a_function_of_sequences_serves_pairs_too() -> None:
    top = "fn enough(x: seq) { return count(x) - 3 pairs }\n"
    graph("x = enough(won)", top)
    [d] = errors("x = enough(s)", top)
    assert d.title == "sequences and pairs are different units"


def test_selections_keep_units() -> None:
    graph("kept = gen where s > 0\n  x = count(kept) - 3 sequences\n  y = len(gen) - mean(len(kept))")
    [d] = errors("kept = gen where s > 0\n  x = count(kept) >= 3 prompts")
    assert d.title == "sequences and prompts are different units"


def test_a_clash_in_an_until_condition() -> None:
    block = ("repeat {\n    pp = d.next()\n    g2 = actor.generate(pp, n=2)\n  } until count(g2) >= 512 %s max 4")
    graph(block % "sequences")
    [d] = errors(block % "prompts")
    assert d.title == "sequences and prompts are different units"


# ----------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("line", [
    "metric m = count(logprobs) - 3 tokens",
    "metric m = mean(where(count(logprobs by seq) > 4 tokens, 1, 0))", "metric m = mean(logprobs) * n",
])
def test_counts_of_a_minibatch(line: str) -> None:
    graph("actor.train(gen, loss=l(n=count(gen.logprobs)))", LOSS % line)


@pytest.mark.parametrize(("line", "title"), [
    ("metric m = count(logprobs) - n", "tokens of a minibatch and tokens of the whole batch are different units"),
    ("metric m = n + count(logprobs)", "tokens of the whole batch and tokens of a minibatch are different units"),
    ("metric m = where(count(logprobs) > n, 1, 0)",
     "tokens of a minibatch and tokens of the whole batch are different units"),
    ("metric m = 2 * count(logprobs) - n / 2",
     "tokens of a minibatch and tokens of the whole batch are different units"),
    ("metric m = sum(count(logprobs by seq)) - n",
     "tokens of a minibatch and tokens of the whole batch are different units"),
    ("metric m = count(logprobs) / n", "tokens of a minibatch and tokens of the whole batch are different units"),
    ("metric m = n * count(logprobs)", "tokens of the whole batch and tokens of a minibatch are different units"),
    ("metric m = count(logprobs) ** n", "tokens of a minibatch and tokens of the whole batch are different units"),
    ("metric m = sum(logprobs) / n", "a total of a minibatch and tokens of the whole batch are different units"),
    ("metric m = exp(-sum(logprobs)) * sqrt(n)",
     "a total of a minibatch and a total of the whole batch are different units"),
    ("metric m = max(sum(logprobs), n)", "a total of a minibatch and tokens of the whole batch are different units"),
])
def test_a_count_of_the_flow_does_not_fit_one_of_the_loss(line: str, title: str) -> None:
    [d] = errors("actor.train(gen, loss=l(n=count(gen.logprobs)))", LOSS % line)
    assert d.code == "RL0218" and d.title == title
    assert "of one minibatch" in d.help and "`mean(x)`" in d.help and "n" in d.help


@pytest.mark.parametrize(("line", "title"), [
    ("metric m = count(logprobs) - 3 sequences", "tokens of a minibatch and sequences are different units"),
    ("metric m = count(sum(logprobs by seq)) - count(logprobs)",
     "sequences of a minibatch and tokens of a minibatch are different units"),
])
def test_counts_of_a_loss_have_units(line: str, title: str) -> None:
    [d] = errors("actor.train(gen, loss=l())", LOSS % line)
    assert d.code == "RL0218" and d.title == title


def test_constants_and_lengths_as_data_fit_the_loss() -> None:
    graph("actor.train(gen, loss=l(n=512 tokens))", LOSS % "metric m = count(logprobs) - n")
    graph("actor.train(gen, loss=l(k=len(gen)))", LOSS % "metric m = mean(count(logprobs by seq) - k)")
    [d] = errors("actor.train(gen, loss=l(n=512 prompts))", LOSS % "metric m = count(logprobs) - n")
    assert d.title == "tokens of a minibatch and prompts are different units"
    [d] = errors("n = count(s)\n  actor.train(gen, loss=l(n=n))", LOSS % "metric m = count(logprobs) - n")
    assert d.title == "tokens of a minibatch and sequences of the whole batch are different units"


def test_after_a_loss_counts_are_of_the_whole_batch_again() -> None:
    graph("actor.train(gen, loss=l())\n  x = count(lp) - sum(len(gen))", LOSS % "metric m = count(logprobs)")


# ---------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("top", [
    'data e = jsonl("d.jsonl", batch=8 prompts)', 'data e = jsonl("d.jsonl", batch=8 pairs, kind=pairs)',
    'data e = jsonl("d.jsonl", batch=8 sequences, kind=answers)',
    'param b = 4 prompts\ndata e = jsonl("d.jsonl", batch=2 * b)',
    'data e = jsonl("d.jsonl", batch=8, max_prompt_tokens=64 tokens, max_answer_tokens=64 tokens)',
    "place actor.* on mesh(0:2) mbs=4 sequences", "place actor.* on mesh(0:2) mbt=4096 tokens",
    "model z = causal_lm(\"m\") train adamw(lr=1 tokens / 1k tokens)",
])
def test_options_in_their_unit(top: str) -> None:
    graph("actor.train(gen, loss=sft(), minibatches=2)", top + "\n")


@pytest.mark.parametrize(("top", "underlined", "parts"), [
    ('data e = jsonl("d.jsonl", batch=8 sequences)', "8 sequences", ("prompts", "sequences")),
    ('data e = jsonl("d.jsonl", batch=8 tokens)', "8 tokens", ("prompts", "tokens")),
    ('data e = jsonl("d.jsonl", batch=8 prompts, kind=answers)', "8 prompts", ("sequences", "prompts")),
    ('data e = jsonl("d.jsonl", batch=8 sequences, kind=pairs)', "8 sequences", ("pairs", "sequences")),
    ('param b = 4 tokens\ndata e = jsonl("d.jsonl", batch=b)', "b", ("prompts", "tokens")),
    ('data e = jsonl("d.jsonl", batch=8, max_prompt_tokens=8 prompts)', "8 prompts", ("tokens", "prompts")),
    ('data e = jsonl("d.jsonl", batch=8, max_answer_tokens=8 pairs)', "8 pairs", ("tokens", "pairs")),
    ("place actor.* on mesh(0:2) mbs=4 tokens", "4 tokens", ("sequences", "tokens")),
    ("place actor.* on mesh(0:2) mbt=4 sequences", "4 sequences", ("tokens", "sequences")),
    ("place actor.* on mesh(0:2) dp=2 sequences", "2 sequences", ("plain number", "sequences")),
    ('model z = causal_lm("m") train adamw(lr=1 tokens)', "1 tokens", ("plain number", "tokens")),
    ('model z = causal_lm("m") train adamw(lr=1, betas=[0 tokens, 0.5])', "[0 tokens, 0.5]",
     ("plain number", "tokens")),
])
def test_declarations_in_a_wrong_unit(top: str, underlined: str, parts: tuple[str, ...]) -> None:
    [d] = errors("x = mean(s)", top + "\n")
    assert d.code == "RL0218" and d.span is not None and d.span.text == underlined
    assert all(p in d.title for p in parts) and d.help


def test_the_batch_of_data_seen_from_its_use() -> None:
    [d] = errors("x = e.next()\n  y = mean(ref.logprobs(x.chosen))", 'data e = jsonl("d.jsonl", batch=8 prompts)\n')
    assert d.title == "`batch` counts pairs, not prompts"


@pytest.mark.parametrize(("call", "underlined", "parts"), [
    ("actor.generate(p, n=4 prompts)", "4 prompts", ("sequences", "prompts")),
    ("actor.generate(p, n=4 tokens)", "4 tokens", ("sequences", "tokens")),
    ("actor.generate(p, max_new_tokens=64 sequences)", "64 sequences", ("tokens", "sequences")),
    ("actor.generate(p, min_new_tokens=1 prompts)", "1 prompts", ("tokens", "prompts")),
    ("actor.generate(p, temperature=1 tokens)", "1 tokens", ("plain number", "tokens")),
    ("actor.train(gen, loss=sft(), minibatches=64 sequences)", "64 sequences", ("plain number", "sequences")),
    ("actor.train(gen, loss=sft(), epochs=2 prompts)", "2 prompts", ("plain number", "prompts")),
])
def test_calls_in_a_wrong_unit(call: str, underlined: str, parts: tuple[str, ...]) -> None:
    [d] = errors(call if "train" in call else f"o = {call}\n  x = mean(len(o))")
    assert d.code == "RL0218" and d.span is not None and d.span.text == underlined
    assert all(p in d.title for p in parts)
    if "minibatches" in call:
        assert "`minibatch=64 sequences`" in d.help


@pytest.mark.parametrize(("block", "word"), [
    ("every 2 prompts { save actor }", "every"), ("repeat 2 tokens { x = mean(s) }", "repeat"),
    ("repeat {\n    pp = d.next()\n    g2 = actor.generate(pp)\n  } until count(g2) > 1 max 4 sequences", "max"),
])
def test_blocks_count_plainly(block: str, word: str) -> None:
    [d] = errors(block)
    assert d.code == "RL0218" and d.title.startswith(f"`{word}` is a plain number, not a number of ")


def test_steps_are_a_plain_number() -> None:
    with pytest.raises(Failure) as caught:
        build(parse(SourceFile("main.rlf", HEAD + FLOW.replace("steps=2", "steps=2 prompts") % "x = mean(s)")), {})
    [d] = caught.value.diagnostics
    assert d.code == "RL0218" and "`steps` is a plain number" in d.title


def test_calls_in_their_unit() -> None:
    graph("o = actor.generate(p, n=4 sequences, max_new_tokens=64 tokens, min_new_tokens=1 tokens)\n  x = mean(len(o))")


# ------------------------------------------------------------------------------------------------- minibatch=


def train(statement: str) -> g.Train:
    [node] = [i for i in graph(statement).items if isinstance(i, g.Train)]
    return replace(node, span=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "count"), [
    ("64", 4), ("64 sequences", 4), ("16 prompts", 4), ("256", 1), ("64 prompts", 1), ("1 prompts", 64), ("1", 256),
])
def test_the_size_of_a_minibatch_gives_the_same_call_as_their_number(size: str, count: int) -> None:
    made = train(f"actor.train(gen, loss=sft(), minibatch={size}, epochs=2)")
    assert made.minibatches == count
    assert made == train(f"actor.train(gen, loss=sft(), minibatches={count}, epochs=2)")


def test_minibatches_of_answers_and_pairs() -> None:
    assert train("actor.train(ans, loss=sft(), minibatch=16 sequences)").minibatches == 4
    call = "actor.train(pair.chosen, pair.rejected, loss=dpo(ref_chosen=c, ref_rejected=r), minibatch=16 pairs)"
    assert train("c = ref.logprobs(pair.chosen)\n  r = ref.logprobs(pair.rejected)\n  " + call).minibatches == 4


@pytest.mark.parametrize(("call", "code", "underlined", "part"), [
    ("actor.train(gen, loss=sft(), minibatch=48)", "RL0205", "48", "32 or 64"),
    ("actor.train(gen, loss=sft(), minibatch=48)", "RL0205", "48", "48 sequences does not divide the 256 sequences"),
    ("actor.train(gen, loss=sft(), minibatch=12 prompts)", "RL0205", "12 prompts", "8 or 16"),
    ("actor.train(gen, loss=sft(), minibatch=12 prompts)", "RL0205", "12 prompts", "the 64 prompts of `gen`"),
    ("actor.train(gen, loss=sft(), minibatch=300)", "RL0205", "300", "nearest divisors: 256"),
    ("actor.train(gen, loss=sft(), minibatch=0)", "RL0205", "0", "at least 1"),
    ("actor.train(gen, loss=sft(), minibatch=0.5)", "RL0205", "0.5", "an integer"),
    ("actor.train(gen, loss=sft(), minibatch=64 pairs)", "RL0218", "64 pairs", "sequences, prompts or tokens, not pairs"),
    ("actor.train(ans, loss=sft(), minibatch=16 prompts)", "RL0218", "16 prompts", "sequences or tokens, not prompts"),
    ("actor.train(pair.chosen, loss=sft(), minibatch=16 sequences)", "RL0218", "16 sequences", "pairs or tokens, not sequences"),
    ("actor.train(gen, loss=sft(), minibatch=64, minibatches=4)", "RL0215", "minibatch=64", "cannot be combined"),
    ("kept = gen where s > 0\n  actor.train(kept, loss=sft(), minibatch=64)", "RL0213", "64", "minibatches="),
    ("actor.train(gen, loss=sft(), minibatch=count(gen))", "RL0211", "count(gen)", "constant"),
])
def test_a_minibatch_that_cannot_be(call: str, code: str, underlined: str, part: str) -> None:
    [d] = errors(call)
    assert d.code == code and d.span is not None and d.span.text == underlined
    assert part in said(d)


def test_divisors_of_a_huge_batch_are_found_at_once() -> None:
    top = 'data e = jsonl("d.jsonl", batch=1_000_000_000_000_000_000)\n'
    [d] = errors("x = e.next()\n  actor.train(x, loss=sft(), minibatch=3)", top)
    assert d.code == "RL0205" and "2 or 4" in d.help


# ------------------------------------------------------------------------------------------------ the algebra


@pytest.mark.parametrize("unit", UNITS)
def test_words_differ_from_one_another_only(unit: str) -> None:
    assert not differ(unit, unit) and not differ("", unit) and not differ(unit, "")
    assert all(differ(unit, u) for u in UNITS if u != unit)


def test_totals_grow_with_the_rows_that_they_cover() -> None:
    assert reduced("count", PLAIN, "tokens", True, True) == Unit("tokens", minibatch=1.0)
    assert reduced("count", PLAIN, "tokens", True, False) == Unit("tokens", whole=1.0)
    assert reduced("count", PLAIN, "tokens", False, True) == Unit("tokens")  # by seq
    assert reduced("sum", Unit("", whole=-1.0), "tokens", True, True) == Unit("", 1.0, -1.0)
    assert reduced("mean", Unit("", whole=-1.0), "tokens", True, True) == Unit("", 0.0, -1.0)
    assert reduced("sum", Unit("", minibatch=None), "tokens", True, True).minibatch is None
