"""Which messages need no buffer: what shapes say, what tensors say."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings

from rldsl.reshard.in_place import ALONE, divided, held_at, packed, room, together
from rldsl.reshard.rounds import AHEAD, Message, Round, rank_ops
from rldsl.runtime.comm.reshard import _lying, _parts
from rldsl.sharding.boxes import cell, local_shape
from tests.realloc.cases import Case, cases


@given(cases())
@settings(max_examples=60, deadline=None)
def test_shapes_say_what_tensors_say(case: Case) -> None:
    for rank in case.ranks():
        for at, on in ((case.src, case.src_mesh), (case.dst, case.dst_mesh)):
            there = held_at(case.model, at, cell(at, on, rank))
            tensors = {name: torch.empty(local_shape(p, pieces)) for name, (p, pieces) in there.items() if pieces}
            for ops in rank_ops(case.paths(), rank, 2):
                for part in _parts((*ops.sends, *ops.receives), there):
                    spot = part.spots[0] if len(part.spots) == 1 else None
                    lies = spot is not None and tensors[spot[0]][spot[1]].is_contiguous()
                    assert together(part.message, there) == part.stretch == lies
                    assert (_lying(part, tensors, torch.float32) is not None) == lies
                    assert _lying(part, tensors, torch.float64) is None and _lying(part, None, torch.float32) is None


@pytest.mark.parametrize("sizes, parts", [([4], [4]), ([4, 4], [4, 4]), ([1, 5, 2], [5, 3]), ([2, 2, 2], [6]),
                                          ([ALONE, 1] * 3 + [9 * ALONE], [ALONE] * 3 + [9 * ALONE, 3]),
                                          ([ALONE] * 7, [ALONE] * 4 + [3 * ALONE])])
def test_a_large_box_goes_by_itself(sizes: list[int], parts: list[int]) -> None:
    message = Message(3, tuple((f"p{i}", ((0, n),)) for i, n in enumerate(sizes)))
    found = divided(message)
    assert [m.size() for m in found] == parts and {m.peer for m in found} == {3}
    assert sorted(x for m in found for x in m.boxes) == sorted(message.boxes)


def test_what_does_not_lie_together_has_room() -> None:
    message = Message(1, (("p", ((0, 8),)),))
    ops = Round((message,), (message,))
    for sent, came in product((True, False), (True, False)):
        assert packed(ops, (lambda m: sent, lambda m: came)) == (8 * (not sent), 8 * (not came))


@pytest.mark.parametrize("sizes, buffers", [([], [0, 0]), ([8], [8, 0]), ([1, 2, 3], [3, 2]), ([5, 0, 4, 6, 1], [5, 6])])
def test_rounds_under_way_share_buffers(sizes: list[int], buffers: list[int]) -> None:
    assert AHEAD == 2 and room(sizes) == buffers
