"""What states of rows and weights refuse: the code, and the words that it points at; and what they allow."""

from __future__ import annotations

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.graph import model as g
from rldsl.graph.build import build
from rldsl.semantics.lints import lint
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse

HEAD = """
use std.grpo (grpo_free, group_norm)
use py "r.py" (size: gen -> seq)
data prompts = jsonl("p.jsonl", batch=8, numbers=["label"])
data others  = jsonl("p.jsonl", batch=8)
data answers = jsonl("a.jsonl", batch=8, kind="answers")
data held    = jsonl("h.jsonl", batch=8)
state rate of prompts = 0.5
state seen of prompts = 0
state seen of answers = 0
state known of held = 0
state heat = 2
model actor = causal_lm("m") train adamw(lr=1e-6)
"""
FLOW = """
flow f(steps=1) {
  prompt = prompts.next()
  row    = answers.next()
  gen    = actor.generate(prompt, n=4)
  r      = size(gen)
"""
# (statements, code, the text that it underlines)
MISTAKES = [
    ("prompt.label = 1", "RL0203", "prompt.label"),
    ("prompt.rats = 1", "RL0112", "rats"),
    ("gen.rate = mean(r by prompt)", "RL0112", "rate"),
    ("gen.logprobs = gen.logprobs", "RL0112", "logprobs"),
    ("actor.rate = 1", "RL0203", "actor.rate"),
    ("r.rate = 1", "RL0203", "r.rate"),
    ("prompts.rate = 1", "RL0203", "prompts.rate"),
    ("prompt.rate = r", "RL0201", "r"),
    ("prompt.rate = gen.logprobs", "RL0201", "gen.logprobs"),
    ("prompt.rate = mean(r by prompt) > 0", "RL0203", "mean(r by prompt) > 0"),
    ("prompt.rate = \"text\"", "RL0203", '"text"'),
    ("prompt.rate = row.seen", "RL0202", "row.seen"),
    ("row.seen = gen.logprobs", "RL0202", "gen.logprobs"),
    ("x = gen.rate", "RL0112", "rate"),
    ("x = prompts.rate", "RL0212", "prompts.rate"),
    ("x = prompts.label", "RL0212", "prompts.label"),
    ("x = prompts.nothing", "RL0112", "nothing"),
    ("x = prompt with rate=1", "RL0111", "rate"),
    ("x = prompts.next(64)", "RL0204", "64"),
    ("x = prompts.next(wait=1)", "RL0204", "wait=1"),
    ("x = prompts.next(weight=mean(prompts.rate))", "RL0212", "mean(prompts.rate)"),
    ("x = prompts.next(weight=prompt.rate)", "RL0212", "prompt.rate"),
    ("x = prompts.next(weight=uniform(prompts.rate))", "RL0212", "uniform(prompts.rate)"),
    ("x = prompts.next(weight=mean(r))", "RL0212", "r"),
    ("x = others.next(weight=prompts.rate)", "RL0212", "prompts.rate"),
    ("x = prompts.next(weight=\"much\")", "RL0203", '"much"'),
    ("x = prompts.next(weight=prompts.wait)", "RL0112", "wait"),
    ("eval held {\n x = held.next()\n g = actor.generate(x)\n x.known = 1\n metric m = mean(len(g))\n}", "RL0212",
     "x.known = 1"),
    ("eval held {\n x = held.next(weight=1)\n g = actor.generate(x)\n metric m = mean(len(g))\n}", "RL0212", "weight=1"),
]
DECLARATIONS = [
    ("state rate of prompts = 1", "RL0102", "rate"),
    ("state label of prompts = 1", "RL0111", "label"),
    ("state tokens of prompts = 1", "RL0111", "tokens"),
    ("state next of prompts = 1", "RL0111", "next"),
    ("state x of actor = 1", "RL0203", "actor"),
    ("state x of nothing = 1", "RL0101", "nothing"),
    ("state x of prompts = true", "RL0205", "true"),
    ("state x of prompts = heat", "RL0203", "heat"),
]


