"""Work shared out evenly."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.diag import InternalError
from rldsl.reshard.load_balance import Share, balance, cut_at, water_fill


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.integers(0, 300))
def test_fill_levels_the_lowest(loads, amount):
    added = water_fill(loads, amount)
    after = [x + y for x, y in zip(loads, added)]
    assert sum(added) == amount and min(added) >= 0
    receiving = [x for x, y in zip(after, added) if y]
    assert not receiving or max(receiving) - min(after) <= 1


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(1, 10**6)), min_size=1, max_size=6),
       st.dictionaries(st.integers(0, 5), st.integers(0, 10**6)))
@settings(max_examples=60, deadline=None)
def test_balance_reaches_the_optimum(given_sizes, loads):
    """The optimum by its dual: the most that any set of takers must take alone, evenly, with what it has."""
    sizes = Counter()
    for who, n in given_sizes:
        sizes[tuple(sorted(who))] += n
    total = Counter(loads)
    for who, amounts in balance(sizes, loads).items():
        assert sum(amounts) == sizes[who] and min(amounts) >= 0
        total.update(dict(zip(who, amounts)))
    best = max(
        (sum(n for who, n in sizes.items() if all(bits >> r & 1 for r in who))
         + sum(loads.get(r, 0) for r in range(6) if bits >> r & 1)) / bits.bit_count() for bits in range(1, 64))
    taking = {r for who in sizes for r in who}
    assert max(total[r] for r in taking) <= 1.01 * max(best, *(loads.get(r, 0) for r in taking)) + 6


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_cut_covers_the_line_in_order(amounts, weights):
    total = sum(amounts)
    lengths, rest = [], total
    for w in weights[:-1]:
        lengths.append(min(w, rest))
        rest -= lengths[-1]
    lengths.append(rest)
    found = list(cut_at(enumerate(lengths), amounts))
    taken, at = Counter(), 0
    for key, (who, start, stop) in found:
        assert sum(lengths[:key]) + start == at and start < stop <= lengths[key]
        taken[who] += stop - start
        at += stop - start
    assert at == total and all(taken[i] == n for i, n in enumerate(amounts))
    assert [s.who for _, s in found] == sorted(s.who for _, s in found)


def test_cut_of_nothing():
    assert list(cut_at([], [])) == [] and list(cut_at([("a", 0)], [0, 0])) == []
    assert list(cut_at([("a", 2)], [0, 2, 0])) == [("a", Share(1, 0, 2))]


def test_cut_wants_amounts_that_reach_the_end():
    with pytest.raises(IndexError):
        list(cut_at([("a", 3)], [1, 1]))


def test_nobody_to_take_it():
    with pytest.raises(InternalError, match="no receiver for 3"):
        balance({(): 3}, {})
