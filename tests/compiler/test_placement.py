"""Rules, meshes, degrees, memory: what is chosen, and every way to get it wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rldsl import explain
from rldsl.diag import Diagnostic, Failure
from rldsl.graph import model as g
from rldsl.placement.place import place_graph
from rldsl.placement.rules import COMMAND_LINE
from rldsl.source import SourceFile, Span
from tests.checked import check_graph
from tests.compiler.graphs import family, on, ppo


def refused(graph: g.Graph, describe=family, place_file: str = "") -> Diagnostic:
    with pytest.raises(Failure) as caught:
        place_graph(graph, place_file, describe)
    (first, *_) = caught.value.diagnostics
    assert first.code in explain.codes() and first.title and first.help, first
    return first


def layout(graph: g.Graph, node: str, place_file: str = "") -> str:
    return dict(place_graph(graph, place_file, family).placements)[node].layout.id


def rule(selector: str, clause: g.Clause, file: str = "ppo.rlf") -> g.Rule:
    return g.Rule(selector, clause, Span(SourceFile(file, "x" * 80), 0, 40))


def test_reals_allocation() -> None:
    placed = place_graph(ppo(), "", family)
    places = {k: v.layout.id for k, v in placed.placements}
    assert places == {"gen": "0:8 dp=4 pp=2", "score": "2:4 pp=2", "ref_lp": "4:8 pp=4", "v": "0:2 dp=2",
                      "critic.train": "4:8 dp=2 pp=2", "actor.train": "0:4 dp=2 pp=2",
                      "adv": "4:8 dp=4"}  # the critic trains first, so its mesh computes
    assert (placed.world, placed.devices_per_node) == (8, 8)
    assert {m.name: m.train_layout for m in placed.models} == {
        "actor": "0:4 dp=2 pp=2", "critic": "4:8 dp=2 pp=2", "ref": "", "judge": ""}


def test_without_a_clause() -> None:
    graph = ppo({"actor.train": on(8, 0, 4, tp=2), "v": on(4, 0, 2)})
    assert layout(graph, "gen") == "0:4 dp=2 tp=2"  # as the model's train call, dp inferred
    assert layout(graph, "critic.train") == "0:2 dp=2"
    assert layout(graph, "ref_lp") == "0:8 dp=8"  # every rank
    assert place_graph(ppo({}, cluster=None), "", family).world == 1
    assert place_graph(ppo({"gen": on(1, 0, 6)}, cluster=None), "", family).world == 6


@pytest.mark.parametrize("options, wanted", [
    ({}, "0:8 dp=8"), ({"tp": 2}, "0:8 dp=4 tp=2"), ({"dp": 2, "tp": 2}, "0:8 dp=2 tp=2 pp=2"),
    ({"dp": 2, "pp": 4}, "0:8 dp=2 pp=4"), ({"tp": 2, "pp": 4}, "0:8 tp=2 pp=4"), ({"dp": 8, "mbs": 2}, "0:8 dp=8")])
def test_inference_of_degrees(options: dict, wanted: str) -> None:
    assert layout(ppo({"gen": on(1, 0, 8, **options)}), "gen") == wanted


def test_meshes_of_nodes() -> None:
    two = g.Cluster(2, 8, 80.0)
    assert layout(ppo({"gen": on(1, 0, 8, nodes=(0, 2))}, cluster=two), "gen") == "0:16 dp=16"
    assert layout(ppo({"gen": on(1, 4, 6, nodes=(1, 2))}, cluster=two), "gen") == "12:14 dp=2"


def test_precedence_and_merging() -> None:
    inline = {"gen": on(1, 0, 4, dp=4)}
    low = rule("actor.generate", on(30, 0, 8, dp=8))
    assert layout(ppo(inline, rules=(low,)), "gen") == "0:4 dp=4"  # a rule of the program yields to inline
    file = rule("*.*", on(31, 0, 8, tp=2), "fast.rlf")
    assert layout(ppo(inline, rules=(file,)), "gen", "fast.rlf") == "0:8 dp=4 tp=2"
    special = rule("actor.generate", on(32, 0, 2), "fast.rlf")
    assert layout(ppo(inline, rules=(file, special)), "gen", "fast.rlf") == "0:2 dp=2"
    named = rule("@gen", on(33, 4, 6), "fast.rlf")
    assert layout(ppo(inline, rules=(file, special, named)), "gen", "fast.rlf") == "4:6 dp=2"
    last = rule("actor.*", on(34, 6, 8), COMMAND_LINE)
    graph = ppo({**inline, "actor.train": on(8, 0, 4)}, rules=(file, special, named, last))
    assert layout(graph, "gen", "fast.rlf") == layout(graph, "actor.train", "fast.rlf") == "6:8 dp=2"
    only = rule("actor.generate", on(35, None, mbs=3), COMMAND_LINE)
    placed = dict(place_graph(ppo(inline, rules=(only,)), "", family).placements)["gen"]
    assert (placed.layout.id, placed.mbs) == ("0:4 dp=4", 3)  # options alone change nothing else


def test_degrees_that_do_not_fill() -> None:
    d = refused(ppo({"gen": on(1, 0, 8, dp=4, pp=4)}))
    assert (d.code, d.label, d.labels[0].text) == ("RL0304", "4 x 4 = 16 ranks", "8 ranks")
    assert "dp=2 pp=4" in d.help
    assert refused(ppo({"gen": on(1, 0, 8, dp=3)})).code == "RL0304"
    assert refused(ppo({"gen": on(1, 0, 8, dp=4)})).code == "RL0304"  # tp or pp: two are left out
    assert refused(ppo({"gen": on(1, 0, 8, tp=3)})).code == "RL0304"


@pytest.mark.parametrize("clause, code", [
    (on(1, 0, 16, dp=16), "RL0305"), (on(1, 4, 4), "RL0305"), (on(1, 0, 8, nodes=(0, 2)), "RL0305"),
    (on(1, 0, 3), "RL0306"), (on(1, 2, 8), "RL0306"),
    (on(1, 0, 8, dp=0), "RL0311"), (on(1, 0, 8, dp=2.5), "RL0311"), (on(1, 0, 8, offload=1), "RL0311"),
    (on(1, 0, 8, dp=True), "RL0311"), (on(1, 0, 8, cp=2), "RL0318"), (on(1, 0, 8, zero=1), "RL0320"),
    (on(1, 0, 8, zero=4), "RL0311"), (on(1, 0, 8, zero=-1), "RL0311"),
    (on(1, 0, 8, ep=2), "RL0323"), (on(1, 0, 8, backend="jax"), "RL0312"), (on(1, 0, 8, offload=True), "RL0317"),
    (on(1, 0, 8, tp=8), "RL0307"), (on(1, 0, 8, pp=8), "RL0308")])
def test_refused_clauses(clause: g.Clause, code: str) -> None:
    d = refused(ppo({"gen": clause, "actor.train": on(8, 0, 4)}))
    assert d.code == code and d.span is not None


def test_unknown_option_is_suggested() -> None:
    d = refused(ppo({"gen": on(1, 0, 8, ddp=8)}))
    assert d.code == "RL0310" and "`dp`" in d.help


def test_tensor_parallelism_against_the_model() -> None:
    graph = ppo({"gen": on(1, 0, 8, tp=8)})
    describe = lambda path, kind, span=None, trained=False: family(path, kind, heads=24, kv_heads=3, hidden=48)  # noqa: E731
    assert "3 key-value heads" in refused(graph, describe).label
    problem = "its config has no tensor-parallel plan"
    d = refused(graph, lambda p, k, span=None, trained=False: family(p, k, tp_problem=problem))
    assert d.code == "RL0307" and "has no" in d.label and "tp=1" in d.help
    d = refused(ppo({"gen": on(1, 0, 8, pp=2)}), lambda p, k, span=None, trained=False: family(p, k, pp_problem="none"))
    assert d.code == "RL0308"
    two = g.Cluster(2, 4, 80.0)
    eight = lambda p, k, span=None, trained=False: family(p, k, heads=8, kv_heads=8)  # noqa: E731
    declared = refused(ppo({"gen": on(1, 0, 8, tp=8)}, cluster=two), eight)
    assert (declared.code, declared.help) == ("RL0309", "tp must divide 4; dp and pp may span several nodes")
    inferred = refused(ppo({"gen": on(1, 2, 3), "ref_lp": on(1, 0, 2, tp=2)}, cluster=None), eight)
    assert inferred.code == "RL0309" and "`cluster gpus=4`" in inferred.help


def test_mesh_over_nodes_without_a_cluster() -> None:
    assert refused(ppo({"gen": on(1, 0, 8, nodes=(0, 2))}, cluster=None)).code == "RL0306"


def test_selectors() -> None:
    d = refused(ppo(rules=(rule("actor.generat", on(30, 0, 8)),)))
    assert d.code == "RL0313" and "`actor.generate`" in d.help
    assert refused(ppo(rules=(rule("@score2", on(30, 0, 8)),))).code == "RL0313"
    d = refused(ppo(rules=(rule("ref.*", on(30, 0, 8)), rule("*.logprobs", on(31, 0, 4)))))
    assert d.code == "RL0314" and d.labels
    rules = rule("judge.score", on(30, 0, 2)), rule("ref.*", on(31, 0, 4))
    assert layout(ppo({}, rules=rules), "ref_lp") == "0:4 dp=4"


def test_one_home() -> None:
    graph = ppo()
    train = next(i for i in graph.items if isinstance(i, g.Train) and i.model == "actor")
    again = replace(train, id="actor.train#2", clause=on(12, 0, 4, dp=4), writes=(), outputs=())
    assert refused(replace(graph, items=(*graph.items, again))).code == "RL0315"


def test_tokenizers_must_agree() -> None:
    d = refused(ppo(), lambda p, k, span=None, trained=False: family(p, k, tokenizer=p))
    assert d.code == "RL0316" and '"rm"' in d.label


def test_check_needs_no_directories() -> None:
    check_graph(ppo())
    with pytest.raises(Failure):
        check_graph(ppo({"gen": on(1, 0, 8, dp=3, pp=2)}))
