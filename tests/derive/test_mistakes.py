"""What `pick`, `others`, `pair` and `with` refuse: the code, and the words that it points at."""

from __future__ import annotations

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.graph.build import build
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse

HEAD = """
use std.simpo (simpo)
use py "r.py" (size: gen -> seq)
data prompts = jsonl("p.jsonl", batch=8)
data answers = jsonl("a.jsonl", batch=8, kind="answers")
model actor = causal_lm("m") train adamw(lr=1e-6)
fn inside(x: seq) {
  y = pick(x, x)
  return y
}
flow f(steps=1) {
  prompt = prompts.next()
  row    = answers.next()
  gen    = actor.generate(prompt, n=4)
  more   = actor.generate(prompt, n=4)
  single = actor.generate(prompt)
  r      = size(gen)
"""
# (statements, code, the text that it underlines)
MISTAKES = [
    ("x = pick(gen)", "RL0204", "pick"),
    ("x = pick(gen, r, r)", "RL0204", "pick"),
    ("x = pick(gen, by=r)", "RL0107", "by"),
    ("x = pick(gen, r by prompt)", "RL0107", "prompt"),
    ("x = pick(prompt, r)", "RL0213", "prompt"),
    ("x = pick(r, gen)", "RL0203", "r"),
    ("x = pick(row, len(row))", "RL0202", "row"),
    ("x = pick(gen, gen)", "RL0203", "gen"),
    ("x = pick(gen, r > 0)", "RL0203", "r > 0"),
    ("x = pick(gen, gen.logprobs)", "RL0201", "gen.logprobs"),
    ("x = pick(gen, mean(r by prompt))", "RL0201", "mean(r by prompt)"),
    ("x = pick(gen, 1)", "RL0201", "1"),
    ("x = pick(gen, size(more))", "RL0202", "size(more)"),
    ("x = pick(pick(gen, r), r)", "RL0202", "pick(gen, r)"),
    ("x = others()", "RL0204", "others"),
    ("x = others(gen, r)", "RL0204", "others"),
    ("x = others(n=gen)", "RL0107", "n"),
    ("x = others(r)", "RL0203", "r"),
    ("x = others(prompt)", "RL0213", "prompt"),
    ("x = others(row)", "RL0202", "row"),
    ("x = others(pick(gen, r))", "RL0202", "pick(gen, r)"),
    ("x = others(single)", "RL0202", "single"),
    ("x = others(pair(pick(gen, r), pick(gen, -r)))", "RL0203", "pair(pick(gen, r), pick(gen, -r))"),
    ("x = others(gen)\nmetric m = mean(size(x) + size(more))", "RL0202", None),
    ("x = others(gen)\ny = gen where size(x) > 1", "RL0202", "size(x) > 1"),
    ("x = pair(gen)", "RL0204", "pair"),
    ("x = pair(gen, r)", "RL0203", "r"),
    ("x = pair(gen, more)", "RL0202", "pair(gen, more)"),
    ("x = pair(pick(gen, r), gen)", "RL0202", "pair(pick(gen, r), gen)"),
    ("x = pair(pick(gen, r), row)", "RL0202", "pair(pick(gen, r), row)"),
    ("x = pair(gen, gen)", "RL0215", "gen"),
    ("x = pair(prompt, gen)", "RL0213", "prompt"),
    ("b = pick(gen, r)\nx = pair(b where len(b) > 0, b)", "RL0202", "pair(b where len(b) > 0, b)"),
    ("b = pick(gen, r)\nx = pair(b where r > 0, b)", "RL0202", "r > 0"),
    ("x = r with a=r", "RL0203", "r"),
    ("x = gen with a=r, a=r", "RL0102", "a"),
    ("x = gen with logprobs=r", "RL0111", "logprobs"),
    ('x = gen with a="text"', "RL0203", '"text"'),
    ("x = gen with a=size(more)", "RL0202", "size(more)"),
    ("x = gen with a=more.logprobs", "RL0202", "more.logprobs"),
    ("g = actor.generate(prompt) with a=r", "RL0212", "a"),
    ("d = pair(pick(gen, r), pick(gen, -r))\nx = d with a=r", "RL0203", "d"),
    ("x = gen with a=r\nmetric m = mean(x.b)", "RL0112", "b"),
    ("b = pick(gen, r)\nmetric m = mean(b.reward)", "RL0112", "reward"),
    ("b = pick(gen, r)\nactor.train(b, loss=simpo())", "RL0206", None),
    ("d = pair(pick(gen, r), pick(gen, -r))\nactor.train(d.chosen, d.rejected, loss=simpo(), minibatch=3 pairs)",
     "RL0205", "3 pairs"),
    ("d = pair(pick(gen, r), pick(gen, -r))\nactor.train(d.chosen, d.rejected, loss=simpo(), minibatch=4 prompts)",
     "RL0218", "4 prompts"),
]


