"""What buffers refuse: the code, and the words that it points at."""

from __future__ import annotations

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.graph.build import build
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse

HEAD = """
use py "r.py" (size: gen -> seq)
data prompts = jsonl("p.jsonl", batch=8)
data held    = jsonl("h.jsonl", batch=8)
model actor  = causal_lm("m") train adamw(lr=1e-6)
loss nll(logprobs: token;) { return -mean(logprobs) }
buffer good  = rows(capacity=16)
buffer other = rows(capacity=16 sequences)
state heat   = 2
flow f(steps=2) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4)
  hot    = actor.generate(prompt, n=4, temperature=2)
  r      = size(gen)
"""
FINE = [
    "good.add(gen)\nold = good.sample(4)\nactor.train(old, loss=nll())",
    "old = good.sample(4)\ngood.add(gen)\nactor.train(old, loss=nll())",
    "a = gen with x=r\nk = a where r > 0\ngood.add(k)\nold = good.sample(16, weight=good.x)\nmetric m = mean(old.x)",
    "old = other.sample(4)\ngood.add(gen)\nmore = good.sample(4)\nother.add(more)\nmetric m = mean(len(old))",
    "good.add(gen)\nold = good.sample(4)\nnew = actor.generate(old, n=2)\nmetric m = mean(size(gen)) + mean(len(new))",
    "every 2 { good.add(gen) }\nold = good.sample(4)\nmetric m = mean(len(old))",
    "a = pick(gen, r)\ngood.add(a)\nold = good.sample(4)\nmetric m = mean(old.logprobs)",
    "a = gen with x=mean(r by prompt), y=mean(r), z=1\ngood.add(a)\nold = good.sample(4)\n"
    "metric m = mean(old.x * old.z - old.y)",
    "a = gen with x=r\ngood.add(a)\nold = good.sample(4, weight=exp(-good.x) * heat + where(good.finished, 1, 0) ** 2)\n"
    "metric m = mean(old.x)",
    "good.add(gen)\nold = good.sample(4, weight=good.finished)\nmetric m = mean(len(old))",
    "good.add(gen)\nold = good.sample(4, weight=2)\nmetric m = mean(len(old))",
    "a = gen with z=1, y=mean(r)\ngood.add(a)\nold = good.sample(4 sequences)\nmetric m = sum(a.z) + sum(a.y * r) + mean(old.z)",
    "good.add(prompt)\nold = good.sample(4)\nnew = actor.generate(old)\nmetric m = mean(len(new))",
]
# (statements, code, the text that it underlines)
MISTAKES = [
    ("old = good.sample(4)", "RL0215", "old = good.sample(4)"),
    ("good.add(gen)\nold = good.sample(17)", "RL0205", "17"),
    ("good.add(gen)\nold = good.sample(0)", "RL0205", "0"),
    ("good.add(gen)\nold = good.sample()", "RL0204", "good.sample()"),
    ("good.add(gen)\ngood.sample(4)", "RL0212", "good.sample(4)"),
    ("good.add(gen)\nold = good.sample(4, by=r)", "RL0107", "by"),
    ("good.add(gen)\nold = good.sample(4, weight=r)", "RL0212", "r"),
    ("good.add(gen)\nold = good.sample(4, weight=good.logprobs)", "RL0201", "good.logprobs"),
    ("a = gen with x=r\ngood.add(a)\nold = good.sample(4, weight=mean(good.x))", "RL0212", "mean(good.x)"),
    ("a = gen with x=r\ngood.add(a)\nold = good.sample(4, weight=good.x * uniform(good.x))", "RL0212",
     "uniform(good.x)"),
    ("a = gen with x=r\ngood.add(a)\nold = good.sample(4, weight=good.x + r)", "RL0202", "good.x + r"),
    ('a = gen with x=r\ngood.add(a)\nold = good.sample(4, weight="x")', "RL0203", '"x"'),
    ("good.add(gen)\nold = good.sample(4, weight=0)", "RL0205", "0"),
    ("good.add(gen)\nold = good.sample(4 tokens)", "RL0218", "4 tokens"),
    ("good.add(gen)\nold = good.sample(4, weight=-1)", "RL0205", "-1"),
    ("a = gen with x=r\ngood.add(a)\nother.add(a)\nold = good.sample(4, weight=other.x)", "RL0212", "other.x"),
    ("a = gen with x=r\ngood.add(a)\nold = good.sample(4)\nmetric m = good.x", "RL0212", "good.x"),
    ("a = gen with x=r\ngood.add(a)\nold = good.sample(4, weight=good.y)", "RL0112", "y"),
    ("a = gen with x=r\ngood.add(a)\nold = good.sample(4, weight=good.x, weight=good.x)", "RL0215", "weight=good.x"),
    ("good.add(gen)\nold = good.sample(4, weight=good.x)", "RL0112", "x"),
    ("good.add(gen)\nold = good.sample(4) on mesh(0:1)", "RL0212", "on mesh(0:1)"),
    ("good.add()", "RL0204", "good.add()"),
    ("good.add(r)", "RL0203", "r"),
    ("x = good.add(gen)", "RL0212", "x = good.add(gen)"),
    ("good.take(4)", "RL0112", "take"),
    ("x = 1 + good", "RL0203", "good"),
    ("metric m = mean(good.sample(4))", "RL0212", "good.sample"),
    ("good.add(gen)\ngood.add(hot)", "RL0202", "hot"),
    ("a = gen with x=r\ngood.add(gen)\ngood.add(a)", "RL0202", "a"),
    ("repeat 2 { good.add(gen) }", "RL0212", "good.add(gen)"),
    ("good.add(gen)\neval held {\np = held.next()\ng = actor.generate(p)\ngood.add(g)\nmetric m = mean(len(g)) }",
     "RL0212", "good.add(g)"),
    ("good.add(gen)\nold = good.sample(4)\nmetric m = mean(size(old))", "RL0213", "old"),
    ("good = 1", "RL0102", "good"),
    ("old = good.sample(4)\ngood.add(r)", "RL0203", "r"),
]


