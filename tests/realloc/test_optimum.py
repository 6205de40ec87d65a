"""The busiest rank, against a linear program over all ways of sending (and without ranks that pass on what they
got)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from rldsl.reshard.broadcast_trees import height
from rldsl.reshard.intra_node import NETWORK_COST
from tests.plan_algebra.models import layout, layouts, mesh, model
from tests.realloc.cases import Case, cases, wide
from tests.realloc.program import busiest, links, optimum
from tests.samples import thorough_between


@given(cases(large=True))
@settings(max_examples=150, deadline=None)
def test_any_layouts(case: Case) -> None:
    assert busiest(case) <= 1.02 * optimum(case) + 8, case  # shares are whole elements


@pytest.mark.parametrize("kind", ["gqa", "fused"])
def test_devices_that_receive_or_send_much(kind: str) -> None:
    """Neither what devices of a node receive nor what they pass on may be balanced alone: the optimum is between."""
    on = mesh((4, 19))
    case = Case(wide(kind), layout(on, dp=3, tp=5), on, layout(on, pp=5, dp=3), on, 4)
    assert busiest(case) <= optimum(case)
    few, more = mesh((2, 14)), mesh((0, 13))
    case = Case(wide(kind), layout(few, pp=2, tp=6), few, layout(more, dp=13), more, 8)
    assert busiest(case) <= 1.01 * optimum(case)


GRID = [(mesh((0, 8)), mesh((0, 8))), (mesh((0, 8)), mesh((8, 16))), (mesh((0, 8)), mesh((4, 10))),
        (mesh((0, 16)), mesh((0, 16)))]


@pytest.mark.parametrize("devices", thorough_between([4, 8, 16]))
@pytest.mark.parametrize("kind", ["gqa", "fused"])
def test_a_grid_of_layouts(kind: str, devices: int) -> None:
    made = wide(kind)
    worst, count = 1.0, 0
    for am, bm in GRID:
        for a in layouts(am, 2):
            for b in layouts(bm, 2):
                case = Case(made, a, am, b, bm, devices)
                best = optimum(case)
                worst, count = max(worst, busiest(case) / best if best else 1.0), count + 1
    assert count >= 100 and worst <= 1.02


@pytest.mark.parametrize("replicas", [9, 32])
def test_one_holder_sends_each_element_a_few_times_only(replicas: int) -> None:
    """With trees nobody sends much more than the busiest receives, and the way down is short."""
    am, bm = mesh((0, 4)), mesh((4, 4 + 4 * replicas))
    case = Case(wide("gqa"), layout(am, tp=4), am, layout(bm, dp=replicas, tp=4), bm, 4)
    kind = case.paths().groups[0]
    size = max(stop - start for start, stop in map(kind.tree_nodes, range(kind.num_trees)))
    out, came, *_ = links(case)
    assert max(out.values()) <= 1.13 * max(came.values())
    assert 2 * busiest(case) < optimum(case), "the optimum without passing on"
    assert 1 < size <= 2 * replicas / kind.num_trees and height(size) <= 5


def test_inside_a_node_too() -> None:
    """One rank of a node has what seven others lack: it hands out parts, and they give them to each other."""
    am, bm = mesh((0, 1)), mesh((0, 8))
    case = Case(wide("gqa"), layout(am), am, layout(bm, dp=8), bm, 8)
    _, _, given, got = links(case)
    assert max(given.values()) <= 1.01 * max(got.values()) and sum(given.values()) == sum(got.values())


def test_the_optimum_is_one() -> None:
    """Of the program itself: two holders, one that lacks; then one holder, three that lack."""
    on = mesh((0, 4))
    made = model()
    size = sum(line.size for line in Case(made, layout(on, dp=4), on, layout(on, dp=4), on, 4).paths().classes)
    am, bm = mesh((0, 2)), mesh((2, 3))
    assert optimum(Case(made, layout(am, dp=2), am, layout(bm), bm, 1)) == size
    am, bm = mesh((0, 1)), mesh((1, 4))
    assert optimum(Case(made, layout(am), am, layout(bm, dp=3), bm, 1)) == 3 * size
    assert optimum(Case(made, layout(am), am, layout(bm, dp=3), bm, 4)) == 3 * size / NETWORK_COST
