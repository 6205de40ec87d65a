"""Which messages need no buffer: what shapes say, what tensors say."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings

from rldsl.plan.model import ParamSpec
from rldsl.reshard.in_place import (
    MIN_SEPARATE,
    buffer_elements,
    is_contiguous,
    pieces_by_parameter,
    split_message,
)
from rldsl.reshard.rounds import ROUNDS_IN_FLIGHT, Message, Round, rank_rounds
from rldsl.runtime.comm.reshard import _in_place_view, _message_parts
from rldsl.sharding.boxes import Parameter, Piece, cell_of, local_shape
from tests.realloc.cases import Case, cases, packed_elements


@given(cases())
@settings(max_examples=60, deadline=None)
def test_shapes_say_what_tensors_say(case: Case) -> None:
    for rank in case.ranks():
        for at, on in ((case.src, case.src_mesh), (case.dst, case.dst_mesh)):
            there = pieces_by_parameter(case.model, at, cell_of(at, on, rank))
            tensors = {name: torch.empty(local_shape(p, pieces)) for name, (p, pieces) in there.items() if pieces}
            for ops in rank_rounds(case.paths(), rank, 2):
                for part in _message_parts((*ops.sends, *ops.receives), there):
                    spot = part.local_boxes[0] if len(part.local_boxes) == 1 else None
                    lies = spot is not None and tensors[spot[0]][spot[1]].is_contiguous()
                    assert is_contiguous(part.message, there) == part.is_contiguous == lies
                    assert (_in_place_view(part, tensors, torch.float32) is not None) == lies
                    assert _in_place_view(part, tensors, torch.float64) is None
                    assert _in_place_view(part, None, torch.float32) is None


@pytest.mark.parametrize("sizes, parts", [([4], [4]), ([4, 4], [4, 4]), ([1, 5, 2], [5, 3]), ([2, 2, 2], [6]),
                                          ([MIN_SEPARATE, 1] * 3 + [9 * MIN_SEPARATE], [MIN_SEPARATE] * 3 + [9 * MIN_SEPARATE, 3]),
                                          ([MIN_SEPARATE] * 7, [MIN_SEPARATE] * 4 + [3 * MIN_SEPARATE])])
def test_a_large_box_goes_by_itself(sizes: list[int], parts: list[int]) -> None:
    message = Message(3, tuple((f"p{i}", ((0, n),)) for i, n in enumerate(sizes)))
    found = split_message(message)
    assert [m.size() for m in found] == parts and {m.peer for m in found} == {3}
    assert sorted(x for m in found for x in m.boxes) == sorted(message.boxes)


def test_what_does_not_lie_together_has_room() -> None:
    message = Message(1, (("p", ((0, 8), (0, 2))),))
    ops = Round((message,), (message,))
    whole = {cols: {"p": (Parameter("p", ParamSpec("p", (8, cols)), None), (Piece(((0, 8), (0, cols)), 0),))}
             for cols in (2, 4)}
    none = {"p": (whole[2]["p"][0], ())}
    for (sent, x), (came, y) in product(((0, whole[2]), (16, whole[4]), (16, none), (16, None)), repeat=2):
        assert packed_elements(ops, (x, y)) == (sent, came)


@given(cases())
@settings(max_examples=40, deadline=None)
def test_what_needs_a_buffer_are_the_parts_that_are_not_contiguous(case: Case) -> None:
    for rank in case.ranks():
        held = [pieces_by_parameter(case.model, at, cell_of(at, on, rank))
                for at, on in ((case.src, case.src_mesh), (case.dst, case.dst_mesh))]
        for ops in rank_rounds(case.paths(), rank, 2):
            sides = [sum(part.size() for message in side for part in split_message(message)
                         if not is_contiguous(part, there))
                     for side, there in zip((ops.sends, ops.receives), held, strict=True)]
            every = tuple(sum(m.size() for m in side) for side in (ops.sends, ops.receives))
            assert packed_elements(ops, (held[0], held[1])) == tuple(sides)
            assert packed_elements(ops, (None, None)) == every


@pytest.mark.parametrize("sizes, buffers", [([], [0, 0]), ([8], [8, 0]), ([1, 2, 3], [3, 2]), ([5, 0, 4, 6, 1], [5, 6])])
def test_rounds_under_way_share_buffers(sizes: list[int], buffers: list[int]) -> None:
    assert ROUNDS_IN_FLIGHT == 2 and buffer_elements(sizes) == buffers