def errors(text: str) -> tuple[Diagnostic, ...]:
    try:
        build(parse(SourceFile("f.rlf", text)), {}, read=lambda path: "def size(prompt, completion):\n    return 1.0\n")
    except Failure as failure:
        return tuple(failure.diagnostics)
    return ()


@pytest.mark.parametrize("body", FINE)
def test_fine(body: str) -> None:
    assert not errors(f"{HEAD}\n{body}\n}}\n")


@pytest.mark.parametrize(("body", "code", "words"), MISTAKES)
def test_mistakes(body: str, code: str, words: str) -> None:
    found = [(d.code, d.span.text if d.span is not None else "") for d in errors(f"{HEAD}\n{body}\n}}\n")]
    assert found == [(code, words)]


@pytest.mark.parametrize(("body", "why"), [
    ("good.add(gen)\ngood.add(hot)", "log-probs at the temperature 2, and the first rows have log-probs at the "
                                     "temperature 1"),
    ("short = actor.generate(prompt, max_new_tokens=8)\ngood.add(short)\ngood.add(gen)",
     "responses of up to 256 tokens, and the first rows have responses of up to 8 tokens"),
    ("more = actor.generate(gen)\ngood.add(gen)\ngood.add(more)",
     "prompts of up to 768 tokens, and the first rows have prompts of up to 512 tokens"),
])
def test_which_limit_differs(body: str, why: str) -> None:
    (found,) = errors(f"{HEAD}\n{body}\n}}\n")
    assert (found.code, found.label) == ("RL0202", why)


@pytest.mark.parametrize(("value", "code"), [
    ("rows()", "RL0215"), ("rows(16)", "RL0204"), ("rows(capacity=0)", "RL0205"), ("rows(size=3)", "RL0107"),
    ("4", "RL0203"),
    ("list(capacity=3)", "RL0203"),
])
def test_declarations(value: str, code: str) -> None:
    found = [d.code for d in errors(HEAD.replace("rows(capacity=16)", value, 1) + "}\n")]
    assert found in ([code], [code, "RL0215"])
