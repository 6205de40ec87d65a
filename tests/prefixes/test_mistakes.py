"""What `prefixes`, `along`, operators over siblings, `by` a batch and `over` with a default refuse."""

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
loss up(logprobs: token; x: seq) { return -mean(next(x by prompt) * mean(logprobs by seq)) }
flow f(steps=1) {
  prompt = prompts.next()
  row    = answers.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=8)
  more   = actor.generate(prompt, n=4)
  cuts   = prefixes(gen, every=2)
  tail   = actor.generate(cuts, n=2)
  kept   = gen where size(gen) > 0
  r      = size(gen)
  v      = mean(size(tail) by prompt)
"""
# (statements, code, the text that it underlines)
MISTAKES = [
    ("x = prefixes()", "RL0204", "prefixes"),
    ("x = prefixes(gen)", "RL0215", "prefixes"),
    ("x = prefixes(gen, every=2, at=\"a\", most=2)", "RL0215", "prefixes"),
    ("x = prefixes(gen, at=\"a\")", "RL0215", "prefixes"),
    ("x = prefixes(gen, at=\"\", most=2)", "RL0205", "prefixes"),
    ("x = prefixes(gen, every=0)", "RL0205", "0"),
    ("x = prefixes(gen, every=2, most=0)", "RL0205", "0"),
    ("x = prefixes(gen, fractions=[0.5, 0.2])", "RL0205", "prefixes"),
    ("x = prefixes(gen, fractions=[1])", "RL0205", "prefixes"),
    ("x = prefixes(gen, fractions=[])", "RL0205", "prefixes"),
    ("x = prefixes(gen, each=2)", "RL0107", "each"),
    ("x = prefixes(prompt, every=2)", "RL0213", "prompt"),
    ("x = prefixes(row, every=2)", "RL0213", "row"),
    ("x = prefixes(cuts, every=2)", "RL0213", "cuts"),
    ("x = prefixes(r, every=2)", "RL0203", "r"),
    ("metric x = mean(len(cuts))", "RL0213", "cuts"),
    ("metric x = mean(along(r, gen))", "RL0201", "r"),
    ("metric x = mean(along(v, more))", "RL0202", "v"),
    ("metric x = mean(along(v, v))", "RL0203", "along(v, v)"),
    ("metric x = mean(along(v > 0, gen))", "RL0203", "v > 0"),
    ("metric x = mean(next(gen.logprobs by prompt))", "RL0201", "gen.logprobs"),
    ("metric x = mean(next(v by seq))", "RL0201", "next(v by seq)"),
    ("metric x = mean(next(v by more))", "RL0201", "next(v by more)"),
    ("metric x = mean(next(len(row) by prompt))", "RL0202", "len(row)"),
    ("metric x = mean(discount(v by prompt, v))", "RL0201", "discount(v by prompt, v)"),
    ("metric x = mean(mean(v by tail))", "RL0202", "v"),
    ("metric x = mean(mean(v by cuts))", "RL0208", "v"),
    ("metric x = mean(mean(r by more))", "RL0202", "r"),
    ("metric x = mean(mean(r by actor))", "RL0203", "actor"),
    ("metric x = mean(mean(r by nothing))", "RL0101", "nothing"),
    ("metric x = mean(over(r, gen, 0))", "RL0202", "r"),
    ("metric x = mean(over(size(kept), more, 0))", "RL0202", "size(kept)"),
    ("metric x = mean(over(size(kept), gen, r))", "RL0203", "over(size(kept), gen, r)"),
    ("metric x = mean(over(size(kept), gen, true))", "RL0203", "over(size(kept), gen, true)"),
    ("metric x = mean(over(kept.logprobs, gen, 0))", "RL0201", "kept.logprobs"),
    ("metric x = mean(at_end(size(more), cuts))", "RL0202", "size(more)"),
]


def wrong(statements: str) -> list[Diagnostic]:
    with pytest.raises(Failure) as failure:
        build(parse(SourceFile("main.rlf", HEAD + f"  {statements}\n  metric end = 1 + mean(r)\n}}\n")), {},
              read=lambda path: "def size(rows): return []")
    return list(failure.value.diagnostics)


@pytest.mark.parametrize("statements, code, at", MISTAKES)
def test_a_mistake_has_its_code_and_place(statements: str, code: str, at: str) -> None:
    found = [d for d in wrong(statements) if d.code == code]
    assert found and found[0].span is not None and found[0].span.text == at
