"""Chunks of layers on each rank: who holds what, and moves between such layouts and others, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.plan.model import Layout, Mesh
from rldsl.reshard.alias import share_one_copy
from rldsl.reshard.box_classes import box_classes
from rldsl.sharding.boxes import chunks, holdings, parameters, pieces_of_rank, stages
from rldsl.sharding.layout import own_layers, stage_layers
from rldsl.sharding.pipeline_schedule import max_waiting_messages
from rldsl.verify.box_classes import class_faults
from tests.plan_algebra.models import layout, mesh, model
from tests.realloc.cases import Case
from tests.realloc.test_run import move_all
from tests.world import run_world


def interleaved(on: Mesh, vpp: int, **degrees: int) -> Layout:
    plain = layout(on, **degrees)
    return replace(plain, vpp=vpp, id=f"{plain.id}vpp{vpp}")


@pytest.mark.parametrize("pp, vpp, layers", product((2, 3, 4), (1, 2, 3), (4, 7, 12, 13)))
def test_chunks_are_laid_out_round_and_round(pp: int, vpp: int, layers: int) -> None:
    at = interleaved(mesh((0, pp)), vpp, pp=pp)
    every = [own_layers(layers, at, rank) for rank in range(pp)]
    assert sorted(x for own in every for x in own) == list(range(layers))
    for rank, own in enumerate(every):
        assert own == tuple(x for c in range(vpp) for x in stage_layers(layers, pp * vpp, c * pp + rank))


@pytest.mark.parametrize("kind", ["gqa", "fused"])
@pytest.mark.parametrize("pp, vpp", [(2, 2), (2, 3), (3, 2), (4, 2)])
def test_every_parameter_is_held_where_its_chunk_is(kind: str, pp: int, vpp: int) -> None:
    made, on = model(kind, layers=9), mesh((0, 2 * pp))
    at = interleaved(on, vpp, pp=pp, tp=2)
    for p in parameters(made):
        there = stages(p, 9, at)
        assert there == tuple(sorted({chunk % pp for chunk in chunks(p, 9, pp * vpp)}))
        holders = {rank for share in holdings(p, 9, at, on) for rank in share.ranks}
        assert holders == {rank for rank in on.members() if pieces_of_rank(p, 9, at, on, rank)}
        assert {rank // 2 for rank in holders} == set(there)
        count = np.zeros(p.spec.shape, int)
        for share in holdings(p, 9, at, on):
            for piece in share.pieces:
                count[tuple(slice(*x) for x in piece.box)] += 1
        assert (count > 0).all()
    ends = {"first": (0,), "last": (pp - 1,), "ends": (0, pp - 1), "all": tuple(range(pp))}
    assert all(stages(p, 9, at) == ends[p.spec.stage] for p in parameters(made) if p.layer is None)


@st.composite
def pairs(draw: st.DrawFn) -> Case:
    def one(start: int) -> tuple[Layout, Mesh]:
        pp, dp, tp = draw(st.sampled_from([(2, 1, 1), (2, 2, 1), (3, 1, 2), (4, 1, 1), (1, 4, 1), (2, 1, 2)]))
        on = mesh((start, start + pp * dp * tp))
        zero = draw(st.sampled_from([0, 1])) if dp > 1 else 0
        return replace(interleaved(on, draw(st.integers(1, 3)) if pp > 1 else 1, pp=pp, dp=dp, tp=tp), zero=zero), on

    made = model(draw(st.sampled_from(["gqa", "fused"])), layers=draw(st.integers(4, 13)))
    return Case(made, *one(0), *one(draw(st.sampled_from([0, 2, 6]))), draw(st.sampled_from([1, 2, 4, 8])))


@given(pairs())
@settings(max_examples=60, deadline=None)
def test_lines_between_them_are_right(case: Case) -> None:
    assert not list(class_faults(case.model, case.src, case.dst, box_classes(case.model, case.src, case.dst)))


def test_wrong_lines_are_found() -> None:
    """Those of layers that stand one after the other."""
    on, made = mesh((0, 2)), model(layers=4)
    src, dst = interleaved(on, 2, pp=2), layout(on, dp=2)
    assert not list(class_faults(made, src, dst, box_classes(made, src, dst)))
    assert list(class_faults(made, src, dst, box_classes(made, replace(src, vpp=1), dst)))
    assert list(class_faults(made, dst, src, box_classes(made, dst, replace(src, vpp=1))))


def test_layouts_that_differ_in_it_are_no_copies_of_each_other() -> None:
    on, made = mesh((0, 4)), model(layers=4)
    a, b = interleaved(on, 2, pp=2, dp=2), replace(interleaved(on, 2, pp=2, dp=1, cp=2), id="b")
    assert share_one_copy(made, a, on, b, on)
    assert not share_one_copy(made, a, on, replace(b, vpp=1), on)


FOUR, LOW = mesh((0, 4)), mesh((0, 2))
CASES = tuple(
    Case(model(kind, layers=5), a, am, b, bm, devices) for kind in ("gqa", "fused") for devices in (1, 4)
    for a, am, b, bm in (
        (interleaved(FOUR, 2, pp=2, dp=2), FOUR, layout(FOUR, dp=4), FOUR),
        (layout(FOUR, dp=4), FOUR, interleaved(FOUR, 2, pp=2, dp=2), FOUR),
        (interleaved(LOW, 2, pp=2), LOW, layout(FOUR, dp=4), FOUR),
        (interleaved(LOW, 2, pp=2), LOW, layout(LOW, pp=2), LOW),
        (interleaved(FOUR, 2, pp=2, tp=2), FOUR, layout(FOUR, tp=4), FOUR),
        (replace(interleaved(FOUR, 2, pp=2, dp=2), zero=1), FOUR, layout(FOUR, pp=2, tp=2), FOUR),
    ))


def test_moves_are_bit_for_bit() -> None:
    assert run_world(4, move_all, 4000, 0.0, CASES) == [[]] * 4


def test_with_one_chunk_no_more_than_two_messages_wait() -> None:
    """As the memory estimate counts them (`memory/call_memory.py`)."""
    assert all(most <= 2 for pp in range(2, 9) for count in range(1, 4 * pp + 1)
               for most in max_waiting_messages(pp, 1, count))
