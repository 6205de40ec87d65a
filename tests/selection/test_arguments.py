"""`gen where c` as an argument is the same as a selection with a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.graph import model as g
from rldsl.graph.build import build
from rldsl.source import SourceFile
from rldsl.syntax.format import format
from rldsl.syntax.parse import parse
from tests.selection.programs import folder, run

HEAD = """
use py "r.py" (size: gen -> seq)
data prompts = jsonl("p.jsonl", batch=8)
data pairs   = jsonl("x.jsonl", batch=8, kind="pairs")
model actor  = causal_lm("m") train adamw(lr=1e-6)
loss nll(logprobs: token;) {{ return -mean(logprobs) }}
loss lead(chosen: token, rejected: token;) {{ return mean(rejected) - mean(chosen) }}
buffer good  = rows(capacity=16)
flow f(steps=2) {{
  prompt = prompts.next()
  duel   = pairs.next()
  gen    = actor.generate(prompt, n=4)
  r      = size(gen)
  scored = gen with r=r
  {0}
}}
"""
FINE = [
    "good.add(gen where r > 0)\n old = good.sample(4)\n metric m = mean(len(old))",
    "actor.train(gen where r > 0, loss=nll())",
    "metric m = count(gen where r > 0)",
    "metric m = mean(len(gen where gen.finished and r > 0))",
    "metric m = mean(size(gen where r > 0))",
    "metric m = mean(over(r, gen where r > 0))",
    "metric m = mean(over(size(gen where r > 0), gen, 0))",
    "metric m = mean(actor.logprobs(gen where r > 0))",
    "more = actor.generate(gen where r > 0, n=2)\n metric m = mean(len(more))",
    "best = pick(gen where r > 0, len(gen where r > 0))\n metric m = mean(len(best))",
    "mix = concat(gen where r > 0, gen where r < 0)\n metric m = mean(len(mix))",
    "best = pick(scored where scored.r > 0, scored.r)\n metric m = mean(best.r)",
    "metric m = count(duel where len(duel.chosen) > 3)",
    "metric m = mean(len(others(gen where r > 0)))",
]


@pytest.mark.parametrize("body", FINE)
def test_wherever_sequences_stand(body: str) -> None:
    text = HEAD.format(body)
    graph = build(parse(SourceFile("f.rlf", text)), {}, read=lambda path: "def size(rows):\n    return rows\n")
    assert any(isinstance(n, g.Derive) and n.op == "where" for n in g.nodes(graph.items))
    assert format(SourceFile("f.rlf", text)).count(" where ") == text.count(" where ")


BODY = """
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=3, max_new_tokens=6)
  r      = parity(gen)
  {kept}
  metric kept = count({0})
  metric text = mean(spread({0}))
  actor.train({0}, loss=pg(adv=r, weight=1.0), minibatches=2)
"""


def test_a_name_changes_no_number(tmp_path: Path) -> None:
    base = folder(tmp_path)
    place = "place actor.generate on mesh(0:2) dp=2\nplace actor.train on mesh(0:2) tp=2"
    named = run(base, BODY.format("kept", kept="kept = gen where r > 0"), place=place)
    inline = run(base, BODY.format("gen where r > 0", kept=""), place=place, like=named)
    for a, b in zip(named, inline, strict=True):
        assert a["kept"] > 0 and {k: a[k] for k in ("kept", "text", "actor/loss")} == {
            k: b[k] for k in ("kept", "text", "actor/loss")}
