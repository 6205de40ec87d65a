"""Items onto shards: everything once, never worse than the longest first, near the bound, the same every time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.diag import InternalError
from rldsl.sharding.balance import LINEAR, _longest_first, balance_items, sequence_cost
from tests.effort import lines


def makespan(weights, parts):
    return max(sum(weights[i] for i in part) for part in parts)


def bound(weights, shards):
    return max(max(weights), -(-sum(weights) // shards))


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 12), st.integers(0, 20))
@settings(deadline=None)
def test_every_item_once(weights, shards, more):
    most = -(-len(weights) // shards) + more
    parts = balance_items(weights, shards, most)
    assert len(parts) == shards and sorted(i for part in parts for i in part) == list(range(len(weights)))
    assert all(len(part) <= most and list(part) == sorted(part) for part in parts)
    assert parts == balance_items(list(weights), shards, most)
    if weights:
        first = max(sum(w for w, _ in items) for items in _longest_first(weights, shards, most))
        assert makespan(weights, parts) <= first
        if more >= len(weights):
            assert 3 * makespan(weights, parts) <= 4 * bound(weights, shards) + 3 * max(weights)


@pytest.mark.parametrize(("n", "shards"), [(4096, 512), (1024, 128), (256, 32), (512, 8)])
@pytest.mark.parametrize("seed", range(4))
def test_near_the_bound(n, shards, seed):
    rng = random.Random(seed)
    weights = [sequence_cost(min(2800, int(rng.lognormvariate(6.5, 0.8)) + 1)) for _ in range(n)]
    parts = balance_items(weights, shards, n)
    assert lines(lambda: balance_items(weights, shards, n)) < 100 * n
    assert makespan(weights, parts) <= 1.01 * bound(weights, shards)


def test_exchanges_help():
    weights = [5, 5, 4, 4, 3, 3, 3]  # the longest first: 10 and 8 of 3 shards, or worse
    assert makespan(weights, balance_items(weights, 3, 7)) <= 10
    weights = [70, 60, 50, 40, 30, 20, 10, 8, 5, 3]
    assert makespan(weights, balance_items(weights, 2, 5)) == 148


def test_equal_weights_are_left_as_they_fell():
    assert balance_items([7] * 6, 3, 6) == ((0, 3), (1, 4), (2, 5))
    assert balance_items([], 3, 0) == ((), (), ())


def test_large_shards_do_not_take_long():
    rng = random.Random(1)
    weights = [rng.randrange(1, 10**9) for _ in range(20000)]
    assert lines(lambda: balance_items(weights, 2, 10000)) < 20 * len(weights)


def test_what_a_sequence_costs():
    assert sequence_cost(0) == 0 and sequence_cost(2) == 2 * LINEAR + 4 and sequence_cost(2000) > 2 * sequence_cost(1000)


def test_too_many_items():
    with pytest.raises(InternalError, match="5 items do not fit into 2 bins of 2"):
        balance_items([1] * 5, 2, 2)
