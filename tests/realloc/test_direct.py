"""Which messages need no buffer: what shapes say, what tensors say."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings

from rldsl.reshard.in_place import (
    MIN_SEPARATE,
    buffer_elements,
    is_contiguous,
    packed_elements,
    pieces_by_parameter,
    split_message,
)
from rldsl.reshard.rounds import ROUNDS_IN_FLIGHT, Message, Round, rank_rounds
from rldsl.runtime.comm.reshard import _in_place_view, _message_parts
from rldsl.sharding.boxes import cell_of, local_shape
from tests.realloc.cases import Case, cases


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
    message = Message(1, (("p", ((0, 8),)),))
    ops = Round((message,), (message,))
    for sent, came in product((True, False), (True, False)):
        assert packed_elements(ops, (lambda m: sent, lambda m: came)) == (8 * (not sent), 8 * (not came))


@pytest.mark.parametrize("sizes, buffers", [([], [0, 0]), ([8], [8, 0]), ([1, 2, 3], [3, 2]), ([5, 0, 4, 6, 1], [5, 6])])
def test_rounds_under_way_share_buffers(sizes: list[int], buffers: list[int]) -> None:
    assert ROUNDS_IN_FLIGHT == 2 and buffer_elements(sizes) == buffers
