"""The graphs of derived sequences."""

from __future__ import annotations

from rldsl.graph import model as g
from rldsl.graph.build import build
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse

PROGRAM = """
data prompts = jsonl("p.jsonl", batch=8)
model actor = causal_lm("m")
flow f(steps=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4)
  scored = gen with size=len(gen), mark=2 * len(gen)
  kept   = scored where len(gen) > 3
  metric a = mean(kept.mark) + max(mean(kept.mark by prompt))
  best   = pick(kept, kept.mark)
  worst  = pick(kept, -kept.mark)
  metric b = mean(best.mark) - mean(worst.mark)
}
"""


def test_a_value_is_cut_down_to_a_selection_once() -> None:
    graph = build(parse(SourceFile("f.rlf", PROGRAM)), {})
    cut = [(n.reads, n.frame) for n in g.nodes(graph.items) if isinstance(n, g.Derive) and n.op == "restrict"]
    assert cut and len({*cut}) == len(cut), cut