def failed(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(Failure) as caught:
        build(parse(SourceFile("f.rlf", text)), {}, read=lambda path: "def size(prompt, completion):\n    return 1.0\n")
    return tuple(caught.value.diagnostics)


@pytest.mark.parametrize("text, code, words", MISTAKES, ids=[m[0].split("\n")[-1] for m in MISTAKES])
def test_a_mistake_is_named(text: str, code: str, words: str | None) -> None:
    found = failed(HEAD.replace("fn inside(x: seq) {\n  y = pick(x, x)\n  return y\n}\n", "") + text + "\n}\n")
    assert code in {d.code for d in found}, found
    (first,) = [d for d in found if d.code == code][:1]
    assert words is None or first.span is not None and first.span.text == words, first


@pytest.mark.parametrize("batches, help_", [
    ("gen, more", "duel = pair(pick(gen, x), pick(more, y))"),  # what the two sides could be
    ("gen, single", "duel = pair(pick(gen, x), pick(single, y))"),
    ("pick(gen, r), pick(elsewhere, r)", 'kind="pairs"'),
    ("gen, elsewhere", 'kind="pairs"'),
    ("tail, gen", 'kind="pairs"'),
    ("gen, row", 'kind="pairs"'),
    ("some.chosen, all.rejected", "train on `some.chosen` and `some.rejected`"),
])
def test_two_batches_that_are_no_pairs(batches: str, help_: str) -> None:
    first = "  other = prompts.next()\n  elsewhere = actor.generate(other, n=4)\n  tail = actor.generate(gen)\n" \
            "  all = pair(pick(gen, r), pick(gen, -r))\n  some = all where all.chosen.finished\n"
    found = failed(HEAD + first + f"  actor.train({batches.replace('elsewhere, r', 'elsewhere, size(elsewhere)')}, "
                   "loss=simpo())\n}\n")
    (help_of,) = [d.help for d in found if d.code == "RL0202"]
    assert help_ in help_of, help_of


RETURNS = """
fn share(x: seq) -> prompt {
  return mean(x by prompt)
}
fn shifted(x: seq) -> prompt {
  return x + 1
}
"""


def test_a_prompt_of_continuations_is_called_a_prompt() -> None:
    """`mean(x by prompt)` of others is a seq value of what they are others of, and a function may declare either."""
    head = HEAD.replace("fn inside(x: seq) {\n  y = pick(x, x)\n  return y\n}\n", RETURNS.replace("x + 1", "mean(x)"))
    text = head + "  rival = others(gen)\n  a = share(len(rival))\n  metric a = mean(a + r)\n}\n"
    assert build(parse(SourceFile("f.rlf", text)), {}, read=lambda path: "def size(rows):\n    return 1.0\n")
    found = failed(HEAD.replace("fn inside", RETURNS + "fn inside") + "  a = shifted(len(others(gen)))\n}\n")
    assert "RL0201" in {d.code for d in found} and any("declares prompt" in d.title for d in found)


def test_functions_make_no_sequences() -> None:
    found = failed(HEAD + "x = inside(r)\n}\n")
    assert [d.code for d in found] == ["RL0212"] and "outside the flow" in found[0].title
