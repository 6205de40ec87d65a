"""What kernels between the matrix products of a layer read and write, counted tensor by tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rldsl.clusters import preset
from rldsl.memory.activations import Moved, elements_between_products
from rldsl.plan.model import Layout, Model
from rldsl.simulate.machine import Machine
from rldsl.simulate.work_counts import WorkCounts, build_shard
from tests.search.programs import SHAPES, cluster, instance


def model(size: str) -> Model:
    return instance("dpo", size, cluster(1, 1, 80)).problem.models["actor"]


def renamed(m: Model, old: str, new: str) -> Model:
    return replace(m, params=tuple(replace(p, name=p.name.replace(old, new)) for p in m.params))


@pytest.mark.parametrize("size", sorted(SHAPES))
def test_a_layer_of_llama(size: str) -> None:
    hidden, _, heads, kv_heads, inner, _ = SHAPES[size]
    q, kv = hidden, kv_heads * (hidden // heads)
    norms, sums, rotary = 2 * 2 * hidden, 2 * 3 * hidden, 2 * (q + kv)
    attention, activation = 2 * q + 2 * kv, 3 * inner
    assert elements_between_products(model(size)) == Moved(norms + sums + rotary + attention + activation, 0)


def test_norms_of_heads_and_an_mlp_without_a_gate() -> None:
    hidden, _, heads, kv_heads, inner, _ = SHAPES["1B"]
    plain, q, kv = model("1B"), hidden, kv_heads * (hidden // heads)
    spec = next(p for p in plain.params if p.stage == "layer" and len(p.shape) == 1)
    norm = replace(spec, name="layers.{}.self_attn.q_norm.weight", shape=(hidden // heads,))
    more = elements_between_products(replace(plain, params=(*plain.params, norm)))
    assert more.between - elements_between_products(plain).between == 2 * (q + kv)
    ungated = elements_between_products(renamed(plain, "gate", "other"))
    assert elements_between_products(plain).between - ungated.between == inner


def test_experts_order_rows_and_compute_with_those_chosen() -> None:
    hidden, _, _, _, inner, _ = SHAPES["1B"]
    plain = model("1B")
    experts = replace(plain, sizes=replace(plain.sizes, experts_per_token=2), params=tuple(
        replace(p, name=p.name.replace("mlp", "mlp.experts").replace("_proj", "_projs"), experts=8, shape=(8, *p.shape))
        if "mlp" in p.name else p for p in plain.params))
    found = elements_between_products(experts)
    assert found.ordered == 4 * 2 * hidden and elements_between_products(plain).ordered == 0
    assert found.between - elements_between_products(plain).between == 3 * inner


def test_a_wider_mlp_takes_a_pass_longer_and_tp_divides_it() -> None:
    known = preset("h100x8")
    assert known is not None
    plain, count = model("1B"), WorkCounts(1, 1, 8192, 0, 0)
    machine = Machine(replace(known, compute_units=132, kernel_us=0.0))
    one, two = (build_shard(plain, Layout("x", "x", tp=tp), 0) for tp in (1, 2))
    wider = replace(one, moved=Moved(one.moved.between + 8192, 0))
    more = machine.forward(wider, count) - machine.forward(one, count)
    assert more == pytest.approx(machine.memory(8192 * 8192 * one.item))
    divided = machine.forward(replace(two, moved=wider.moved), count) - machine.forward(two, count)
    assert divided == pytest.approx(more / 2)


@pytest.mark.parametrize("gb_s, counted", [(0.0, True), (44.0, False)])
def test_the_order_of_experts_counts_once(gb_s: float, counted: bool) -> None:
    """`dispatch_gb_s` states it with the way to the experts."""
    known = preset("h100x8")
    assert known is not None
    machine, count = Machine(replace(known, compute_units=132, dispatch_gb_s=gb_s)), WorkCounts(1, 1, 8192, 0, 0)
    shard = replace(build_shard(model("1B"), Layout("x", "x"), 0), ep=2)
    ordered = replace(shard, moved=Moved(shard.moved.between, 8192))
    assert (machine.forward(ordered, count) > machine.forward(shard, count)) == counted
