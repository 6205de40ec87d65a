"""Sets of ranks as ranges behave as sets of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rldsl.sharding.rank_sets import Ranks, group_equal_ranks, union
from rldsl.verify.tables import ranks_label

WORLD = 20
RANGES = st.lists(st.tuples(st.integers(-3, 24), st.integers(-3, 24)), max_size=5)


def plain(ranges: list[tuple[int, int]]) -> set[int]:
    return {r for a, b in ranges for r in range(max(a, 0), min(b, WORLD))}


@given(RANGES, RANGES)
def test_operators(x: list[tuple[int, int]], y: list[tuple[int, int]]) -> None:
    a, b, p, q = Ranks.of(x, WORLD), Ranks.of(y, WORLD), plain(x), plain(y)
    assert list(a) == sorted(p) and len(a) == len(p) and bool(a) == bool(p)
    assert (set(a | b), set(a & b), set(a - b), set(a ^ b)) == (p | q, p & q, p - q, p ^ q)
    assert (a <= b, a == b) == (p <= q, p == q) and all((r in a) == (r in p) for r in range(-2, 25))
    assert union([a, b]) == a | b and all(u < v for u, v in a.ranges)
    assert all(v < w for (_, v), (w, _) in zip(a.ranges, a.ranges[1:])), "no two ranges touch"


@given(st.dictionaries(st.sampled_from("abcd"), RANGES))
def test_alike(places: dict[str, list[tuple[int, int]]]) -> None:
    found = group_equal_ranks({k: Ranks.of(v, WORLD) for k, v in places.items()}, WORLD)
    assert sorted(r for ranks in found.values() for r in ranks) == list(range(WORLD))
    for mine, ranks in found.items():
        assert all({k for k, v in places.items() if r in plain(v)} == mine for r in ranks)


@pytest.mark.parametrize("ranks, text", [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((5, 2, 1, 0), "0-2,5")])
def test_what_people_read(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_label(ranks) == ranks_label(Ranks.of([(r, r + 1) for r in ranks], 9)) == text


def test_a_range_of_a_billion_ranks_costs_nothing() -> None:
    many = Ranks.of([(0, 10**12)], 10**9)
    assert len(many) == 10**9 and len(many - Ranks.one(5)) == 10**9 - 1
