"""What a plan's curves say: who holds what, from when to when; and what they must not say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rldsl.diag import Failure
from rldsl.graph.model import Cluster
from rldsl.memory import curves, logits
from rldsl.memory.curve import Curve, Holding, Peak, during, each_rank, host_peak, peak, points
from rldsl.memory.parameters import Copy, elements
from rldsl.passes import pipeline
from rldsl.passes.emit import emit
from rldsl.placement.place import place_graph
from rldsl.plan.events import Free, Generate, Infer, Loop, Offload, Onload, Train, split_buffer
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths, rank_classes
from rldsl.sharding.boxes import Cell, parameters, pieces_of_rank, volume
from rldsl.verify import verify
from tests.compiler.graphs import family, on, ppo
from tests.memory.plans import CASES, Case, plan_of


def planned(*args, **kwargs) -> Plan:
    return pipeline.planned(pipeline.run(place_graph(ppo(*args, **kwargs), "", family)), "test")[0]


def held(curve: Curve, event: int) -> dict[str, int]:
    return dict(during(curve, event))


def of(found: tuple[Curve, ...], rank: int) -> Curve:
    return next(c for r, c in each_rank(found) if r == rank)


# ---------------------------------------------------------------------------------------------------- curves


def test_moments() -> None:
    curve = Curve(((0, 1),), (7, 9), (Holding("a", 5, 0, 4), Holding("b", 3, 1, 3), Holding("c", 2, 3, 3),
                                     Holding("d", 100, 0, 4, host=True)))
    assert [(p.event, p.before, p.during, p.after) for p in points(curve)] == [(7, 5, 8, 8), (9, 8, 10, 5)]
    assert peak(curve) == Peak(10, 9, (("a", 5), ("b", 3), ("c", 2)))
    assert during(curve, 7) == (("a", 5), ("b", 3)) and host_peak(curve) == 100


def test_a_rank_without_events_holds_nothing() -> None:
    assert peak(Curve(((0, 1),), (), ())) == Peak(0) and not points(Curve(((0, 1),), (), ()))


def test_every_rank_has_one_curve_with_its_own_events() -> None:
    plan = planned()
    found = curves(plan)
    assert sorted(rank for rank, _ in each_rank(found)) == list(range(8))
    meshes = {m.id: m.members() for m in plan.meshes}
    for rank, curve in each_rank(found):
        assert list(curve.events) == [e.id for e, _ in event_paths(plan) if rank in meshes[e.mesh]]


def test_nothing_is_left_of_a_step() -> None:
    """The end of a step holds what its beginning holds: parameters, gradients, optimizer state."""
    plan = planned()
    steps = next(i for i in plan.body if isinstance(i, Loop))
    first = next(e.id for e, path in event_paths(plan) if path and path[0] is steps)
    for curve in curves(plan):
        whole = points(curve)
        inside = [p for p in whole if p.event >= first]
        assert not inside or inside[0].before == inside[-1].after


def test_values_are_held_from_their_maker_to_their_free() -> None:
    plan = planned()
    curve = of(curves(plan), 0)
    flat = {e.id: e for e, _ in event_paths(plan)}
    made = next(i for i in curve.events if any(split_buffer(b)[0] == "gen.tokens" for b in flat[i].writes))
    freed = [i for i in curve.events if isinstance(flat[i], Free)
             and any(split_buffer(b)[0] == "gen.tokens" for b in flat[i].buffers)][-1]
    there = [i for i in curve.events if "gen.tokens" in held(curve, i)]
    assert there[0] == made and there[-1] == freed and isinstance(flat[made], Generate)
    assert held(curve, made)["gen.tokens"] == 4 * (24 * 8 + 16)  # 16 rows over dp=4, 8 + 16 tokens each


@pytest.mark.parametrize("rank, stage", [(0, 0), (3, 1)])
def test_parameters_gradients_and_moments_are_exact(rank: int, stage: int) -> None:
    plan = planned()
    actor = next(m for m in plan.models if m.name == "actor")
    layout = next(x for x in plan.layouts if x.id == actor.train_layout)
    mesh = next(m for m in plan.meshes if m.id == layout.mesh)
    listed = sum(volume(p.box) for x in parameters(actor) for p in pieces_of_rank(x, actor.layers, layout, mesh, rank))
    assert elements(actor.params, Copy(actor, layout, Cell(stage, 0))) == listed
    train = next(e.id for e, _ in event_paths(plan) if isinstance(e, Train) and e.model == "actor")
    mine = held(of(curves(plan), rank), train)
    assert mine["gradients of actor"] == mine["parameters of actor (dp=2 pp=2)"] == 4 * listed
    assert mine["optimizer state of actor"] == 8 * listed


def test_an_offloaded_copy_is_on_the_device_while_it_is_used() -> None:
    plan = planned(offload=True)
    curve = of(curves(plan), 5)
    flat = {e.id: e for e, _ in event_paths(plan)}
    size = held(curve, next(i for i in curve.events if isinstance(flat[i], Onload)))["parameters of ref (pp=4)"]
    there = {i for i in curve.events if "parameters of ref (pp=4)" in held(curve, i)}
    for i in curve.events:
        e = flat[i]
        if isinstance(e, Train | Generate):
            assert i not in there
        elif isinstance(e, Onload | Offload | Infer) and e.model == "ref":
            assert i in there
    assert host_peak(curve) >= size > 0
    kept = of(curves(planned()), 5)
    assert "parameters of ref (pp=4)" in held(kept, kept.events[-1])


def test_on_the_cpu_nothing_goes_away() -> None:
    plan = planned(offload=True)
    curve = of(curves(plan, "cpu"), 5)
    assert host_peak(curve) == 0 and "parameters of ref (pp=4)" in held(curve, curve.events[-1])


def test_the_first_stage_of_a_pipeline_keeps_more_micro_batches() -> None:
    def activations(**options: object) -> list[int]:
        plan = planned({"actor.train": on(8, 0, 4, pp=4, **options)})
        e = next(e for e, _ in event_paths(plan) if isinstance(e, Train) and e.model == "actor")
        return [held(of(curves(plan), rank), e.id)["activations of actor.train"] for rank in range(3)]

    deep = activations(mbs=1)
    assert deep == sorted(deep, reverse=True) and deep[0] > deep[2]
    assert all(a > b for a, b in zip(activations(mbs=2), deep))
    assert all(a < b for a, b in zip(activations(mbs=2, recompute="full"), activations(mbs=2)))


def test_the_cost_follows_the_plan_and_not_the_ranks() -> None:
    """Ten thousand ranks have as many curves as a thousand, with the same shapes."""
    def of_nodes(n: int) -> tuple[Curve, ...]:
        left, right = (0, n // 2), (n // 2, n)
        places = {"gen": on(1, 0, 8, nodes=(0, n), tp=4, pp=2), "actor.train": on(8, 0, 8, nodes=left, tp=4, pp=4),
                  "critic.train": on(7, 0, 8, nodes=right, tp=2, pp=4), "ref_lp": on(3, 0, 8, nodes=right, tp=4)}
        graph = ppo(places, cluster=Cluster(n, 8, 80.0))
        return curves(emit(pipeline.run(place_graph(graph, "", family)), "test"))

    small, large = of_nodes(128), of_nodes(1280)
    assert len(small) == len(large) < 30
    assert [len(c.events) for c in small] == [len(c.events) for c in large]
    assert max(stop for c in large for _, stop in c.ranks) == 10240


def test_a_reference_shares_its_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters the base is there once for actor and reference; without, the actor's parameters are its own."""
    monkeypatch.chdir(tmp_path)
    case = Case("lora", 2, "place *.* on mesh(0:2) tp=2", adapters=", lora(r=4)")
    shared, own = (held(c, c.events[-1]) for c in (of(curves(plan_of(x, tmp_path)), 1) for x in (
        case, replace(case, adapters=""))))
    assert shared["parameters of ref (tp=2)"] == 0 < shared["base of actor (tp=2)"]
    assert own["parameters of ref (tp=2)"] == own["parameters of actor (tp=2)"] > 0


