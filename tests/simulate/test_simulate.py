"""Whole plans: bytes, bounds, order, and what a simulation must not depend on. Never a measured time."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.clusters import Cluster, Measured, preset
from rldsl.diag import Failure
from rldsl.plan.events import Generate, Realloc, Save, Train, Transfer
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.simulate import Lengths, Timeline, simulate, transfer_ops
from rldsl.simulate.classes import build_classes
from rldsl.simulate.engine import Compute, EventBegin
from rldsl.simulate.machine import INVARIANT_PRICE, Machine
from rldsl.simulate.program import build_programs
from rldsl.simulate.simulate import STEPS, run
from rldsl.simulate.work_counts import WorkCounts, build_shard, num_cache_widths
from rldsl.simulate.world import World
from tests.simulate import plans
from tests.simulate.plans import PLACES, ROUND

known = cache(plans.plan)
EVERY = pytest.mark.parametrize("name", list(PLACES))


@cache
def timeline(name: str) -> Timeline:
    return simulate(known(name), ROUND)


def ranks(found: Timeline, c: int) -> int:
    return sum(stop - start for start, stop in found.classes[c])


# ------------------------------------------------------------------------------------------------- exact


@EVERY
def test_reallocs_move_the_bytes_of_the_plan(name: str) -> None:
    plan = known(name)
    world = World(plan, ROUND, Lengths())
    for event in (e for e, _ in event_paths(plan) if isinstance(e, Realloc)):
        mesh = world.layouts[event.dst].mesh
        found = transfer_ops.class_traffic(world, event)
        assert sum(4 * found[c].received * world.classes.sizes[c] for c in world.on(mesh)) == event.bytes


@EVERY
def test_ranks_of_a_class_are_alike(name: str) -> None:
    """Simulated rank by rank, nothing changes: each rank does what its class does."""
    plan = known(name)
    together, apart = timeline(name), run(World(plan, ROUND, Lengths(), per_rank=True))
    assert len(apart.classes) == plan.header.world >= len(together.classes)
    assert apart.seconds == pytest.approx(together.seconds)
    assert dict(apart.idle) == pytest.approx(dict(together.idle))
    of = {r: c for c, every in enumerate(together.classes) for a, b in every for r in range(a, b)}
    mine = {(s.rank_class, s.event, s.iteration): s for s in together.spans}
    for span in apart.spans:
        twin = mine[of[apart.classes[span.rank_class][0][0]], span.event, span.iteration]
        assert (span.start, span.stop, span.busy) == pytest.approx((twin.start, twin.stop, twin.busy))


def test_classes_divide_the_ranks() -> None:
    for name in PLACES:
        plan = known(name)
        found = build_classes(plan)
        assert sorted(r for c in found.ranks for a, b in c for r in range(a, b)) == list(range(plan.header.world))
        assert all(found.of[r] == c for c, every in enumerate(found.ranks) for a, b in every for r in range(a, b))


@EVERY
def test_the_number_of_classes_does_not_grow_with_dp(name: str) -> None:
    plan = known(name)
    sizes = {len(build_classes(plans.scaled(plan, k)).ranks) for k in (4, 16, 64)}
    assert len(sizes) == 1


@EVERY
def test_work_is_conserved(name: str) -> None:
    """The busy seconds of the spans are the work of the ops, no more and no less."""
    world = World(known(name), ROUND, Lengths())
    found = timeline(name)
    for c, ops in enumerate(build_programs(world, STEPS)):
        ends = [i for i, a in enumerate(ops) if isinstance(a, EventBegin) and a.event == -1]
        total = sum(a.seconds * a.share for a in ops[ends[-2] : ends[-1]] if isinstance(a, Compute))
        assert sum(s.busy for s in found.spans if s.rank_class == c) == pytest.approx(total)


@EVERY
def test_the_critical_path_is_the_step(name: str) -> None:
    found = timeline(name)
    segments = found.critical
    assert segments[0].start == 0 and segments[-1].stop == pytest.approx(found.seconds)
    assert all(a.stop == pytest.approx(b.start) for a, b in zip(segments, segments[1:]))
    assert sum(h.stop - h.start for h in segments) == pytest.approx(found.seconds)


@EVERY
def test_spans_follow_each_other_and_the_plan(name: str) -> None:
    """A rank is in one event at a time, in the order of its list, and never busier than the time allows."""
    found, plan = timeline(name), known(name)
    order = {e.id: i for i, (e, _) in enumerate(event_paths(plan))}
    for c in range(len(found.classes)):
        mine = [s for s in found.spans if s.rank_class == c]
        assert [order[s.event] for s in mine] == sorted(order[s.event] for s in mine)
        assert all(a.stop == pytest.approx(b.start) for a, b in zip(mine, mine[1:]))
        assert all(-1e-12 <= s.busy <= s.stop - s.start + 1e-12 for s in mine)
        assert mine[-1].stop <= found.seconds + 1e-12


@EVERY
def test_idle_is_what_is_not_busy(name: str) -> None:
    found, plan = timeline(name), known(name)
    world = World(plan, ROUND, Lengths())
    for mesh, share in found.idle:
        busy = sum(s.busy * len(set(world.meshes[mesh].members()).intersection(
            r for a, b in found.classes[s.rank_class] for r in range(a, b))) for s in found.spans)
        assert share == pytest.approx(1 - busy / (world.size(mesh) * found.seconds)) and 0 <= share < 1


def test_one_rank_is_the_sum_of_its_work() -> None:
    one = replace(ROUND, gpus=1, nodes=1)
    found = simulate(only_one(), one)
    assert found.seconds == pytest.approx(sum(s.busy for s in found.spans))
    assert dict(found.idle) == pytest.approx({"m0": 0.0})


def only_one() -> Plan:
    from rldsl import api
    from rldsl.passes import pipeline
    from rldsl.placement.place import place_graph
    from tests.compiler.graphs import family, ppo

    return api.finish(pipeline.run(place_graph(ppo({}, cluster=None), "", family))).plan


# ------------------------------------------------------------------------------------------------ bounds


@EVERY
def test_no_step_is_faster_than_its_work(name: str) -> None:
    """The products of the calls alone, at the full rate, take this long on the ranks that make them."""
    plan, found = known(name), timeline(name)
    world = World(plan, ROUND, Lengths())
    for event in (e for e, _ in event_paths(plan) if isinstance(e, Train)):
        layer = sum(a * b for s in world.models[event.model].params if s.stage == "layer" for a, b in [s.shape])
        row = world.row("gen")
        work = 6 * layer * world.models[event.model].layers * world.frames["gen"].count * row.tokens
        assert found.seconds >= work / world.size(event.mesh) / (ROUND.float32_tflops * 1e12)
    longest = max(sum(s.busy for s in found.spans if s.rank_class == c) for c in range(len(found.classes)))
    assert found.seconds >= longest - 1e-12


def test_a_free_machine_needs_no_time() -> None:
    fast = Cluster(gpus=8, bfloat16_tflops=1e30, float32_tflops=1e30, memory_gb_s=1e30, link_gb_s=1e30)
    assert simulate(known("real"), fast).seconds < 1e-20


RATES = ("float32_tflops", "memory_gb_s", "link_gb_s", "reduce_gb_s", "matmul_efficiency", "attention_efficiency",
         "memory_efficiency", "link_efficiency")
LATENCIES = ("link_us", "kernel_us", "event_us", "row_us", "reduce_us")
HALF = replace(ROUND, matmul_efficiency=0.4, attention_efficiency=0.3, memory_efficiency=0.5, link_efficiency=0.5,
               reduce_us=15, reduce_gb_s=0.05)


@cache
def halves(name: str) -> float:
    return simulate(known(name), HALF).seconds


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(list(PLACES)), st.sampled_from(RATES), st.floats(1.0, 2.0))
def test_a_faster_machine_is_never_slower(name: str, rate: str, factor: float) -> None:
    faster = replace(HALF, **{rate: getattr(HALF, rate) * factor})
    assert simulate(known(name), faster).seconds <= halves(name) * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(list(PLACES)), st.sampled_from(LATENCIES), st.floats(1.0, 5.0))
def test_more_latency_is_never_faster(name: str, latency: str, factor: float) -> None:
    slower = replace(HALF, **{latency: getattr(HALF, latency) * factor})
    assert simulate(known(name), slower).seconds >= halves(name) * (1 - 1e-9)


def test_every_rate_matters_somewhere() -> None:
    for name in (*RATES, *LATENCIES):
        slower = replace(HALF, **{name: getattr(HALF, name) * (0.5 if name in RATES else 2)})
        assert any(simulate(known(p), slower).seconds > halves(p) for p in PLACES), name


def test_the_network_is_between_nodes_alone() -> None:
    """The same ranks on one node and on two."""
    plan = known("together")
    two = replace(plan, header=replace(plan.header, devices_per_node=4))
    slow = replace(ROUND, network_gb_s=1e-4)
    assert simulate(plan, slow).seconds == simulate(plan, ROUND).seconds
    assert simulate(two, slow).seconds > simulate(two, ROUND).seconds > simulate(plan, ROUND).seconds
    shared = replace(ROUND, node_network_gb_s=ROUND.network_gb_s)
    assert simulate(two, shared).seconds > simulate(two, ROUND).seconds


def test_longer_sequences_take_longer() -> None:
    plan = known("real")
    short, mean, full = (simulate(plan, ROUND, x) for x in (Lengths(4, 4, 4), Lengths(4, 4), Lengths()))
    assert short.seconds < mean.seconds < full.seconds  # the longest response decides how long decoding lasts
    assert short.tokens == mean.tokens == 16 * 8 and full.tokens == 16 * 24
    assert simulate(plan, ROUND, Lengths(1e9, 1e9, 1e9)) == full  # no longer than the program lets them be


def test_recomputation_costs_a_forward_pass() -> None:
    plan = known("real")
    def swapped(items):
        return tuple(replace(i, recompute="full") if isinstance(i, Train) else replace(i, body=swapped(i.body))
                     if hasattr(i, "body") else i for i in items)
    again = simulate(replace(plan, body=swapped(plan.body)), ROUND)
    trains = [e.id for e, _ in event_paths(plan) if isinstance(e, Train)]
    before, after = timeline("real").event_seconds(), again.event_seconds()
    assert all(before[e] < after[e] < 1.5 * before[e] for e in trains)


def test_movement_overlaps_with_work() -> None:
    """Transfers are issued early and waited for where they are read: a slower link does not lengthen the event that
    issues them."""
    plan, slow = known("apart"), replace(ROUND, link_gb_s=ROUND.link_gb_s / 50, link_us=0, network_us=0)
    found = simulate(plan, slow)
    sends = [e.id for e, _ in event_paths(plan) if isinstance(e, Transfer)]
    long = max(s.stop - s.start for s in found.spans if s.event in sends)
    messages = [h for h in found.critical if h.kind == "message"]
    assert messages and long < max(h.stop - h.start for h in messages)


def test_disjoint_meshes_work_at_the_same_time() -> None:
    found, plan = timeline("apart"), known("apart")
    by = {e.id: e for e, _ in event_paths(plan)}
    calls = {by[s.event].model: s for s in found.spans if type(by[s.event]).__name__ == "Infer"}
    a, b = calls["judge"], calls["ref"]
    assert a.start < b.stop and b.start < a.stop


def test_what_happens_now_and_then_is_told_apart() -> None:
    """The save after every second step: what it writes, on the ranks of its mesh, at the rate of the disk."""
    plan, slow = known("real"), replace(ROUND, disk_gb_s=1e-6)
    found = simulate(plan, slow)
    (once,) = found.periodic
    (save,) = [e for e, _ in event_paths(plan) if isinstance(e, Save)]
    assert once.period == 2 and once.events == (save.id,) and found.seconds == timeline("real").seconds
    whole = 4 * (10 * 16 + 4 * (16 * 16 * 2) + 16 + 10 * 16)
    assert once.seconds == pytest.approx(whole / 4 / 1e3, rel=0.01)


# ------------------------------------------------------------------------------------------- measurements


def test_measurements_replace_counting() -> None:
    plan = known("together")
    zero = {p: tuple((f, 0.0) for f in names) for p, names in (("forward", ("call",)), ("train", ("call",)),
                                                               ("decode", ("call",)), ("update", ("call",)))}
    kinds = ("causal_lm", "value_model", "reward_model")
    every = tuple(Measured("c" * 64, kind, "float32", 1, 1, **zero) for kind in kinds)
    found = simulate(plan, replace(ROUND, measured=every))
    calls = {e.id for e, _ in event_paths(plan) if isinstance(e, Generate)}
    assert not found.estimated and found.seconds < timeline("together").seconds / 2
    assert all(found.event_seconds()[e] < timeline("together").event_seconds()[e] / 10 for e in calls)
    assert set(dict(timeline("together").estimated)) == {"actor", "critic", "ref", "judge"}


def test_a_measured_step_is_the_sum_of_its_features() -> None:
    """One rank, one model: every feature counted by hand."""
    plan = only_one()
    rates = dict(call=1e6, layer=1e3, token=10.0, pair=1.0, output=0.1)
    measured = Measured("c" * 64, "causal_lm", "float32", 1, 1, forward=tuple(rates.items()))
    fast = Cluster(gpus=1, bfloat16_tflops=1e30, float32_tflops=1e30, memory_gb_s=1e30)
    found = simulate(plan, replace(fast, measured=(measured,)))
    rows, tokens, layers = 16, 24, 4
    fresh = rows // 2  # the two samples of a prompt compute it once
    distinct, pairs = rows * 16 + fresh * 8, rows * (tokens**2 - 8**2) + fresh * 8**2
    infer = 1e6 + layers * 1e3 + layers * distinct * 10 + layers * pairs + rows * 16 * 0.1
    by = found.event_seconds()
    (event,) = [e for e, _ in event_paths(plan) if getattr(e, "value", "") == "ref_lp"]
    assert by[event.id] == pytest.approx(infer * 1e-6)
    (gen,) = [e for e, _ in event_paths(plan) if isinstance(e, Generate)]
    prefill = 1e6 + layers * 1e3 + layers * fresh * 8 * 10 + layers * fresh * 64 + rows * 0.1
    assert by[gen.id] == pytest.approx(prefill * 1e-6)
    first = replace(measured, start=(("call", 3e6), ("layer", 1e5)))
    found = simulate(plan, replace(fast, measured=(first,)))
    assert found.event_seconds()[gen.id] == pytest.approx(prefill * 1e-6 + 3 + layers * 0.1), "one shape: 24 tokens of 64"


def test_a_degree_that_was_not_measured_follows_from_the_nearest_one() -> None:
    rates = dict(call=1.0, layer=2.0, token=3.0, pair=4.0, output=5.0)
    one = Measured("c" * 64, "causal_lm", "float32", 2, 1, tuple(rates.items()), tuple(rates.items()),
                   tuple(rates.items()), (("call", 6.0),), (("element", 7.0),))
    machine = Machine(replace(ROUND, measured=(replace(one, tp=8, forward=(("call", 0.0),)), one)), 1)
    model = next(m for m in known("together").models if m.head_name == "causal_lm")
    assert machine.measured(model, 2) == one and machine.measured(model, 8).tp == 8
    found = machine.measured(model, 1)
    assert found is not None and dict(found.forward) == dict(call=1.0, layer=2.0, token=6.0, pair=8.0, output=10.0)
    read = replace(one, forward=(("layer", 100.0),))  # 40 kernels, and the rest is reading weights
    assert dict(replace(machine, cluster=replace(ROUND, measured=(read,), kernel_us=1.5)).measured(model, 4).forward) == {
        "layer": 60 + 40 / 2}
    assert found.train == found.decode == found.forward and (found.start, found.update) == (one.start, one.update)
    assert machine.measured(replace(model, head_name="reward_model"), 2) is None


def test_decoding_meets_shapes_as_sequences_grow() -> None:
    assert num_cache_widths(8, 24) == num_cache_widths(8, 64) == 1
    assert num_cache_widths(64, 128) == num_cache_widths(8, 128) == 5 and num_cache_widths(128, 1024) == 13


def test_ranks_that_share_cores_are_slower() -> None:
    plan = known("together")
    alone = simulate(plan, replace(ROUND, gpus=8, nodes=1, cores=8, threads=1))
    shared = simulate(plan, replace(ROUND, gpus=8, nodes=1, cores=2, threads=1))
    slow = simulate(plan, replace(ROUND, gpus=8, nodes=1, cores=2, threads=1, core_speed=0.5))
    assert 2 * alone.seconds < shared.seconds < slow.seconds < 12 * alone.seconds


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("cluster, code", [
    (Cluster(gpus=8), "RL0215"), (replace(ROUND, float32_tflops=0.0), "RL0215"),
    (replace(ROUND, network_gb_s=0.0), "RL0215"),
    (replace(ROUND, gpus=0), "RL0215"), (replace(ROUND, gpus=4, nodes=1), "RL0096")])
def test_clusters_that_will_not_do(cluster: Cluster, code: str) -> None:
    with pytest.raises(Failure) as caught:
        simulate(known("real"), cluster)
    assert [d.code for d in caught.value.diagnostics] == [code]


def test_a_timeline_is_plain_values() -> None:
    found = timeline("real")
    assert json.dumps({f.name: getattr(found, f.name) for f in fields(found)}, default=lambda o: {
        f.name: getattr(o, f.name) for f in fields(o)})
    assert hash(found) == hash(simulate(known("real"), ROUND))
    assert found.tokens_per_second == found.tokens / found.seconds


def test_ten_thousand_ranks() -> None:
    plan = plans.scaled(known("tensors"), 1280)
    large = simulate(plan, preset("h100x10240"))
    assert plan.header.world == 10_240 and len(large.classes) < 20 and large.seconds > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_invariance_has_its_price(dtype: str) -> None:
    """As `benchmarks/invariant.py` measures it; what does not compute with the model costs nothing more."""
    price = INVARIANT_PRICE[dtype]
    plan, work = known("together"), WorkCounts(1, 2, 100, 1000, 10)
    model, machine = next(m for m in plan.models if m.head_name == "causal_lm"), Machine(ROUND)
    layout = next(x for x in plan.layouts if x.id == model.train_layout)

    def seconds(invariant: bool, ordered: bool) -> tuple[float, ...]:
        shard = build_shard(replace(model, dtype=dtype, invariant=invariant, invariant_training=ordered), layout, 0)
        return (machine.forward(shard, work), machine.decode(shard, work), *machine.train(shard, work, False))

    plain = seconds(False, False)
    assert all(s > 0 for s in plain)
    assert seconds(True, False) == pytest.approx([p * f for p, f in zip(plain, (price.forward, price.decode, price.train, price.train))])
    assert seconds(True, True) == pytest.approx([
        p * f for p, f in zip(plain, (price.forward, price.decode, price.ordered_train, price.ordered_train))])
    # invariant models have kernels for CPUs in float32 alone
    assert INVARIANT_PRICE["float32"].decode < INVARIANT_PRICE["bfloat16"].decode
