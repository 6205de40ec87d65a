"""Rounds carried out on arrays: every destination has the right numbers, nothing came that was there or came before."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import numpy as np
import pytest
from hypothesis import given, settings

from rldsl.plan.model import Layout, Mesh, Model
from rldsl.reshard.rounds import ROUNDS_IN_FLIGHT, kept_boxes, rank_rounds
from rldsl.reshard.summary import summary
from rldsl.sharding.boxes import Box, contains, intersect, local_shape, local_slice, parameters, pieces_of_rank, volume
from tests.plan_algebra.models import layout, mesh, model
from tests.realloc.cases import Case, cases, small

Arrays = dict[tuple[int, str], np.ndarray]


def numbers(made: Model) -> dict[str, np.ndarray]:
    return {p.name: 1.0 + i + np.arange(np.prod(p.spec.shape)).reshape(p.spec.shape) / 1000
            for i, p in enumerate(parameters(made))}


def shards(made: Model, at: Layout, on: Mesh, full: dict[str, np.ndarray]) -> Arrays:
    """What each rank holds, by plain concatenation."""
    out = {}
    for p in parameters(made):
        for rank in on.members():
            if found := pieces_of_rank(p, made.layers, at, on, rank):
                dim = p.spec.split.dim if p.spec.split else 0
                out[rank, p.name] = np.concatenate([full[p.name][tuple(slice(*x) for x in y.box)] for y in found], dim)
    return out


class Ranks:
    """The local arrays of all ranks under both layouts."""

    def __init__(self, case: Case):
        self.case, made = case, case.model
        self.full, self.specs = numbers(made), {p.name: p for p in parameters(made)}
        self.source = shards(made, case.src, case.src_mesh, self.full)
        self.right = shards(made, case.dst, case.dst_mesh, self.full)
        self.target: Arrays = {k: np.full_like(v, np.nan) for k, v in self.right.items()}
        self.received: Counter[int] = Counter()

    def view(self, arrays: Arrays, at: Layout, on: Mesh, rank: int, name: str, box: Box) -> np.ndarray | None:
        p = self.specs[name]
        for piece in pieces_of_rank(p, self.case.model.layers, at, on, rank):
            if contains(piece.box, box):
                return arrays[rank, name][local_slice(piece, box, p.spec.split.dim if p.spec.split else 0)]
        return None

    def read(self, rank: int, name: str, box: Box, came: dict[str, list[tuple[Box, np.ndarray]]]) -> np.ndarray:
        mine = self.view(self.source, self.case.src, self.case.src_mesh, rank, name, box)
        if mine is not None:
            return mine
        out = np.full([b - a for a, b in box], np.nan)
        for there, value in came.get(name, ()):
            if both := intersect(there, box):
                out[tuple(slice(a - x, b - x) for (a, b), (x, _) in zip(both, box))] = value[
                    tuple(slice(a - x, b - x) for (a, b), (x, _) in zip(both, there))]
        assert not np.isnan(out).any(), f"rank {rank} passes on {name} {box}, of which not all came two rounds before"
        return out

    def write(self, rank: int, name: str, box: Box, value: np.ndarray) -> None:
        into = self.view(self.target, self.case.dst, self.case.dst_mesh, rank, name, box)
        assert into is not None, f"rank {rank} does not want {name} {box}"
        assert np.isnan(into).all(), f"rank {rank} gets {name} {box} twice, or had it"
        into[...] = value


def carry_out(case: Case, buckets: int) -> Ranks:
    ranks, p = Ranks(case), case.paths()
    for rank in case.dst_mesh.members():
        for name, box in kept_boxes(p, rank):
            value = ranks.view(ranks.source, case.src, case.src_mesh, rank, name, box)
            assert value is not None
            ranks.write(rank, name, box, value)
    rounds = {rank: rank_rounds(p, rank, buckets) for rank in case.ranks()}
    last: deque[dict[int, dict[str, list[tuple[Box, np.ndarray]]]]] = deque()
    for number in range(len(rounds[case.ranks()[0]])):
        before = last.popleft() if len(last) == ROUNDS_IN_FLIGHT else {}
        flying = {(rank, m.peer): [ranks.read(rank, *x, before.get(rank, {})) for x in m.boxes]
                  for rank in rounds for m in rounds[rank][number].sends}
        came: dict[int, dict[str, list[tuple[Box, np.ndarray]]]] = defaultdict(lambda: defaultdict(list))
        last.append(came)
        for rank in rounds:
            for m in rounds[rank][number].receives:
                for (name, box), value in zip(m.boxes, flying[m.peer, rank], strict=True):
                    ranks.write(rank, name, box, value)
                    came[rank][name].append((box, value))
                    ranks.received[rank] += volume(box)
    return ranks


def check(case: Case, buckets: int) -> None:
    ranks = carry_out(case, buckets)
    for key, right in ranks.right.items():
        np.testing.assert_array_equal(ranks.target[key], right, err_msg=f"{case}, {key}")
    total = summary(case.paths(), case.model)
    assert sum(ranks.received.values()) * 4 == total.bytes == 4 * lacking(case)
    assert total.network_bytes == 4 * crossing(case), case


def owned(case: Case) -> dict[str, np.ndarray]:
    """For each element of a parameter, who has it and who wants it, as bit masks: an account of its own."""
    out = {}
    for p in parameters(case.model):
        bits = np.zeros((2, *p.spec.shape), np.int64)
        for side, at, on in ((0, case.src, case.src_mesh), (1, case.dst, case.dst_mesh)):
            for rank in on.members():
                for piece in pieces_of_rank(p, case.model.layers, at, on, rank):
                    bits[(side, *(slice(*x) for x in piece.box))] |= 1 << rank
        out[p.name] = bits
    return out


def lacking(case: Case) -> int:
    return sum(int((want >> r & ~have >> r & 1).sum()) for have, want in owned(case).values() for r in range(32))


def crossing(case: Case) -> int:
    """Each element once for each node where somebody wants it and nobody has it."""
    total = 0
    for have, want in owned(case).values():
        for node in range(-(-32 // case.devices)):
            mask = sum(1 << r for r in range(node * case.devices, (node + 1) * case.devices))
            total += int(((want & mask != 0) & (have & mask == 0)).sum())
    return total


@pytest.mark.thorough
@pytest.mark.parametrize("kind, first", [("gqa", 0), ("fused", 1)])
def test_all_small_layouts(kind: str, first: int) -> None:
    """Every pair of layouts on nodes of 2, 4 and 16 devices; the two models in turn."""
    every = [case for number, case in enumerate(small(kind)) if (number % 3 + number // 3) % 2 == first]
    assert len(every) > 200
    for number, case in enumerate(every):
        check(case, 1 + number % 3)


@given(cases())
@settings(max_examples=40, deadline=None)
def test_any_layouts(case: Case) -> None:
    check(case, 2)


@pytest.mark.parametrize("replicas", [2, 3, 7, 12])
def test_trees(replicas: int) -> None:
    am, bm = mesh((0, 2)), mesh((2, 2 + 2 * replicas))
    for tp in (1, 2):
        check(Case(model(), layout(am, tp=2), am, layout(bm, dp=2 * replicas // tp, tp=tp), bm, 2), 3)


def test_a_local_shape_is_what_the_pieces_make_up() -> None:
    case = small("fused")[0]
    for p in parameters(case.model):
        for rank in case.dst_mesh.members():
            found = pieces_of_rank(p, case.model.layers, case.dst, case.dst_mesh, rank)
            assert not found or local_shape(p, found) == Ranks(case).right[rank, p.name].shape
