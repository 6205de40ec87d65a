"""What a cluster's file says about nodes, links and the host: plans that do not fit, and rates that are not there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from rldsl import api
from rldsl.clusters import Cluster
from rldsl.diag import Failure
from rldsl.plan.events import Offload, Realloc
from rldsl.plan.model import Layout, Mesh, Plan
from rldsl.plan.projection import event_paths
from rldsl.sharding.layout import axis_ranks
from rldsl.simulate import Lengths, simulate, transfer_ops
from rldsl.simulate.classes import Classes, build_groups
from rldsl.simulate.machine import Machine
from rldsl.simulate.summary import format_timeline
from rldsl.simulate.world import World
from tests.simulate import plans
from tests.simulate.plans import ROUND
from tests.verify.plans import folder

known = cache(plans.plan)
PROGRAM = """
use std.grpo (group_norm, grpo)
cluster nodes=2 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=16, max_prompt_tokens=16)
model actor  = causal_lm("models/sft") train adamw(lr=1e-3)
model ref    = causal_lm("models/sft")
flow f(steps=4, seed=7) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6) on mesh(0:8) dp=4 tp=2
  metric length = mean(len(gen))
  ref_lp = ref.logprobs(gen) on mesh(0:8) dp=8 {off}
  adv    = group_norm(len(gen))
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=adv, ref=ref_lp, beta=0.1)) on mesh(0:8) {train} {off}
}}
"""
TWO = replace(ROUND, gpus=4, nodes=2)


@cache
def compiled(train: str, off: str = "") -> Plan:
    with folder() as here:
        (here / "p.rlf").write_text(PROGRAM.format(train=train, off=off))
        return api.compile("p.rlf")


# -------------------------------------------------------------------------------------------------- nodes


@pytest.mark.parametrize("nodes, gpus, word", [
    (8, 1, "1 node of 8 devices, but `round` has 8 nodes of 1 device"), (2, 4, "2 nodes of 4 devices"),
    (1, 4, "the plan is for 8 ranks"), (1, 7, "8 ranks")])
def test_a_node_of_the_plan_is_on_one_machine(nodes: int, gpus: int, word: str) -> None:
    with pytest.raises(Failure) as caught:
        simulate(known("real"), replace(ROUND, nodes=nodes, gpus=gpus))
    (found,) = caught.value.diagnostics
    assert found.code == "RL0096" and word in found.title and found.help


@pytest.mark.parametrize("nodes, gpus", [(1, 8), (1, 16), (2, 8)])
def test_machines_may_have_more_devices(nodes: int, gpus: int) -> None:
    assert simulate(known("real"), replace(ROUND, nodes=nodes, gpus=gpus)).seconds == simulate(
        known("real"), ROUND).seconds


def test_nodes_of_a_plan_do_not_share_a_machine() -> None:
    """There is no network inside one, so nobody knows what these messages would cost."""
    with pytest.raises(Failure) as caught:
        simulate(compiled("dp=8"), replace(ROUND, nodes=1, gpus=8))
    assert caught.value.diagnostics[0].code == "RL0096"


def test_an_unknown_link_is_not_free() -> None:
    machine = Machine(Cluster(gpus=1))
    assert machine.link(1.0, False) == machine.link(1.0, True) == float("inf")
    assert machine.link(0.0, False) == machine.link(0.0, True) == 0.0


@pytest.mark.parametrize("ranks, crosses", [(((0, 1), (8, 9), (1, 2)), True), (((1, 3), (0, 1)), False)])
def test_groups_of_ranks_in_another_order(ranks: tuple[tuple[int, int], ...], crosses: bool) -> None:
    mesh, layout = Mesh("m", ranks), Layout("L", "m", dp=3)
    each = Classes(tuple(range(9)), tuple(((i, i + 1),) for i in range(9)), tuple(range(9)), (1,) * 9)
    assert len(axis_ranks(layout, mesh, "dp")) == 1
    assert build_groups(layout, mesh, each, 8)[0].crosses["dp"] is crosses


# --------------------------------------------------------------------------------------- what costs nothing


def test_what_the_file_leaves_out_is_said() -> None:
    plan = known("real")
    assert simulate(plan, ROUND).free == ()
    bare = replace(ROUND, disk_gb_s=0.0, host_gb_s=0.0, link_us=0.0, row_us=0.0)
    found = simulate(plan, bare)
    assert found.free == ("disk_gb_s", "link_us", "row_us")  # nothing is offloaded
    assert "assumed to be free, because round has no value for it: disk_gb_s, link_us, row_us" in format_timeline(
        plan, found, bare, Lengths(), "x")
    assert "cost nothing" not in format_timeline(plan, simulate(plan, ROUND), ROUND, Lengths(), "x")


def test_a_host_without_a_rate_is_said_where_something_goes_there() -> None:
    none = replace(TWO, host_gb_s=0.0)
    assert simulate(compiled("dp=8", "offload=true"), none).free == ("host_gb_s",)
    assert simulate(compiled("dp=8"), none).free == ()


# ---------------------------------------------------------------------------------------- zero and offload


@pytest.mark.parametrize("train", ["dp=8", "dp=8 zero=1", "dp=4 tp=2 zero=3", "dp=2 tp=2 pp=2 zero=2"])
def test_reallocs_of_divided_copies_move_the_bytes_of_the_plan(train: str) -> None:
    """Rank by rank, since shards of rows differ."""
    plan = compiled(train)
    world = World(plan, TWO, Lengths(), per_rank=True)
    for event in (e for e, _ in event_paths(plan) if isinstance(e, Realloc)):
        found = transfer_ops.class_traffic(world, event).values()
        assert 4 * sum(m.received for m in found) == 4 * sum(m.sent for m in found) == event.bytes
    assert simulate(plan, TWO).seconds > 0


def test_what_a_node_lacks_comes_over_the_network_once() -> None:
    """All four ranks of the second node lack the same: each gets a quarter from afar, and the rest from its node."""
    plan = replace(known("together"), header=replace(known("together").header, devices_per_node=4))
    src, dst = Layout("A", "a"), Layout("B", "b", dp=4)
    event = Realloc(id=999, mesh="b", model="actor", src="A", dst="B", reads=(), writes=())
    body = replace(plan.body[-1], body=(event,))  # type: ignore[arg-type]
    plan = replace(plan, meshes=(*plan.meshes, Mesh("a", ((0, 1),)), Mesh("b", ((4, 8),))),
                   layouts=(*plan.layouts, src, dst), body=(body,))
    world = World(plan, TWO, Lengths(), per_rank=True)
    found = transfer_ops.class_traffic(world, event)
    whole = found[0].network_out
    assert found[0].intra_node_out == 0 and all(abs(4 * found[c].network_in - whole) <= 8 for c in range(4, 8))
    assert all(found[c].received == whole for c in range(4, 8))


def test_offloads_run_beside_other_work() -> None:
    """A slow host makes the step longer, and not the events that send something there: they only begin it."""
    plan = compiled("dp=8", "offload=true")
    fast, slow = simulate(plan, TWO), simulate(plan, replace(TWO, host_gb_s=1e-4))
    sent = [e.id for e, path in event_paths(plan) if isinstance(e, Offload) and path]
    assert sent and slow.seconds > 2 * fast.seconds
    assert all(slow.event_seconds()[e] == pytest.approx(fast.event_seconds()[e]) for e in sent)


def test_zero_divides_what_goes_to_the_host() -> None:
    whole, divided = (simulate(compiled(train, "offload=true"), replace(TWO, host_gb_s=1e-4)).seconds
                      for train in ("dp=8", "dp=8 zero=1"))
    assert divided < 0.75 * whole


def test_on_a_processor_nothing_goes_anywhere() -> None:
    plan = compiled("dp=8", "offload=true")
    here = replace(TWO, cores=4, threads=1)
    assert simulate(plan, here).seconds == simulate(plan, replace(here, host_gb_s=1e-9)).seconds
    assert any(isinstance(e, Offload) for e, _ in event_paths(plan))
