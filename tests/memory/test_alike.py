"""Ranks that are alike, against every rank by itself."""

from __future__ import annotations

import random

import pytest

from rldsl.memory.holder_classes import classes
from rldsl.plan.model import Header, Layout, Mesh, Plan, Ranges
from rldsl.sharding.boxes import cell_of
from rldsl.sharding.rank_classes import ranks_by_membership
from tests.effort import lines


def plan(world: int, *meshes: tuple[Ranges, Layout]) -> Plan:
    return Plan(Header(1, "c", "p", "f", world, 8, 1, 0), tuple(Mesh(x.mesh, ranks) for ranks, x in meshes),
                tuple(x for _, x in meshes), (), (), (), (), (), (), (), (), (), (), ())


def shuffled(n: int, block: int, seed: int) -> Ranges:
    starts = [*range(0, n, block)]
    random.Random(seed).shuffle(starts)
    return tuple((a, min(a + block, n)) for a in starts)


@pytest.mark.parametrize("seed", range(12))
def test_ranks_stand_where_their_class_says(seed: int) -> None:
    """Meshes in any order, of blocks whose ends no degree respects."""
    draw = random.Random(seed)
    given = [(shuffled(24, draw.choice((1, 2, 3, 5, 7)), seed + i), Layout(f"L{i}", f"m{i}", dp=24 // (tp * pp), tp=tp, pp=pp))
             for i, (tp, pp) in enumerate(draw.choice(((1, 1), (2, 2), (4, 3), (3, 1), (6, 2))) for _ in range(3))]
    p = plan(24, *given)
    seen: list[int] = []
    for c in classes(p):
        every = [r for a, b in c.ranks for r in range(a, b)]
        stand = [{x.id: cell_of(x, Mesh(x.mesh, ranks), r) for ranks, x in given} for r in every]
        assert all(s in c.cells for s in stand) and all(s in stand for s in c.cells)
        seen += every
    assert sorted(seen) == list(range(24))


def test_a_place_of_no_rank_changes_nothing() -> None:
    assert ranks_by_membership({"a": ((0, 2),), "b": ()}, 4) == {frozenset("a"): ((0, 2),), frozenset(): ((2, 4),)}
    assert ranks_by_membership({}, 3) == {frozenset(): ((0, 3),)}


def test_cost_grows_as_the_ranges() -> None:
    """Four times as many ranges, each a rank in another order: nowhere near sixteen times the work."""
    def cost(n: int) -> int:
        p = plan(n, (tuple((i ^ 1, (i ^ 1) + 1) for i in range(n)), Layout("L", "m", dp=n)))
        return lines(lambda: classes(p))

    assert cost(8192) < 5 * cost(2048)