@pytest.mark.parametrize("name", ["half, recompute", "adapters, half"])
def test_devices_have_kernels_of_their_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variable-length attention keeps no grid; without a kernel for grouped queries probabilities are kept. Chunks of
    the head, which differ too, are taken to be alike."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logits, "rows_at_once", lambda words, device: logits.MAX_ROWS)
    case = replace(next(c for c in CASES if c.name == name), place="")
    half = plan_of(case, tmp_path)
    assert peak(curves(half, "cuda")[0]).bytes < peak(curves(half, "cpu")[0]).bytes
    full = plan_of(replace(case, dtype="float32"), tmp_path)
    assert peak(curves(full, "cuda")[0]).bytes > peak(curves(full, "cpu")[0]).bytes


# --------------------------------------------------------------------------------------------------- verifier


def test_the_compiler_claims_what_its_plan_holds() -> None:
    plan = planned()
    assert plan.header.memory == 80 * 10**9
    assert "memory" in verify(plan).checks
    assert {c.peak_bytes for c in plan.classes} == {peak(c).bytes for c in curves(plan)}


def _claims(plan: Plan, change: int) -> Plan:
    peaks = {r: c.peak_bytes + change * (r == 5) for c in plan.classes for a, b in c.ranks for r in range(a, b)}
    return replace(plan, classes=rank_classes(plan.meshes, plan.body, 8, peaks))


@pytest.mark.parametrize("break_, said", [
    (lambda p: _claims(p, -1), "records a peak"), (lambda p: _claims(p, 1), "records a peak"),
    (lambda p: replace(p, classes=tuple(replace(c, peak_bytes=0) for c in p.classes)), "records a peak of 0 bytes"),
    (lambda p: replace(p, header=replace(p.header, memory=10_000)), "but a device has 9.8 KiB"),
    (lambda p: replace(p, models=tuple(replace(m, sizes=replace(m.sizes, intermediate=8 * m.sizes.intermediate))
                                       for m in p.models)), "records a peak"),
    (lambda p: replace(p, frames=tuple(replace(f, max_response_tokens=9 * f.max_response_tokens) for f in p.frames)),
     "records a peak")])
def test_other_claims_are_refused(break_, said: str) -> None:
    with pytest.raises(Failure) as caught:
        verify(break_(planned()))
    assert {d.code for d in caught.value.diagnostics} == {"RL0544"}
    assert any(said in d.title for d in caught.value.diagnostics)


def test_a_plan_without_a_cluster_claims_nothing() -> None:
    plan = planned()
    quiet = replace(plan, header=replace(plan.header, memory=0))
    verify(replace(quiet, classes=tuple(replace(c, peak_bytes=0) for c in quiet.classes)))
