"""Coordinates and boxes: every layout of small models covers every parameter, and every group its mesh."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.diag import InternalError
from rldsl.plan.model import Layout, ParamSpec, Split
from rldsl.sharding.boxes import (
    Parameter,
    Piece,
    holdings,
    intersect,
    itemsize,
    local_shape,
    local_slice,
    parameters,
    pieces,
    pieces_of_rank,
    replicas,
    subtract,
    volume,
)
from rldsl.sharding.layout import axis_ranks, coordinate, degree_product, layer_stage, stage_layers
from tests.plan_algebra.models import layout, layouts, mesh, model

degrees = st.tuples(*[st.integers(1, 4)] * 4)


@given(degrees, st.integers(0, 50))
def test_each_coordinate_is_there_once_and_tp_runs_fastest(sizes, first):
    pp, dp, cp, tp = sizes
    on = mesh((first, first + pp * dp * cp * tp))
    at = layout(on, pp, dp, tp, cp)
    seen = [coordinate(at, on, r) for r in on.members()]
    assert [(c.pp, c.dp, c.cp, c.tp) for c in seen] == [*product(*map(range, sizes))]
    assert degree_product(at) == len(seen)


@given(degrees)
def test_groups_of_an_axis_partition_the_mesh(sizes):
    pp, dp, cp, tp = sizes
    half = pp * dp * cp * tp
    on = mesh((3, 3 + half // 2), (1000, 1000 + half - half // 2))
    at = layout(on, pp, dp, tp, cp)
    for axis, size in (("tp", tp), ("pp", pp), ("dp", dp), ("mesh", half)):
        groups = axis_ranks(at, on, axis)
        assert {len(g) for g in groups} == {size}
        assert sorted(r for g in groups for r in g) == sorted(on.members())
        if axis != "mesh":
            for group in groups:
                coords = [coordinate(at, on, r) for r in group]
                assert [getattr(c, axis) for c in coords] == list(range(size))
                assert all(len({getattr(c, x) for c in coords}) == 1 for x in ("pp", "dp", "cp", "tp") if x != axis)


def test_group_order_is_fixed():
    on = mesh((0, 8))
    at = layout(on, pp=2, dp=2, tp=2)
    assert axis_ranks(at, on, "tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert axis_ranks(at, on, "dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert axis_ranks(at, on, "pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


@given(st.integers(1, 60), st.integers(1, 8))
def test_stages_divide_layers(layers, pp):
    runs = [stage_layers(layers, pp, s) for s in range(pp)]
    assert [x for run in runs for x in run] == list(range(layers))
    assert all(layer in runs[layer_stage(layers, pp, layer)] for layer in range(layers))


@pytest.mark.parametrize("call", [
    lambda: coordinate(layout(mesh((0, 4)), dp=4), mesh((0, 4)), 4),
    lambda: coordinate(layout(mesh((0, 4)), dp=2), mesh((0, 4)), 0),
    lambda: axis_ranks(layout(mesh((0, 4)), dp=4), mesh((1, 5)), "dp"),
    lambda: stage_layers(4, 2, 2),
    lambda: layer_stage(4, 2, 4),
    lambda: pieces(ParamSpec("w", (10, 2), split=Split(0, ((4, 2),))), 2, 0),
    lambda: local_slice(Piece(((0, 4),), 0), ((2, 5),), 0),
    lambda: local_shape(Parameter("w", ParamSpec("w", (4,)), None), ()),
    lambda: pieces_of_rank(Parameter("w", ParamSpec("w", (4,), "layer"), None), 2, layout(mesh((0, 1))), mesh((0, 1)), 0),
])
def test_broken_invariants_are_caught(call):
    with pytest.raises(InternalError):
        call()


@pytest.mark.parametrize("kind", ["gqa", "fused"])
def test_holdings_cover_every_parameter(kind):
    m, on = model(kind), mesh((2, 10), (20, 24))
    for at in layouts(on):
        for p in parameters(m):
            held = {r: pieces_of_rank(p, m.layers, at, on, r) for r in on.members()}
            count = np.zeros(p.spec.shape, int)
            for rank, found in held.items():
                mine = np.zeros(p.spec.shape, int)
                for piece in found:
                    mine[tuple(slice(*x) for x in piece.box)] += 1
                assert mine.max() <= 1, "the pieces of a rank overlap"
                assert mine.sum() == (np.prod(local_shape(p, found)) if found else 0)
                assert replicas(p, m.layers, at, on, rank) == (sum(o == found for o in held.values()) if found else 0)
                count += mine
            assert count.min() >= 1
            assert {r: s.pieces for s in holdings(p, m.layers, at, on) for r in s.ranks} == {
                r: found for r, found in held.items() if found}


def test_stages_that_hold():
    m, on = model("gqa"), mesh((0, 6))
    at = layout(on, pp=3, dp=2)
    by_name = {p.name: [r for r in range(6) if pieces_of_rank(p, 3, at, on, r)] for p in parameters(m)}
    assert by_name["embed.weight"] == [0, 1, 4, 5]
    assert by_name["layers.1.q.weight"] == [2, 3]
    assert by_name["norm.weight"] == [4, 5]
    assert len(by_name) == 3 + 3 * 5
    assert pieces_of_rank(next(parameters(m)), 3, at, on, 6) == ()


def test_fewer_heads_than_tp_are_replicated_by_neighbors():
    p = Parameter("k", ParamSpec("k", (8, 8), split=Split(0, ((2, 4),))), None)
    on = mesh((0, 8))
    at = layout(on, dp=2, tp=4)
    assert [pieces_of_rank(p, 1, at, on, r)[0].box[0] for r in range(4)] == [(0, 4), (0, 4), (4, 8), (4, 8)]
    assert replicas(p, 1, at, on, 0) == 4


def test_fused_parts_are_divided_each_on_its_own():
    spec = ParamSpec("qkv", (32, 8), split=Split(0, ((4, 4), (2, 4), (2, 4))))
    assert pieces(spec, 2, 1) == (
        Piece(((8, 16), (0, 8)), 0), Piece(((20, 24), (0, 8)), 8), Piece(((28, 32), (0, 8)), 12))
    assert pieces(spec, 1, 0) == (Piece(((0, 32), (0, 8)), 0),)
    assert local_slice(pieces(spec, 2, 1)[1], ((21, 23), (2, 4)), 0) == (slice(9, 11), slice(2, 4))


def test_uneven_vocabulary():
    spec = ParamSpec("embed", (13, 8), split=Split(0, ((13, 1),)))
    assert [pieces(spec, 4, t)[0].box[0] for t in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 13)]


def test_layer_specs_fall_back_to_the_models_layers():
    spec = ParamSpec("l.{}.w", (2,), "layer")
    m = model()
    assert [p.name for p in parameters(type(m)("m", "causal_lm", "", "bfloat16", (spec,), 2, ""))] == ["l.0.w", "l.1.w"]


def test_itemsize():
    m = model()
    assert itemsize(m) == 4
    with pytest.raises(KeyError):
        itemsize(type(m)("m", "causal_lm", "", "int8", (), 2, ""))


def test_zero_divides_rows_over_dp():
    on = mesh((0, 4))
    for zero in (1, 2, 3):
        at = Layout("b", on.id, dp=4, zero=zero)
        for p in parameters(model()):
            rows = -(-p.spec.shape[0] // 4)
            assert [pieces_of_rank(p, 3, at, on, r)[:1] and pieces_of_rank(p, 3, at, on, r)[0].box[0] for r in range(4)] == [
                (r * rows, min((r + 1) * rows, p.spec.shape[0])) if r * rows < p.spec.shape[0] else () for r in range(4)]


box = st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 3)).map(lambda x: (x[0], x[0] + x[1]))] * 3)


@given(box, box)
@settings(max_examples=200)
def test_intersect_and_subtract_against_numpy(a, b):
    def mask(*boxes):
        out = np.zeros((8, 8, 8), int)
        for x in boxes:
            out[tuple(slice(*y) for y in x)] += 1
        return out

    both, rest = intersect(a, b), subtract(a, b)
    assert (mask(*([both] if both else [])) == mask(a) * mask(b)).all()
    assert (mask(*rest) == mask(a) * (1 - mask(b))).all()
    assert volume(a) == mask(a).sum() == (volume(both) if both else 0) + sum(map(volume, rest))


def test_intersect_wants_equal_dimensions():
    with pytest.raises(ValueError):
        intersect(((0, 1),), ((0, 1), (0, 1)))
