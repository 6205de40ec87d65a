"""The drawing of a graph: nothing overlaps, every link leads down, and the same graph gives the same drawing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.pages.layered import GAP, Edge, crossings, draw, layers, ordered, parts
from rldsl.pages.spread import spread


@st.composite
def graphs(rng: st.DrawFn) -> tuple[dict[str, tuple[float, float]], list[Edge], frozenset[str]]:
    count = rng(st.integers(1, 14))
    names = [f"n{i}" for i in range(count)]
    sizes = {n: (rng(st.sampled_from([30.0, 90.0, 170.0])), rng(st.sampled_from([24.0, 60.0]))) for n in names}
    pairs = rng(st.lists(st.sampled_from(list(combinations(names, 2)) or [("", "")]), unique=True, max_size=24))
    edges = [Edge(a, b, rng(st.integers(1, 2))) for a, b in pairs if a]
    return sizes, edges, frozenset(rng(st.lists(st.sampled_from(names), max_size=4)))


@settings(max_examples=80, deadline=None)
@given(graphs())
def test_a_drawing(graph: tuple[dict[str, tuple[float, float]], list[Edge], frozenset[str]]) -> None:
    sizes, edges, late = graph
    found = draw(sizes, edges, late)
    assert found == draw(sizes, edges, late)
    for n, (x, y) in found.centers.items():
        w, h = sizes[n]
        assert 0 <= x - w / 2 and x + w / 2 <= found.width and 0 <= y - h / 2 and y + h / 2 <= found.height
    for a, b in combinations(sizes, 2):
        (ax, ay), (bx, by) = found.centers[a], found.centers[b]
        apart = abs(ax - bx) - (sizes[a][0] + sizes[b][0]) / 2, abs(ay - by) - (sizes[a][1] + sizes[b][1]) / 2
        assert max(apart) > -1e-6, (a, b)
    for edge, route in zip(edges, found.routes, strict=True):
        assert [y for _, y in route] == sorted(y for _, y in route)
        assert route[0][0] == found.centers[edge.source][0] and route[-1][0] == found.centers[edge.target][0]
        for (x0, y0), (x1, y1) in zip(route[1::2], route[2::2]):  # the straight parts pass no node
            assert x0 == x1
            for n, (x, y) in found.centers.items():
                if min(y1, y + sizes[n][1] / 2) - max(y0, y - sizes[n][1] / 2) > 1e-6:
                    assert abs(x - x0) >= sizes[n][0] / 2, (edge, n)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_spread_keeps_the_distances_and_cannot_be_bettered(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    numbers = st.floats(-100, 100)
    goals = data.draw(st.lists(numbers, min_size=count, max_size=count))
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=count, max_size=count))
    apart = data.draw(st.lists(st.floats(0, 30), min_size=count - 1, max_size=count - 1))
    found = spread(goals, weights, apart)

    def allowed(x: Sequence[float]) -> bool:
        return all(b - a >= gap - 1e-6 for a, b, gap in zip(x, x[1:], apart))

    def cost(x: Sequence[float]) -> float:
        return sum(w * (a - g) ** 2 for w, a, g in zip(weights, x, goals))

    assert allowed(found)
    for first in range(count):  # moving a run of neighbors to either side is worse, where it is allowed
        for last in range(first + 1, count + 1):
            for by in (-0.01, 0.01):
                other = [x + by if first <= i < last else x for i, x in enumerate(found)]
                assert not allowed(other) or cost(other) >= cost(found) - 1e-6


def test_layers_go_by_the_longest_way() -> None:
    edges = [Edge("a", "b"), Edge("b", "d", 2), Edge("a", "d"), Edge("c", "d")]
    assert layers("abcd", edges, frozenset()) == {"a": 0, "b": 1, "c": 0, "d": 3}
    assert layers("abcd", edges, frozenset("c")) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert layers("ab", [], frozenset("a")) == {"a": 0, "b": 0}


def test_parts_are_what_edges_connect() -> None:
    assert parts("abcde", [Edge("a", "c"), Edge("c", "e")]) == [frozenset("ace"), frozenset("b"), frozenset("d")]
    assert parts("", []) == []


def test_crossings_are_counted_and_removed() -> None:
    below = {"a": ["d"], "b": ["c"], "c": [], "d": []}
    assert crossings([["a", "b"], ["c", "d"]], below) == 1
    assert crossings(ordered([["a", "b"], ["c", "d"]], [("a", "d"), ("b", "c")]), below) == 0
    assert crossings([["a"], []], {"a": []}) == 0


def test_two_that_both_want_one_place_share_it() -> None:
    assert spread([0.0, 0.0], [1.0, 1.0], [10.0]) == [-5.0, 5.0]
    assert spread([0.0, 0.0], [3.0, 1.0], [GAP]) == pytest.approx([-GAP / 4, 3 * GAP / 4])
    assert spread([], [], []) == []


def test_nothing_is_a_drawing_too() -> None:
    assert draw({}, []).centers == {}
