"""`auto`, patterns, heuristic and search as the compiler takes them; placement files that compile; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.graph import model as g
from rldsl.passes.pipeline import planned, run
from rldsl.placement.place import place_graph
from rldsl.search import Options, find_placement, prepare_program, unless_locked
from rldsl.search.modes import assumed_cluster, is_mode, is_pattern, pattern_degrees, place_by_mode
from rldsl.search.placement_file import format_placement_file
from rldsl.simulate import Lengths, simulate
from rldsl.source import SourceFile
from rldsl.syntax.format import format
from rldsl.verify import verify
from tests.search.programs import GRPO, PPO, cluster, describe, ready

EIGHT = "cluster nodes=1 gpus=8\n"


def made(text: str, rules: str = "", on: tuple[str, ...] = (), size: str = "1B",
         mode: str = "manual") -> dict[str, str]:
    """Call -> mesh and degrees, as the compiler places them."""
    text = text.replace("cluster nodes=1 gpus=1\n", EIGHT) + rules
    graph = api.build_graph(SourceFile("p.rlf", text), {}, None, on)
    graph, _ = place_by_mode(graph, "", mode, describe(size))
    return {i: p.layout.id for i, p in place_graph(graph, describe=describe(size)).placements}


# -------------------------------------------------------------------------------------------------- auto


def test_some_calls_by_hand_and_the_others_by_the_compiler() -> None:
    found = made(GRPO, "place * auto\nplace ref.* on mesh(0:4) dp=2 tp=2\n")
    assert found["ref_lp"] == "0:4 dp=2 tp=2"
    assert {i: found[i] for i in ("gen", "actor.train")} != {"gen": "0:8 dp=8", "actor.train": "0:8 dp=8"}


def test_an_option_binds_what_is_auto() -> None:
    found = made(GRPO, "place * auto\nplace actor.train tp=4 zero=1\n")
    assert "tp=4" in found["actor.train"] and ("zero=1" in found["actor.train"] or "dp=" not in found["actor.train"])


def test_what_is_not_auto_stays_as_it_is() -> None:
    found = made(GRPO, "place ref.* auto\nplace actor.* on mesh(0:8) dp=4 tp=2 mbs=8\n"
                       "place judge.* on mesh(0:2) tp=2 mbs=8\n")
    assert found["gen"] == found["actor.train"] == "0:8 dp=4 tp=2" and found["score"] == "0:2 tp=2"


def test_a_stronger_rule_wins_over_auto() -> None:
    found = made(GRPO, "place * auto\n", ("*.* on mesh(0:8) dp=8",))
    assert set(found.values()) == {"0:8 dp=8"}


def test_auto_without_a_cluster() -> None:
    with pytest.raises(Failure) as failure:
        graph = api.build_graph(SourceFile("p.rlf", GRPO.replace("cluster nodes=1 gpus=1\n", "") + "place * auto\n"))
        place_by_mode(graph, "", "manual", describe("1B"))
    (d,) = failure.value.diagnostics
    assert d.code == "RL0329" and d.span is not None and d.span.text == "auto"


def test_two_autos_with_equal_right() -> None:
    with pytest.raises(Failure) as failure:
        made(GRPO, "place actor.train auto\nplace actor.train auto\n")
    assert {d.code for d in failure.value.diagnostics} == {"RL0314"}


def test_auto_that_matches_nothing() -> None:
    with pytest.raises(Failure) as failure:
        made(GRPO, "place critic.train auto\n")
    assert {d.code for d in failure.value.diagnostics} == {"RL0313"}


@pytest.mark.parametrize("rule", ["place * auto dp=4", "place * auto on mesh(0:2)", "place auto", "place * Auto"])
def test_auto_stands_alone(rule: str) -> None:
    found = api.check(GRPO.replace("cluster nodes=1 gpus=1\n", EIGHT) + rule + "\n")
    assert found and all(d.code.startswith("RL00") for d in found), found


def test_auto_is_an_ordinary_name_elsewhere() -> None:
    text = GRPO.replace("ref_lp", "auto").replace("ref=auto", "ref=auto") + "place @auto on mesh(0:2) tp=2\n"
    assert made(text)["auto"] == "0:2 tp=2"


def test_the_formatter_keeps_it() -> None:
    text = GRPO.replace("cluster nodes=1 gpus=1\n", EIGHT) + "place  *   auto\nplace ref.*   on mesh(0:4) dp=4\n"
    once = format(SourceFile("p.rlf", text))
    assert "auto" in once and format(SourceFile("p.rlf", once)) == once


# ------------------------------------------------------------------------------------------------ modes


@pytest.mark.parametrize("name, nodes, gpus, found", [
    ("d2p2t2", 1, 8, {"dp": 2, "pp": 2, "tp": 2}), ("t8", 1, 8, {"tp": 8}), ("pipe_data", 2, 8, {"pp": 2, "dp": 8}),
    ("pipe_model", 4, 8, {"pp": 4, "tp": 8}), ("c2d4", 1, 8, {"cp": 2, "dp": 4})])
def test_patterns(name: str, nodes: int, gpus: int, found: dict[str, int]) -> None:
    assert is_pattern(name) and is_mode(name) and pattern_degrees(name, nodes, gpus) == found


@pytest.mark.parametrize("name", ["", "d", "d0", "2d", "d2d2", "x2", "d2 t2", "pipe", "d2p2t2e2", "D2"])
def test_what_is_no_pattern(name: str) -> None:
    assert not is_pattern(name)


def test_a_pattern_that_does_not_fill_the_cluster() -> None:
    with pytest.raises(Failure) as failure:
        pattern_degrees("d2t2", 1, 8)
    (d,) = failure.value.diagnostics
    assert d.code == "RL0304" and "d4t2" in d.help


def test_all_calls_alike() -> None:
    found = made(GRPO, mode="d2p2t2")
    assert all({"dp=2", "pp=2", "tp=2"} <= {*found[i].split()} for i in ("gen", "ref_lp", "actor.train"))


def test_where_others_divide_sequences_generation_divides_rows() -> None:
    found = made(GRPO, mode="c2t4")
    assert "cp" not in found["gen"] and "dp=2" in found["gen"] and "cp=2" in found["actor.train"]


def test_the_command_line_is_stronger_than_a_mode() -> None:
    found = made(GRPO, on=("ref.* on mesh(0:2) dp=2",), mode="d8")
    assert found["ref_lp"] == "0:2 dp=2" and found["gen"] == "0:8 dp=8"


def test_heuristic_is_one_mesh_for_all() -> None:
    found = made(PPO, mode="heuristic")
    assert all(x.startswith("0:8 ") for x in found.values())


def test_manual_is_what_the_program_says() -> None:
    graph = api.build_graph(SourceFile("p.rlf", GRPO))
    assert place_by_mode(graph, "", "manual", describe("1B")) == (graph, None)


def test_speeds_of_a_named_cluster_and_of_one_that_is_only_counted() -> None:
    assert assumed_cluster(g.Cluster(2, 8, 80.0, path="a100x16")).bfloat16_tflops == 312
    assumed = assumed_cluster(g.Cluster(2, 4, 40.0))
    assert assumed.gpus == 4 and assumed.bfloat16_tflops == 989


# ------------------------------------------------------------------------------------------- placement files


def test_the_file_compiles_to_the_plan_that_was_promised(tmp_path: Path) -> None:
    machines = cluster(2, 4)
    p = ready("grpo", "7B", machines)
    answer = find_placement(p, machines, p.placed.memory)
    text = format_placement_file(p, answer, "0", machines.name, False)
    again = find_placement(p, machines, p.placed.memory)
    assert text == format_placement_file(p, again, "0", machines.name, False), "the same again"
    rules = SourceFile("p.place.rlf", text)
    graph = api.build_graph(SourceFile("grpo.rlf", GRPO), {}, rules)
    plan, _ = planned(run(place_graph(graph, "p.place.rlf", describe("7B"))), "")
    verify(plan)
    assert simulate(plan, machines).seconds == pytest.approx(answer.best[0].seconds, rel=1e-9)
    for word in ("predicted", "bound", "gap", "2x4", "seed", "search nodes"):
        assert word in text


def test_a_locked_call_is_where_it_was() -> None:
    machines = cluster(1, 8)
    text = GRPO.replace("cluster nodes=1 gpus=1\n", EIGHT) + "place actor.generate on mesh(0:4) dp=4\n"
    graph = api.build_graph(SourceFile("p.rlf", text))
    locked = unless_locked(graph, api.read_selectors(["actor.generate"]))
    p = prepare_program(graph, "", machines, 80 * 10**9, locked, describe("1B"))
    answer = find_placement(p, machines, 80 * 10**9)
    assert "gen" not in answer.best[0].placements
    assert answer.best[0].evaluation.assignment.blocks[0] == (0, 4)
    lines = format_placement_file(p, answer, "0", "c", False).splitlines()
    kept = next(x for x in lines if x.startswith("place actor.generate"))
    assert kept.split() == ["place", "actor.generate", "on", "mesh(0:4)", "dp=4"], "the file stands by itself"


def test_a_lock_that_matches_nothing() -> None:
    with pytest.raises(Failure) as failure:
        unless_locked(api.build_graph(SourceFile("p.rlf", GRPO)), api.read_selectors(["ref.*", "critic.*"]))
    (d,) = failure.value.diagnostics
    assert d.code == "RL0313" and "actor.generate" in d.help
    assert d.span is not None and d.span.text == "critic.*" and str(d.span).startswith("<command line>:2:7")


TEXT = "metric averaged_rewards_x_of_all_the_rows = mean(score)"
TEXTS = f"  metric a2 = mean(score)\n  {TEXT}\n  {TEXT.replace('_x_', '_y_')}\n"


@pytest.mark.parametrize(("lock", "title", "help_"), [
    ('@"metric a2 = mean(score)"', "selects no call", "`actor.generate`"),  # a computation, which the search does not move
    (f'@"{TEXT[:20]}…{TEXT[-19:]}"', "matches 2 computations",
     '`@"metric averaged_rewards_x_of_all_the_rows = mean(score) (p.rlf:'),
    ("@gne", "`@gne` matches no call of this program", "did you mean `@gen`?"),
    ("actor.generat", "`actor.generat` matches no call of this program", "did you mean `actor.generate`?"),
    ("actor.", "", ""),  # no selector
])
def test_a_lock_that_names_no_call_says_what_was_expected(lock: str, title: str, help_: str) -> None:
    graph = api.build_graph(SourceFile("p.rlf", GRPO.replace("  actor.train(", f"{TEXTS}  actor.train(")))
    with pytest.raises(Failure) as failure:
        unless_locked(graph, api.read_selectors([lock]))
    (d,) = failure.value.diagnostics
    assert d.span is not None and str(d.span).startswith("<command line>:1:")
    if title:
        assert d.code == "RL0313" and title in d.title and help_ in (d.help or "") and d.span.text == lock
    else:
        assert d.code == "RL0001" and "`model.call`" in d.help and "place SELECTOR auto" in d.notes[0]


@pytest.mark.thorough
def test_too_small_a_cluster_names_the_smallest_that_does() -> None:
    machines = cluster(1, 8, 80)
    p = ready("grpo", "70B", machines)
    with pytest.raises(Failure) as failure:
        find_placement(p, machines, p.placed.memory)
    (d,) = failure.value.diagnostics
    assert d.code == "RL0402" and "nodes" in d.help
    nodes = int(d.help.split("that fits: ")[1].split()[0])
    for n, fits in ((nodes, True), (nodes - 1, False)):
        there = cluster(n, 8, 80)
        again = ready("grpo", "70B", there)
        if fits:
            assert find_placement(again, there, again.placed.memory, Options("heuristic")).best
        else:
            with pytest.raises(Failure):
                find_placement(again, there, again.placed.memory, Options("heuristic"))


def test_lengths_change_what_is_best_and_are_told() -> None:
    machines = cluster(1, 4)
    p = ready("grpo", "1B", machines)
    short = find_placement(p, machines, p.placed.memory, Options("heuristic", lengths=Lengths(64, 16, 32)))
    long = find_placement(p, machines, p.placed.memory, Options("heuristic"))
    assert short.best[0].seconds < long.best[0].seconds


def test_the_file_keeps_the_place_of_a_computation_without_a_name() -> None:
    """Its selector needs quotes and escapes."""
    text = 'metric level = mean(where(choice("a", "a", "b") == "a", score, 0))'
    rule = "place @\"{}\" on mesh(3:4)\n".format(text.replace('"', '\\"'))
    machines = cluster(1, 8)
    program = GRPO.replace("cluster nodes=1 gpus=1\n", EIGHT).replace("  actor.train(", f"  {text}\n  actor.train(")
    graph = api.build_graph(SourceFile("p.rlf", program + rule))
    p = prepare_program(graph, "", machines, 80 * 10**9, unless_locked(graph, ()), describe("1B"))
    file = format_placement_file(p, find_placement(p, machines, 80 * 10**9), "0", "c", False)
    rules = [" ".join(line.split()) for line in file.splitlines() if line.startswith('place @"')]
    assert len(rules) == 1 and rules[0].startswith(rule.strip())
    placed = place_graph(api.build_graph(SourceFile("p.rlf", program), {}, SourceFile("p.place.rlf", file)), "p.place.rlf",
                         describe("1B"))
    [level] = [n for n in g.nodes(placed.graph.items) if getattr(n, "source", "").startswith("metric level")]
    assert dict(placed.placements)[level.id].mesh.ranks == ((3, 4),)
