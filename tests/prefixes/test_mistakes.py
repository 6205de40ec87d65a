"""What `prefixes`, `along` and the operators over the sequences of a prompt refuse: the code, and the words that it
points at."""

from __future__ import annotations

import pytest

from rldsl.graph.build import build
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse
from tests.derive.test_mistakes import failed

HEAD = """
use py "r.py" (size: gen -> seq)
data prompts = jsonl("p.jsonl", batch=8)
data answers = jsonl("a.jsonl", batch=8, kind="answers")
model actor = causal_lm("m") train adamw(lr=1e-6)
loss nll(logprobs: token; weight: token) { return -mean(weight * logprobs) }
flow f(steps=1) {
  prompt = prompts.next()
  row    = answers.next()
  gen    = actor.generate(prompt, n=4)
  single = actor.generate(prompt)
  r      = size(gen)
  cuts   = prefixes(gen, every=4)
  tails  = actor.generate(cuts, n=2)
  v      = mean(size(tails) by prompt)
"""
MISTAKES = [
    ("x = prefixes()", "RL0204", "prefixes"),
    ("x = prefixes(gen)", "RL0205", "prefixes(gen)"),
    ('x = prefixes(gen, at="a", every=2)', "RL0205", 'prefixes(gen, at="a", every=2)'),
    ('x = prefixes(gen, at="")', "RL0205", 'prefixes(gen, at="")'),
    ("x = prefixes(gen, at=3)", "RL0205", "3"),
    ("x = prefixes(gen, every=0)", "RL0205", "0"),
    ("x = prefixes(gen, every=2, most=0)", "RL0205", "0"),
    ("x = prefixes(gen, fractions=[0.5, 1])", "RL0205", None),
    ("x = prefixes(gen, every=2, best=1)", "RL0107", "best"),
    ("x = prefixes(gen, 4)", "RL0204", "prefixes"),
    ("x = prefixes(prompt, every=2)", "RL0213", "prompt"),
    ("x = prefixes(cuts, every=2)", "RL0213", "cuts"),
    ("x = prefixes(r, every=2)", "RL0203", "r"),
    ("x = cuts.ends", "RL0112", "ends"),
    ("x = len(cuts)", "RL0213", "cuts"),
    ("x = pick(cuts, v)", "RL0213", "cuts"),
    ("x = along(v)", "RL0204", "along"),
    ("x = along(r, gen)", "RL0201", "r"),
    ("x = along(gen.logprobs, gen)", "RL0201", "gen.logprobs"),
    ("x = along(1, gen)", "RL0201", "1"),
    ("x = along(size(tails), gen)", "RL0201", "size(tails)"),
    ("x = along(v, single)", "RL0202", "v"),
    ("x = along(v, tails)", "RL0202", "v"),
    ("x = along(v, r)", "RL0203", None),
    ("x = along(gen, gen)", "RL0203", None),
    ("x = next(v by seq)", "RL0208", "seq"),
    ("x = next(v by batch)", "RL0208", "batch"),
    ("x = next(v by row)", "RL0101", "row"),
    ("x = next(gen.logprobs by prompt)", "RL0201", "gen.logprobs"),
    ("x = next(1 by prompt)", "RL0201", "1"),
    ("x = next(len(row) by prompt)", "RL0202", "len(row)"),
    ("x = next(v by prompt, gen.logprobs)", "RL0201", "gen.logprobs"),
    ("x = next(gen.logprobs, r)", "RL0204", None),
    ("x = next(v by prompt, size(single))", "RL0202", None),
    ("x = last(v by prompt)", "RL0107", "prompt"),
    ("x = discount(v by prompt, v)", "RL0201", None),
    ("x = discount(v by prompt)", "RL0204", "discount"),
    ("actor.train(gen, loss=nll(weight=v))", "RL0202", None),
]
WORKS = [
    "metric m = mean(along(v, gen))",
    "metric m = mean(along(cuts.at, gen)) + mean(cuts.at / len(gen))",
    "metric m = mean(next(v by prompt, r) - v)",
    "metric m = mean(prev(r by prompt) + cumsum(r by prompt) + discount(r by prompt, 0.9))",
    "metric m = mean(max(v by prompt) - r)",
    'best = pick(gen, r)\nc = prefixes(best, at="x", most=2)\nt = actor.generate(c)\nmetric m = mean(size(t))',
    "half = prefixes(row, fractions=[0.5])\nt = actor.generate(half)\nmetric m = mean(size(t))",
    "kept = gen where r > 0\nc = prefixes(kept, every=3)\nt = actor.generate(c, n=2)\n"
    "w = mean(size(t) by prompt)\nmetric m = mean(along(w, kept))",
    "actor.train(gen, loss=nll(weight=along(next(v by prompt, r) - v, gen)))",
    "actor.train(tails, loss=nll(weight=tails.logprobs))",
]


@pytest.mark.parametrize(("text", "code", "words"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_named(text: str, code: str, words: str | None) -> None:
    found = failed(f"{HEAD}  {text}\n}}\n")
    assert code in {d.code for d in found}, found
    first = next(d for d in found if d.code == code)
    assert words is None or first.span is not None and first.span.text == words, first


@pytest.mark.parametrize("text", WORKS)
def test_what_works(text: str) -> None:
    lines = "".join(f"  {line}\n" for line in text.split("\n"))
    build(parse(SourceFile("f.rlf", f"{HEAD}{lines}}}\n")), {}, read=lambda path: "def size(rows):\n    return 1.0\n")


def test_not_in_a_loss() -> None:
    (found,) = failed(HEAD.replace("-mean(weight * logprobs)", "-mean(next(mean(logprobs by seq) by prompt))")
                      + "  actor.train(gen, loss=nll(weight=gen.logprobs))\n}\n")
    assert found.code in ("RL0210", "RL0212", "RL0207", "RL0218"), found
