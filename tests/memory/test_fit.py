"""RL0401: the largest holders, and a fix that fits when it is followed to the letter."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rldsl import explain
from rldsl.diag import Diagnostic, Failure
from rldsl.graph import model as g
from rldsl.memory import curves
from rldsl.memory.curve import Curve, peak
from rldsl.passes import pipeline
from rldsl.passes.emit import emit
from rldsl.placement.model import PlacedGraph
from rldsl.placement.place import place_graph
from rldsl.placement.rules import COMMAND_LINE
from rldsl.search import memory_check
from rldsl.search.compiled_placements import SettingCompiler
from rldsl.search.memory_advice import MemoryAdvisor
from rldsl.search.settings import on_all_ranks
from rldsl.source import SourceFile
from tests.compiler.graphs import at, family, on, ppo
from tests.frames import resized
from tests.samples import thorough_between


def wide(path: str = "sft", kind: str = "causal_lm", span=None, trained: bool = False):
    """Models large enough that they and their activations matter."""
    return family(path, kind, heads=8, kv_heads=4, layers=8, hidden=512)


def held(placed: PlacedGraph) -> tuple[Curve, ...]:
    return curves(emit(pipeline.run(placed), ""))


def needs(placed: PlacedGraph) -> int:
    return max(peak(c).bytes for c in held(placed))


def rows(graph: g.Graph, count: int) -> g.Graph:
    """With so many rows of so many more tokens."""
    frames = tuple(resized(f, count, 1, 64, 64 if f.id == "gen" else 0) for f in graph.frames)
    return replace(graph, frames=frames)


def placed(share: float, count: int = 16, **options) -> PlacedGraph:
    """A placement that needs 1 / share of what its devices have."""
    graph = rows(ppo(cluster=g.Cluster(1, 8, 80.0, at(22)), **options), count)
    need = needs(place_graph(graph, "", wide))
    return replace(place_graph(replace(graph, cluster=g.Cluster(1, 8, need * share / 1e9, at(22))), "", wide))


def refused(x: PlacedGraph) -> Diagnostic:
    with pytest.raises(Failure) as caught:
        memory_check.check_memory(x, held(x))
    (d,) = caught.value.diagnostics
    assert d.code == "RL0401" and d.code in explain.codes() and d.span
    return d


def followed(x: PlacedGraph, d: Diagnostic) -> int:
    """What a rank needs when the rules of a message are given on the command line."""
    from rldsl.graph.build import build
    from rldsl.syntax.parse import parse

    said = re.findall(r'--on "([^"]+)"', d.help)
    assert said, d.help
    text = "".join(f"place {rule}\n" for rule in said)
    program = 'cluster nodes=1 gpus=8\ndata d = jsonl("d", batch=1)\nmodel m = causal_lm("m")\nflow f(steps=1) {\n' \
              "  p = d.next()\n  gen = m.generate(p)\n  metric n = mean(len(gen))\n}\n"
    rules = build(parse(SourceFile("p.rlf", program)), {}, parse(SourceFile(COMMAND_LINE, text))).rules
    return needs(place_graph(replace(x.graph, rules=rules), "", wide))


@pytest.mark.parametrize("share", thorough_between([0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]))
@pytest.mark.parametrize("count", [16, 256])
def test_the_fix_fits(share: float, count: int) -> None:
    x = placed(share, count)
    d = refused(x)
    assert len(d.notes) == 3 and followed(x, d) <= x.memory


def test_the_mildest_that_fits_is_named() -> None:
    """Activations are the trouble: micro-batches, and nothing else."""
    x = placed(0.9, 512)
    d = refused(x)
    assert "activations of actor.train" in d.notes[0]
    assert re.fullmatch(r'use( --on "(actor|critic)\.train mbs=\d+")+, which needs [\d.]+ [KMG]iB', d.help), d.help


def test_recomputation_where_micro_batches_are_small_already() -> None:
    real = {"gen": on(1, 0, 8, dp=4, pp=2, mbs=1), "score": on(2, 2, 4, pp=2, mbs=1),
            "ref_lp": on(3, 4, 8, pp=4, mbs=1), "v": on(4, 0, 2, dp=2, mbs=1),
            "critic.train": on(7, 4, 8, dp=4, mbs=1), "actor.train": on(8, 0, 4, dp=4, mbs=1)}
    graph = ppo(real, cluster=g.Cluster(1, 8, 80.0, at(22)))
    frames = tuple(replace(f, max_prompt_tokens=4096, max_response_tokens=4096 if f.id == "gen" else 0)
                   for f in graph.frames)
    graph = replace(graph, frames=frames)
    need = needs(place_graph(graph, "", wide))
    x = place_graph(replace(graph, cluster=g.Cluster(1, 8, need * 0.9 / 1e9, at(22))), "", wide)
    assert "recompute=full" in refused(x).help and "mbs" not in refused(x).help


@pytest.mark.thorough
def test_where_nothing_fits_the_least_is_said() -> None:
    x = placed(0.05)
    d = refused(x)
    assert d.help.startswith("none of the settings that were tried fits; devices with ") and len(d.notes) > 3
    least = MemoryAdvisor(x).least()
    assert x.memory < least.bytes < needs(x)
    assert MemoryAdvisor(replace(x, memory=least.bytes)).best() is not None
    assert MemoryAdvisor(replace(x, memory=least.bytes // 8)).best() is None


@pytest.mark.thorough
def test_more_devices_that_would_do() -> None:
    x = placed(0.08)
    assert MemoryAdvisor(x).best() is None
    more = MemoryAdvisor(x).larger()
    assert more is not None and more.nodes > 1 and more.bytes <= x.memory
    assert f"or {more.nodes * 8} devices of this size" in refused(x).help


def test_the_quick_bound_of_a_trial_is_what_it_needs_without_the_buffers_of_reallocs() -> None:
    """Never more than its bytes, and just them where no realloc buffer is held at the peak; so what is judged by the
    bound first fits exactly if its bytes do."""
    x, equal = placed(0.3), 0
    compiler, advisor = SettingCompiler(x), MemoryAdvisor(x)
    settings = [compiler.first, *advisor._combined_changes(), *advisor._degrees(advisor._all_changes)]
    for setting in settings:
        bound, size = compiler.bound(setting), compiler.bytes(setting)
        assert (bound is None) == (size is None)
        if bound is not None and size is not None:
            assert 0 < bound <= size
            equal += bound == size
            for limit in (bound - 1, bound, size - 1, size):
                assert compiler.fits(setting, limit) == (size <= limit)
    assert 0 < equal


@pytest.mark.thorough
def test_bisection_finds_the_smallest_number_of_nodes() -> None:
    for share in (0.05, 0.08, 0.12):
        advisor = MemoryAdvisor(x := placed(share))
        tried = ((nodes, setting) for nodes in (2, 4, 8, 16, 32, 64) for setting in advisor._degrees(
            on_all_ranks(advisor._all_changes, nodes * x.devices_per_node))[-4:])
        one_by_one = next((nodes for nodes, setting in tried if advisor._fits(setting, nodes)), None)
        found = advisor.larger()
        assert (found.nodes if found else None) == one_by_one


@pytest.mark.parametrize("share", [1.0, 1.1, 100.0])
def test_what_fits_is_no_mistake(share: float) -> None:
    x = placed(share)
    memory_check.check_memory(x, held(x))


def test_without_a_cluster_nothing_is_known() -> None:
    x = replace(placed(0.01), memory=0)
    memory_check.check_memory(x, held(x))
