"""Device order left free: as many bytes as possible stay, as with any exact assignment; HybridFlow's case in closed
form."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import linear_sum_assignment

from rldsl.diag import InternalError
from rldsl.plan.model import Layout, Mesh, Model, ParamSpec, Split
from rldsl.reshard.box_classes import box_classes
from rldsl.reshard.device_order import reorder_devices
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.summary import summary
from rldsl.sharding.boxes import cell_of, volume
from tests.plan_algebra.models import layout, mesh, model
from tests.realloc.cases import cases


def moved(made, src, on, dst, at, devices=8):
    return summary(plan_reshard(made, src, on, dst, at, devices), made).bytes // 4


def even(layers=32):
    """Everything is divided evenly by tp and pp, so that shards are equal parts of the model."""
    spec = ParamSpec("layers.{}.w", (64, 2), "layer", layers, Split(0, ((64, 1),)))
    return Model("m", "causal_lm", "", "float32", (spec,), layers, "")


DEGREES = [(p, t, d, pg, tg) for p, t, d in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4)) if p * t * d >= 4
           for pg, tg in product((1, 2, 4), (1, 2, 4, 8)) if t % tg == 0 and p % pg == 0]


@pytest.mark.thorough
@pytest.mark.parametrize(("p", "t", "d", "pg", "tg"), DEGREES)
def test_hybridflow(p, t, d, pg, tg):
    """A rank of (p, t, d) that generates with (pg, tg) gets (tp - tg pg) / (tg pg tp) of the model, tp = t p: what its
    new shard has beyond its old one (table 2 of the paper), and keeps the whole of the old one: no redundancy."""
    on = Mesh("m", ((0, p * t * d),))
    src = Layout("s", "m", dp=d, tp=t, pp=p)
    dst = Layout("d", "m", dp=p * t * d // (pg * tg), tp=tg, pp=pg)
    made = even()
    size = 32 * 128
    at = reorder_devices(made, src, on, dst, on.ranks, p * t * d)
    received = moved(made, src, on, dst, at) / (p * t * d)
    assert received == pytest.approx((t * p - tg * pg) / (tg * pg * t * p) * size)
    assert sorted(at.members()) == list(on.members())


def test_a_stride_instead_of_neighbors():
    """tp=2 to tp=4 costs nothing: each quarter lies inside a half."""
    on = Mesh("m", ((0, 8),))
    src, dst = Layout("s", "m", dp=4, tp=2), Layout("d", "m", dp=2, tp=4)
    at = reorder_devices(even(), src, on, dst, on.ranks, 8)
    assert moved(even(), src, on, dst, at) == 0 < moved(even(), src, on, dst, on)
    for rank in range(8):
        assert cell_of(dst, at, rank).part // 2 == rank % 2


def test_an_order_that_is_good_stays():
    on = Mesh("m", ((0, 16),))
    src, dst = Layout("s", "m", dp=4, tp=4), Layout("d", "m", dp=8, tp=2)
    same = reorder_devices(even(), src, on, src, on.ranks, 4)
    assert same.ranks == ((0, 16),)
    at = reorder_devices(even(), src, on, dst, on.ranks, 4)
    assert reorder_devices(even(), src, on, dst, at.ranks, 4).ranks == at.ranks


@given(cases())
@settings(max_examples=80, deadline=None)
def test_exact(case):
    """With one large node: the optimum of scipy's assignment."""
    size = len(case.dst_mesh.members())
    every = [*case.dst_mesh.members(), *range(24, 28)]
    at = reorder_devices(case.model, case.src, case.src_mesh, case.dst, (*case.dst_mesh.ranks, (24, 28)), 64)
    ordered = Mesh(case.dst.mesh, ((0, size),))
    worth = np.zeros((len(every), size))
    for line in box_classes(case.model, case.src, case.dst):
        for i, rank in enumerate(every):
            for j in range(size):
                if cell_of(case.src, case.src_mesh, rank) in line.holders and cell_of(case.dst, ordered, j) in line.needers:
                    worth[i, j] += line.size
    best = worth[linear_sum_assignment(worth, maximize=True)].sum()
    place = {rank: i for i, rank in enumerate(every)}
    assert sum(worth[place[rank], j] for j, rank in enumerate(at.members())) == best
    assert set(at.members()) <= set(every) and len(set(at.members())) == size


@given(cases())
@settings(max_examples=80, deadline=None)
def test_groups_stay_inside_nodes_and_nothing_gets_worse(case):
    made, devices = case.model, case.devices
    at = reorder_devices(made, case.src, case.src_mesh, case.dst, case.dst_mesh.ranks, devices)
    assert (moved(made, case.src, case.src_mesh, case.dst, at)
            <= moved(made, case.src, case.src_mesh, case.dst, case.dst_mesh))
    before, after = case.dst_mesh.members(), at.members()
    assert sorted(before) == sorted(after)
    together = {}
    for a, b in zip(before, after):
        assert together.setdefault(a // devices, b // devices) == b // devices, "a node's coordinates stay together"


def test_thousands_of_ranks():
    on = Mesh("m", ((0, 2048),))
    src, dst = Layout("s", "m", dp=128, tp=4, pp=4), Layout("d", "m", dp=1024, tp=2)
    at = reorder_devices(even(), src, on, dst, on.ranks, 8)
    size = sum(volume(box) for box in [((0, 64), (0, 2))] * 32)
    assert moved(even(), src, on, dst, at) == 2048 * (size // 2 - size // 16)


def test_too_few_ranks():
    on = mesh((0, 4))
    with pytest.raises(InternalError, match="3 ranks for the 4"):
        reorder_devices(model(), layout(on, tp=4), on, layout(on, tp=4), ((0, 3),), 8)


def test_no_rank_twice():
    on = mesh((0, 4))
    with pytest.raises(InternalError):
        reorder_devices(model(), layout(on, tp=4), on, layout(on, tp=4), ((0, 3), (2, 4)), 8)
