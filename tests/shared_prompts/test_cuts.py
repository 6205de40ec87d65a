"""Micro-batches that keep rows of one prompt together."""

from __future__ import annotations

import random

import pytest

from rldsl.sharding.micro_batches import micro_batches, num_micro_batches
from rldsl.sharding.siblings import Siblings


def heaviest(cut, siblings, lengths):
    return max(siblings.computed(part, lengths) for part in cut)


def drawn(seed: int) -> tuple[list[int], list[int], Siblings]:
    """Present rows, tokens of all rows, and which are of one prompt: some rows are missing, and prompts are long."""
    r = random.Random(seed)
    run, groups = r.choice([2, 3, 8]), r.randrange(1, 9)
    prompts = [p for _ in range(groups) for p in [r.randrange(1, 200)] * run]
    lengths = [p + r.randrange(0, 100) for p in prompts]
    rows = sorted(r.sample(range(run * groups), r.randrange(1, run * groups + 1)))
    return rows, lengths, Siblings(run, prompts)


@pytest.mark.parametrize("seed", range(60))
def test_every_bound_holds_and_no_cut_is_heavier_than_without(seed):
    rows, lengths, siblings = drawn(seed)
    r = random.Random(seed)
    mbs, at_least, mbt = r.choice([0, 1, 2, 5, 8]), r.choice([1, 2, 4]), r.choice([0, 0, 300, 700])
    plain = micro_batches(rows, lengths, mbs, at_least, mbt)
    cut = micro_batches(rows, lengths, mbs, at_least, mbt, siblings)
    assert sorted(x for part in cut for x in part) == rows and all(part == tuple(sorted(part)) for part in cut)
    assert list(cut) == sorted(cut)
    assert len(cut) == len(plain) == num_micro_batches(rows, lengths, mbs, at_least, mbt)
    assert all(len(part) <= (mbs or len(rows)) for part in cut)
    assert not mbt or all(len(part) == 1 or sum(lengths[x] for x in part) <= mbt for part in cut)
    assert heaviest(cut, siblings, lengths) <= heaviest(plain, siblings, lengths)
    assert cut == micro_batches(rows[::-1], lengths, mbs, at_least, mbt, siblings)


def test_prompts_stay_whole_where_micro_batches_have_room_for_them():
    lengths = [250 + i * 7 % 11 for i in range(32)]
    cut = micro_batches(range(32), lengths, 8, 1, 0, Siblings(8, [200] * 32))
    assert cut == tuple(tuple(range(8 * i, 8 * i + 8)) for i in range(4))
    assert micro_batches(range(32), lengths, 8, 1, 0) != cut, "without, they are mixed"


def test_a_prompt_is_counted_once_for_neighbors_alone():
    siblings = Siblings(2, [10, 10, 20, 20, 5, 5])
    assert siblings.computed((0, 1, 2, 3), [13, 14, 25, 22, 6, 7]) == 10 + 3 + 4 + 20 + 5 + 2
    assert siblings.computed((1, 2, 5), [13, 14, 25, 22, 6, 7]) == 14 + 25 + 7
    assert siblings.computed((), []) == 0


def test_short_prompts_change_nothing():
    """What balance costs is more than what they save."""
    lengths = [1 + (97 * i) % 400 for i in range(24)]
    assert micro_batches(range(24), lengths, 8, 1, 0, Siblings(4, [1] * 24)) == micro_batches(range(24), lengths, 8, 1)


def test_one_micro_batch_is_all_rows():
    assert micro_batches((0, 1, 3), [5, 5, 5, 5], 0, 1, 0, Siblings(2, [3] * 4)) == ((0, 1, 3),)
    assert micro_batches((), [], 2, 1, 0, Siblings(2, [])) == ()
