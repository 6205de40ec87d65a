"""Lines: every element of every parameter once, with those who hold and want it."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.diag import InternalError
from rldsl.plan.model import Layout, ParamSpec, Split
from rldsl.reshard.box_classes import BoxClass, Segment, box_classes, boxes_between
from rldsl.reshard.node_groups import MeshView, node_groups
from rldsl.sharding.boxes import cell_of, contains, parameters, pieces_of_rank, volume
from tests.plan_algebra.models import layout, layouts, mesh, model
from tests.realloc.cases import cases


@pytest.mark.parametrize("kind", ["gqa", "fused"])
def test_lines_cover_every_parameter_once(kind):
    made, on = model(kind), mesh((0, 12))
    for a in layouts(on):
        for b in layouts(on):
            count = {p.name: np.zeros(p.spec.shape, int) for p in parameters(made)}
            for line in box_classes(made, a, b):
                assert sum(volume(box) for _, box in boxes_between(line, 0, line.size)) == line.size
                for name, box in boxes_between(line, 0, line.size):
                    count[name][tuple(slice(*x) for x in box)] += 1
            assert all((c == 1).all() for c in count.values())


@given(cases())
@settings(max_examples=40, deadline=None)
def test_cells_hold_and_want_their_lines(case):
    by_name = {p.name: p for p in parameters(case.model)}
    for line in box_classes(case.model, case.src, case.dst):
        for name, box in boxes_between(line, 0, line.size):
            for cells, at, on in ((line.holders, case.src, case.src_mesh), (line.needers, case.dst, case.dst_mesh)):
                for rank in on.members():
                    inside = any(contains(p.box, box) for p in pieces_of_rank(by_name[name], case.model.layers, at, on, rank))
                    assert inside == (cell_of(at, on, rank) in cells), (name, box, rank)


def test_the_number_of_lines_does_not_depend_on_layers_or_ranks():
    few, many = mesh((0, 8)), mesh((0, 512))
    assert (len(box_classes(model(layers=4), layout(few, tp=4, pp=2), layout(few, tp=2, dp=4)))
            == len(box_classes(model(layers=64), layout(many, tp=4, pp=2, dp=64), layout(many, tp=2, dp=256))))


@given(st.lists(st.integers(0, 100), max_size=5))
def test_stretches_of_a_line_never_overlap(cuts):
    entries = (Segment("a.{}", (0, 2), ((0, 3), (4, 8)), 0), Segment("b", (None,), ((5, 16), (0, 7)), 24),
               Segment("c", (None,), (), 101))
    line = BoxClass((), (), entries, 102)
    count = Counter()
    for start, stop in pairwise(sorted({0, 102, *cuts})):
        found = list(boxes_between(line, start, stop))
        assert all(box == () or volume(box) for _, box in found)
        assert abs(sum(volume(box) for _, box in found) - (stop - start)) <= 7  # whole rows
        for name, box in found:
            count.update((name, *at) for at in np.ndindex(*(b - a for a, b in box)) for at in
                         [tuple(x + a for x, (a, _) in zip(at, box))])
    assert len(count) == 102 and set(count.values()) == {1}


def test_a_split_that_leaves_something_out_is_refused():
    spec = ParamSpec("w", (4, 2), "all", split=Split(0, ((3, 1),)))
    at = Layout("a", "m", tp=2)
    made = model()
    with pytest.raises(InternalError, match="parts fill 3 of 4"):
        box_classes(type(made)("m", "causal_lm", "", "float32", (spec,), 1, ""), at, at)


# ------------------------------------------------------------------------------------------------------ nodes


@given(cases())
@settings(max_examples=60, deadline=None)
def test_sides_say_what_layouts_say(case):
    for at, on in ((case.src, case.src_mesh), (case.dst, case.dst_mesh)):
        side = MeshView.of(at, on)
        assert [side.cell(r) for r in range(30)] == [cell_of(at, on, r) for r in range(30)]
        assert all(side.rank(side.cell(r), side.replica(r)) == r for r in on.members())
        with pytest.raises(InternalError):
            side.replica(99)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_nodes_of_a_kind_are_alike(case):
    found = node_groups(MeshView.of(case.src, case.src_mesh), MeshView.of(case.dst, case.dst_mesh), case.devices)
    nodes = sorted(n for group in found.values() for n in group)
    assert nodes == sorted({r // case.devices for r in case.dst_mesh.members()})
    for places, group in found.items():
        assert list(group) == sorted(group)
        for node in group:
            block = range(node * case.devices, (node + 1) * case.devices)
            assert places == tuple((cell_of(case.src, case.src_mesh, r), cell_of(case.dst, case.dst_mesh, r)) for r in block)