def read(path: str) -> str:
    return "def size(rows):\n    return [1.0] * len(rows)\n"


def found(text: str) -> list[Diagnostic]:
    try:
        build(parse(SourceFile("f.rlf", text)), {}, read=read)
    except Failure as failure:
        return list(failure.diagnostics)
    return []


def pointed(d: Diagnostic) -> tuple[str, str]:
    assert d.span is not None
    return d.code, d.span.text


@pytest.mark.parametrize(("statements", "code", "words"), MISTAKES)
def test_mistakes(statements: str, code: str, words: str) -> None:
    assert [pointed(d) for d in found(f"{HEAD}{FLOW}{statements}\n}}\n")] == [(code, words)]


@pytest.mark.parametrize(("declaration", "code", "words"), DECLARATIONS)
def test_declarations(declaration: str, code: str, words: str) -> None:
    assert [pointed(d) for d in found(f"{HEAD}{declaration}\n{FLOW}}}\n")] == [(code, words)]


def test_every_message_has_a_help() -> None:
    for statements, *_ in MISTAKES:
        assert all(d.help or d.code == "RL0203" for d in found(f"{HEAD}{FLOW}{statements}\n}}\n")), statements


ALLOWED = """
  often = prompt where prompt.rate > 0.2 and prompt.label > 0
  often.seen = often.seen + 1
  prompt.rate = 0
  prompt.rate = prompt.label
  prompt.rate = over(mean(r by prompt), often)
  row.seen = len(row)
  drawn = prompts.next(weight=where(prompts.rate < 1, exp(-prompts.rate / heat), 0) * (1 + prompts.label))
  more = answers.next(weight=answers.seen < 3)
  third = others.next(weight=1)
  metric rate = mean(drawn.rate) - mean(prompt.rate) + mean(more.seen) + count(third)
"""


def test_what_is_allowed() -> None:
    assert found(f"{HEAD}{FLOW}{ALLOWED}}}\n") == []


def test_each_read_is_a_lookup_at_its_place() -> None:
    """One lookup serves two reads between the same updates of a block; a read after an update has one of its own."""
    body = """
  a = prompt.rate + prompt.rate
  b = prompt.rate * 2
  every 2 { metric inside = mean(prompt.rate) }
  prompt.rate = a + b
  metric x = mean(prompt.rate)
  repeat 2 { prompt.rate = prompt.rate + 1 }
  metric y = mean(prompt.rate)
"""
    graph = build(parse(SourceFile("f.rlf", f"{HEAD}{FLOW}{body}}}\n")), {}, read=read)
    kinds = [type(n).__name__ for n in g.nodes(graph.items) if isinstance(n, g.Lookup | g.Update)]
    assert kinds == ["Lookup", "Lookup", "Update", "Lookup", "Lookup", "Update", "Lookup"]


def test_a_state_that_no_field_names_is_unused() -> None:
    file = parse(SourceFile("f.rlf", f"{HEAD}state wait of prompts = 0\n{FLOW}  prompt.rate = row.seen\n}}\n"))
    unused = {d.span.text for d in lint([file]) if d.code == "RL0901" and d.span is not None}
    assert {"wait", "known"} <= unused and not {"rate", "seen"} & unused


@pytest.mark.parametrize(("value", "help_"), [
    ("size(gen)", "mean(x by prompt)"), ("gen.logprobs", "mean(x by prompt)"),
    ("mean(size(tail) by prompt)", "mean(mean(x by gen) by prompt)"), ("tail.logprobs", "mean(mean(x by gen) by prompt)"),
])
def test_the_help_says_how_far_to_reduce(value: str, help_: str) -> None:
    made = "cuts = prefixes(gen, every=2)\ntail = actor.generate(cuts)\n"
    (error,) = found(f"{HEAD}{FLOW}{made}prompt.rate = {value}\n}}\n")
    assert error.code == "RL0201" and error.help == f"reduce it: `{help_}`"
    assert not found(f"{HEAD}{FLOW}{made}prompt.rate = {help_.replace('x', value)}\n}}\n")
