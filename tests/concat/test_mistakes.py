"""What `concat` refuses: the code, and the words that it points at."""

from __future__ import annotations

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.graph.build import build
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse

HEAD = """
use std.grpo (group_norm)
use py "r.py" (size: gen -> seq)
data prompts = jsonl("p.jsonl", batch=8, numbers=["label"])
data further = jsonl("o.jsonl", batch=4, numbers=["label", "more"])
data answers = jsonl("a.jsonl", batch=8, kind="answers")
data pairs   = jsonl("x.jsonl", batch=8, kind="pairs")
model actor  = causal_lm("m") train adamw(lr=1e-6)
loss nll(logprobs: token; w: seq) { return -mean(w * logprobs) }
buffer good  = rows(capacity=16)
flow f(steps=2) {
  prompt = prompts.next()
  second = prompts.next()
  third  = further.next()
  row    = answers.next()
  both   = pairs.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=8)
  hot    = actor.generate(prompt, n=4, temperature=2)
  more   = actor.generate(second, n=4)
  few    = actor.generate(third, n=2)
  r      = size(gen)
  good.add(gen)
  old    = good.sample(4)
"""
FINE = [
    "x = concat(gen, old)\nmetric m = mean(x.logprobs) + mean(len(x))",
    "x = concat(gen, more)\nmetric m = mean(mean(len(x) by prompt)) + mean(x.finished)",
    "x = concat(gen, more, few)\nmetric m = mean(len(x))",
    "x = concat(prompt, third)\nmetric m = mean(x.label)",
    "x = concat(prompt, second)\nk = x where x.label > 0\nmetric m = mean(k.label)",
    "x = concat(prompt, third)\ng = actor.generate(x, n=2)\nmetric m = mean(g.logprobs)",
    "x = concat(gen, row)\nactor.train(x, loss=nll(w=len(x)))",
    "x = concat(both.chosen, both.rejected)\nactor.train(x, loss=nll(w=len(x)))",
    "a = pick(gen, r)\nb = pick(gen, -r)\nx = concat(a, b)\nmetric m = mean(max(len(x) by prompt) - len(a))",
    "a = gen with w=r\nb = old with w=1\nx = concat(a, b)\nk = x where x.w > 0\nmetric m = mean(k.w) + mean(over(len(x), k))",
    "a = gen with w=r, v=r\nb = more with w=more.logprobs, u=1\nx = concat(a, b)\nactor.train(x, loss=nll(w=mean(x.w by seq)))",
    "k = gen where r > 0\nl = gen where r < 0\nx = concat(k, l)\nmetric m = mean(r - 1) + mean(max(len(x) by prompt))",
    "y = concat(gen, more)\nx = concat(y, few)\nz = concat(old, y)\nmetric m = count(x) + count(z)",
    "x = concat(gen, old)\nt = actor.generate(x, n=2)\nw = whole(t)\nmetric m = mean(mean(len(w) by prompt) - len(x))",
    "x = concat(gen, old)\ngood.add(x)",
]
# (statements, code, the text that it underlines)
MISTAKES = [
    ("x = concat(gen)", "RL0204", "concat"),
    ("x = concat()", "RL0204", "concat"),
    ("x = concat(gen, by=old)", "RL0107", "by"),
    ("x = concat(gen, old by prompt)", "RL0107", "prompt"),
    ("x = concat(gen, r)", "RL0203", "r"),
    ("x = concat(gen, both)", "RL0203", "both"),
    ("x = concat(gen, actor)", "RL0203", "actor"),
    ("x = concat(gen, prompt)", "RL0213", "prompt"),
    ("x = concat(prompt, gen)", "RL0213", "prompt"),
    ("x = concat(gen, old, gen)", "RL0215", "gen"),
    ("x = concat(gen, hot)", "RL0205", "concat(gen, hot)"),
    ("x = concat(hot, row)", "RL0205", "concat(hot, row)"),
    ("a = actor.generate(prompt, n=2, max_new_tokens=4)\nx = concat(gen, old, a)", "RL0202", "concat(gen, old, a)"),
    ("x = concat(gen, old)\nm = mean(len(x) by prompt)", "RL0201", "len(x)"),
    ("x = concat(gen, few)\na = group_norm(len(x))", "RL0201", None),
    ("x = concat(gen, old)\nm = max(x.logprobs by prompt)", "RL0201", "x.logprobs"),
    ("x = concat(gen, old)\nk = x where len(x) > 1\nm = mean(len(k) by prompt)", "RL0201", "len(k)"),
    ("x = concat(gen, old)\nk = pick(x, len(x))", "RL0202", "x"),
    ("x = concat(gen, old)\nk = others(x)", "RL0202", "x"),
    ("x = concat(gen, old)\nm = next(len(x) by prompt)", "RL0202", "len(x)"),
    ("x = concat(gen, old)\nactor.train(x, loss=nll(w=r))", "RL0202", None),
    ("x = concat(gen, few)\nactor.train(x, loss=nll(w=len(x)), minibatch=2 prompts)", "RL0218", "2 prompts"),
    ("x = concat(gen, old)\nactor.train(x, loss=nll(w=len(x)), minibatch=2)", "RL0213", "2"),
    ("x = concat(prompt, third)\nm = mean(x.more)", "RL0112", "more"),
    ("a = gen with w=r\nx = concat(a, old)\nm = mean(x.w)", "RL0112", "w"),
    ("a = gen with w=r\nb = old with w=len(old) > 2\nx = concat(a, b)", "RL0203", "concat(a, b)"),
    ("a = gen with w=len(gen)\nb = old with w=count(old)\nx = concat(a, b)", "RL0218", "concat(a, b)"),
    ("x = concat(gen, old)\nm = mean(size(x))", "RL0213", "x"),
    ("x = concat(gen, row)\nm = mean(x.logprobs)", "RL0112", "logprobs"),
    ("x = concat(gen, row)\ng = actor.generate(x)", "RL0213", "x"),
]


def errors(body: str) -> tuple[Diagnostic, ...]:
    try:
        build(parse(SourceFile("f.rlf", f"{HEAD}\n{body}\n}}\n")), {},
              read=lambda path: "def size(prompt, completion):\n    return 1.0\n")
    except Failure as failure:
        return tuple(failure.diagnostics)
    return ()


@pytest.mark.parametrize("body", FINE)
def test_fine(body: str) -> None:
    assert not errors(body)


@pytest.mark.parametrize(("body", "code", "words"), MISTAKES, ids=[m[0].split("\n")[-1] for m in MISTAKES])
def test_a_mistake_is_named(body: str, code: str, words: str | None) -> None:
    found = errors(body)
    assert [d.code for d in found] == [code], found
    assert words is None or found[0].span is not None and found[0].span.text == words, found[0]


def test_functions_concatenate_nothing() -> None:
    found = errors("x = concat(gen, old)\nmetric m = inner(r)\n}\nfn inner(x: seq) {\n  y = concat(x, x)\n  return y")
    assert [d.code for d in found] == ["RL0212"] and "outside the flow" in found[0].title
