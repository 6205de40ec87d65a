"""The dataflow as a networkx graph: cycles only from step to step, reachability, and pictures without links that follow
from others."""

from __future__ import annotations

import subprocess
import sys

import networkx as nx
import pytest

from rldsl.graph import model as g
from rldsl.graph.build import build
from rldsl.graph.dataflow import dataflow, reduced, within_step
from rldsl.graph.picture import dot, edges, mermaid
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse
from tests.compiler.graphs import ppo


@pytest.fixture(scope="module")
def made() -> nx.MultiDiGraph:
    return dataflow(ppo())


def test_nodes_are_those_of_the_program_in_its_order(made: nx.MultiDiGraph) -> None:
    assert list(made) == [n.id for n in g.nodes(ppo().items)]
    assert all(isinstance(node, g.Node) for _, node in made.nodes(data="node"))


def test_only_versions_go_from_step_to_step(made: nx.MultiDiGraph) -> None:
    carried = {(a, b, key) for a, b, key, late in made.edges(keys=True, data="carried") if late}
    assert carried == {("actor.train", "gen", "actor"), ("actor.train", "actor.train", "actor"),
                       ("critic.train", "v", "critic"), ("critic.train", "critic.train", "critic")}
    assert not nx.is_directed_acyclic_graph(made) and nx.is_directed_acyclic_graph(within_step(made))


def test_the_programs_order_is_a_topological_one(made: nx.MultiDiGraph) -> None:
    step, place = within_step(made), {id: i for i, id in enumerate(made)}
    assert all(place[a] < place[b] for a, b in step.edges)
    assert nx.descendants(step, "gen") >= {"score", "ref_lp", "v", "adv", "actor.train", "actor.save"}
    assert "gen" not in nx.descendants(step, "adv") and nx.ancestors(step, "gen") == {"prompt"}


def test_a_reduced_picture_reaches_the_same_with_fewer_links(made: nx.MultiDiGraph) -> None:
    small = reduced(made)
    assert small.number_of_edges() < made.number_of_edges()
    assert not small.has_edge("gen", "actor.train") and made.has_edge("gen", "actor.train")  # by way of adv
    for node in made:
        assert nx.descendants(within_step(small), node) == nx.descendants(within_step(made), node)
    assert small.has_edge("actor.train", "gen"), "what goes to the next step stays"


def test_pictures_show_what_the_graph_has() -> None:
    every, few = edges(ppo()), edges(ppo(), reduce=True)
    assert set(few) < set(every)
    assert mermaid(ppo(), reduce=True).count("-->") == sum(not version for *_, version in few)
    assert dot(ppo()).count(" -> ") == len(every) and dot(ppo(), reduce=True).count(" -> ") == len(few)


def test_checking_a_program_does_not_import_networkx() -> None:
    code = ("import sys; from rldsl import api; "
            "api.check('cluster nodes=1 gpus=1\\ndata d = jsonl(\"d\", batch=2)\\nmodel m = causal_lm(\"m\")\\n"
            "flow f(steps=1, seed=1) {\\n  p = d.next()\\n  o = m.generate(p)\\n}\\n'); "
            "sys.exit('networkx' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MEMORY = """
data prompts = jsonl("p.jsonl", batch=8)
model actor = causal_lm("m") train adamw(lr=1e-6)
loss nll(logprobs: token;) { return -mean(logprobs) }
buffer good = rows(capacity=9)
state heat = 1
flow f(steps=3) {
  old    = good.sample(4, weight=heat)
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4)
  good.add(gen where len(gen) > 3)
  heat   = 0.5 * heat
  more   = good.sample(4, weight=heat)
  good.add(gen)
  mix    = concat(old, more)
  actor.train(mix, loss=nll())
}
"""


def test_a_reader_of_a_buffer_follows_what_added_rows_before_it() -> None:
    graph = build(parse(SourceFile("f.rlf", MEMORY)), {})
    made = dataflow(graph)
    links = {(a, b): late for a, b, key, late in made.edges(keys=True, data="carried") if key == "good"}
    assert links == {("good.add#2", "old"): True, ("good.add", "more"): False, ("good.add", "good.add#2"): False}
    assert {(b, late) for _, b, key, late in made.edges(keys=True, data="carried") if key == "heat"} >= {
        ("old", True), ("more", False)}
    assert nx.is_directed_acyclic_graph(within_step(made))
    shown = {(a, b): label for a, b, label, _ in edges(graph)}
    assert shown["good.add#2", "old"] == "good (step before)" and shown["good.add", "more"] == "good"
    assert {("old", "mix"), ("more", "mix"), ("mix", "actor.train")} <= shown.keys()
