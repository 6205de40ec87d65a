"""Which messages need no buffer: what shapes say, what tensors say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from rldsl.plan.boxes import cell, local_shape
from rldsl.plan.realloc.direct import divided, held_at, room, together
from rldsl.plan.realloc.rounds import AHEAD, Message, Round, rank_ops
from rldsl.runtime.realloc import Place, _in_place
from tests.realloc.cases import Case, cases


@given(cases())
@settings(max_examples=60, deadline=None)
def test_shapes_say_what_tensors_say(case: Case) -> None:
    for rank in case.ranks():
        for at, on in ((case.src, case.src_mesh), (case.dst, case.dst_mesh)):
            there = held_at(case.model, at, cell(at, on, rank))
            place = Place(there, {name: torch.empty(local_shape(p, pieces)) for name, (p, pieces) in there.items() if pieces})
            for ops in rank_ops(case.paths(), rank, 2):
                for message in (*ops.sends, *ops.receives):
                    for part in divided(message):
                        assert together(part, there) == (_in_place(part, place, torch.float32) is not None)


@pytest.mark.parametrize("sizes, parts", [([4], [4]), ([4, 4], [4, 4]), ([1, 5, 2], [5, 3]), ([2, 2, 2], [6])])
def test_a_large_box_goes_by_itself(sizes: list[int], parts: list[int]) -> None:
    message = Message(3, tuple((f"p{i}", ((0, n),)) for i, n in enumerate(sizes)))
    found = divided(message)
    assert [m.size() for m in found] == parts and {m.peer for m in found} == {3}
    assert sorted(x for m in found for x in m.boxes) == sorted(message.boxes)


def test_what_is_sent_late_has_room() -> None:
    message = Message(1, (("p", ((0, 8),)),))
    rounds = [Round((message,), (message,))] * (AHEAD + 1)
    assert room(enumerate(rounds[:1]), 1, lambda m: True, lambda m: True) == ([8, 0], [0, 0])
    assert room(enumerate(rounds), len(rounds), lambda m: True, lambda m: True) == ([8, 8], [0, 0])
    assert room(enumerate(rounds), len(rounds), lambda m: False, lambda m: False) == ([8, 8], [8, 8])
    assert room([], 0, lambda m: False, lambda m: False) == ([0, 0], [0, 0])
