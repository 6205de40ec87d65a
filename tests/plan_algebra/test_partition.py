"""Divisions of rows: every row once, balanced, the same for every rank, and independent of degrees."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.diag import InternalError
from rldsl.plan.model import Spread
from rldsl.sharding.micro_batches import micro_batches
from rldsl.sharding.partition import (
    RowMove,
    minibatch_positions,
    mix,
    partition,
    permutation,
    row_moves,
    rows_by_dp,
    minibatch_rows_by_dp,
)
from tests.frames import frame as made

weights = st.lists(st.integers(0, 1000), max_size=40)


def frame(id, count, per_prompt=1, rows="", prompts="prompt"):
    return made(id, rows or id, prompts, count, per_prompt)


PROMPT, GEN = frame("prompt", 6), frame("gen", 24, 4)
LENGTHS = {"prompt": [5, 9, 2, 7, 7, 1], "gen": [10 + (7 * r) % 13 for r in range(24)]}


@given(weights, st.integers(1, 9), st.sampled_from(["count", "tokens"]))
def test_partition_covers_every_item_once(items, shards, balance_by):
    parts = partition(items, shards, balance_by)
    assert len(parts) == shards
    assert sorted(i for p in parts for i in p) == list(range(len(items)))
    assert all(list(p) == sorted(p) for p in parts)
    assert parts == partition(tuple(items), shards, balance_by)
    if len(items) >= shards:
        assert all(parts) or balance_by == "tokens"


@given(st.integers(0, 50), st.integers(1, 9))
def test_count_gives_contiguous_even_runs(n, shards):
    parts = partition([3] * n, shards, "count")
    assert [i for p in parts for i in p] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_tokens_stay_within_four_thirds_of_the_best(items, shards):
    best = min(max(sum(w for w, s in zip(items, to) if s == shard) for shard in range(shards))
               for to in product(range(shards), repeat=len(items)))
    heaviest = max(sum(items[i] for i in p) for p in partition(items, shards, "tokens"))
    assert heaviest <= (4 / 3 - 1 / (3 * shards)) * best + 1e-9


def test_ties_spread_by_number():
    assert partition([0] * 5, 3, "tokens") == ((0, 3), (1, 4), (2,))
    assert partition([7, 7, 7, 7], 2, "tokens") == ((0, 2), (1, 3))
    assert partition([4], 3, "tokens") == ((0,), (), ())


def test_a_partition_needs_a_shard():
    with pytest.raises(InternalError):
        partition([1, 2], 0, "count")


@given(st.integers(0, 60), st.lists(st.integers(-(2**70), 2**70), max_size=4))
def test_permutation_is_one_and_depends_on_keys(n, keys):
    order = permutation(n, *keys)
    assert sorted(order) == list(range(n)) and order == permutation(n, *keys)
    if n > 20:
        assert order != permutation(n, *keys, 1) != permutation(n, *keys, 2)


def test_permutation_and_hash_never_change():
    """Pinned: a resumed run must find the same order on any machine and version."""
    assert permutation(10, 1, 2, 3) == (5, 1, 9, 4, 8, 3, 6, 2, 0, 7)
    assert mix(1) != mix(0, 1) != mix(1, 0)


def test_permutation_is_uniform_enough():
    hits = [0] * 5
    for seed in range(2000):
        hits[permutation(5, seed, 0).index(0)] += 1
    assert all(320 < h < 480 for h in hits)


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 9), st.integers(0, 9))
def test_minibatches_take_every_row_once_an_epoch(count, minibatches, epochs, shuffle, seed, step):
    schedule = minibatch_positions(count, minibatches, epochs, shuffle, seed, step)
    assert len(schedule) == epochs
    for epoch in schedule:
        sizes = [len(m) for m in epoch]
        assert len(epoch) == minibatches and max(sizes) - min(sizes) <= 1
        assert sorted(r for m in epoch for r in m) == list(range(count))
        assert all(list(m) == sorted(m) for m in epoch)
        assert shuffle or [r for m in epoch for r in m] == list(range(count))


def test_shuffled_minibatches_differ_by_seed_step_call_and_epoch():
    def run(seed, step, call=0):
        return minibatch_positions(40, 4, 2, True, seed, step, call)

    assert run(1, 1)[0] != run(1, 1)[1]
    assert run(1, 1) != run(2, 1) != run(2, 2)
    assert len({*run(1, 1), *run(1, 1, 1), *run(1, 1, 2)}) == 6


def test_the_call_matters_only_with_shuffle():
    assert minibatch_positions(40, 4, 2, False, 1, 1) == minibatch_positions(40, 4, 2, False, 1, 1, 3)


def test_a_spread_divides_by_its_call():
    spread = Spread("s", "m", "L", ("gen",), "row", "tokens", 3, 1, True)
    first, other, again = (minibatch_rows_by_dp(replace(spread, call=call), 2, (PROMPT, GEN), LENGTHS, 0, 0)
                           for call in (0, 1, 0))
    assert first == again != other


# ---------------------------------------------------------------------------------------------------- spreads


def test_prompt_unit_keeps_a_prompts_rows_together_in_every_frame():
    spread = Spread("s", "m", "L", ("prompt",), "prompt", "count")
    shards = rows_by_dp(spread, 4, (PROMPT, GEN), {}, 0, 0)
    assert [s["prompt"] for s in shards] == [(0,), (1, 2), (3,), (4, 5)]
    for s in shards:
        assert s["gen"] == tuple(4 * p + k for p in s["prompt"] for k in range(4))


def test_prompt_unit_weighs_all_frames_of_the_spread():
    heavy = {"prompt": [1, 1, 1, 1, 1, 1], "gen": [100] * 4 + [1] * 20}
    spread = Spread("s", "m", "L", ("prompt", "gen"), "prompt", "tokens")
    alone = rows_by_dp(spread, 2, (PROMPT, GEN), heavy, 0, 0)
    assert [s["prompt"] for s in alone] == [(0,), (1, 2, 3, 4, 5)]


def test_row_unit_divides_rows_and_other_frames_follow_their_prompts():
    spread = Spread("s", "m", "L", ("gen",), "row", "tokens")
    shards = rows_by_dp(spread, 3, (GEN, PROMPT), LENGTHS, 0, 0)
    assert sorted(r for s in shards for r in s["gen"]) == list(range(24))
    for s in shards:
        assert s["prompt"] == tuple(sorted({r // 4 for r in s["gen"]}))
    loads = [sum(LENGTHS["gen"][r] for r in s["gen"]) for s in shards]
    assert max(loads) - min(loads) <= max(LENGTHS["gen"])


def test_both_sides_of_a_pair_share_rows():
    pair = [frame(f"pair.{x}", 5, rows="pair", prompts="pair.p") for x in ("chosen", "rejected")]
    lengths = {"pair.chosen": [9, 1, 1, 1, 1], "pair.rejected": [9, 2, 2, 2, 2]}
    spread = Spread("s", "m", "L", ("pair.chosen", "pair.rejected"), "row", "tokens")
    shards = rows_by_dp(spread, 2, pair, lengths, 0, 0)
    assert [s["pair.chosen"] for s in shards] == [(0,), (1, 2, 3, 4)] == [s["pair.rejected"] for s in shards]
    assert minibatch_rows_by_dp(spread, 2, pair, lengths, 0, 0) == ((((0,), (1, 2, 3, 4)),),)


def test_unit_all_is_one_shard_with_everything():
    assert rows_by_dp(Spread("s", "m", granularity="all"), 1, (PROMPT, GEN), {}, 0, 0) == (
        {"prompt": tuple(range(6)), "gen": tuple(range(24))},)


@given(st.lists(st.integers(0, 50), min_size=8, max_size=8), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3),
       st.booleans(), st.integers(0, 5))
def test_training_shards_hold_the_union_of_their_schedule(lengths, dp, minibatches, epochs, shuffle, step):
    f = frame("gen", 8, 2)
    spread = Spread("s", "m", "L", ("gen",), "row", "tokens", minibatches, epochs, shuffle)
    args = (dp, (f,), {"gen": lengths}, 7, step)
    schedule, shards = minibatch_rows_by_dp(spread, *args), rows_by_dp(spread, *args)
    assert (len(schedule), len(schedule[0]), len(schedule[0][0])) == (epochs, minibatches, dp)
    for epoch, chosen in zip(schedule, minibatch_positions(8, minibatches, epochs, shuffle, 7, step)):
        assert [tuple(sorted(r for shard in m for r in shard)) for m in epoch] == list(chosen)  # whatever dp is
    for shard in range(dp):
        assert shards[shard]["gen"] == tuple(sorted({r for e in schedule for m in e for r in m[shard]}))


@pytest.mark.parametrize("spread, frames, lengths", [
    (Spread("s", "m", "L", ("missing",)), (GEN,), LENGTHS),
    (Spread("s", "m", "L", ()), (GEN,), LENGTHS),
    (Spread("s", "m", "L", ("gen",)), (GEN,), {"gen": [1, 2]}),
    (Spread("s", "m", "L", ("prompt", "gen"), "row"), (PROMPT, GEN), LENGTHS),
    (Spread("s", "m", "L", ("gen",)), (GEN, frame("other", 6, prompts="elsewhere")), LENGTHS),
    (Spread("s", "m", "L", ("odd",), "prompt"), (frame("odd", 5, 2),), {"odd": [1] * 5}),
])
def test_spreads_that_do_not_fit_their_frames_are_caught(spread, frames, lengths):
    with pytest.raises(InternalError):
        rows_by_dp(spread, 2, frames, lengths, 0, 0)


def test_a_schedule_needs_frames_that_share_rows():
    spread = Spread("s", "m", "L", ("prompt", "gen"), "prompt")
    with pytest.raises(InternalError):
        minibatch_rows_by_dp(spread, 2, (PROMPT, GEN), LENGTHS, 0, 0)


def test_tokens_need_lengths():
    with pytest.raises(KeyError):
        rows_by_dp(Spread("s", "m", "L", ("gen",)), 2, (GEN,), {}, 0, 0)


# ---------------------------------------------------------------------------------------------------- micro-batches


@given(st.lists(st.integers(0, 30), unique=True, max_size=20), st.integers(0, 6), st.integers(0, 6))
def test_micro_batches(rows, limit, at_least):
    lengths = [(11 * r) % 17 for r in range(31)]
    parts = micro_batches(rows, lengths, limit, at_least)
    assert sorted(r for p in parts for r in p) == sorted(rows)
    assert all(parts) and all(list(p) == sorted(p) for p in parts)
    assert list(parts) == sorted(parts)
    assert not limit or all(len(p) <= limit for p in parts)
    assert len(parts) >= min(at_least, len(rows))
    assert parts == micro_batches(list(reversed(rows)), lengths, limit, at_least)


def test_no_more_micro_batches_than_needed():
    assert micro_batches((), [], 2, 2) == ()
    assert micro_batches((0, 1, 2), [1, 1, 1], 0, 1) == ((0, 1, 2),)
    assert len(micro_batches(range(8), [1] * 8, 4, 1)) == 2
    assert micro_batches((0, 1), [1, 1], 0, 5) == ((0,), (1,))


# ---------------------------------------------------------------------------------------------------- row moves

held = st.dictionaries(st.integers(0, 11), st.sets(st.integers(0, 15)), min_size=1, max_size=8)


@given(held, held, st.integers(1, 12))
def test_row_moves_bring_exactly_what_is_lacking(src, dst, devices_per_node):
    every = set().union(*src.values())
    dst = {r: tuple(sorted(rows & every)) for r, rows in dst.items()}
    moves = row_moves(src, dst, devices_per_node)
    got = {r: [] for r in dst}
    for x in moves:
        assert x.src != x.dst and x.rows and list(x.rows) == sorted(x.rows)
        assert set(x.rows) <= src[x.src]
        got[x.dst] += x.rows
        if x.src // devices_per_node != x.dst // devices_per_node:
            peers = [r for r in src if r // devices_per_node == x.dst // devices_per_node]
            assert not any(set(x.rows) & src[r] for r in peers)
    assert {r: sorted(rows) for r, rows in got.items()} == {
        r: sorted(set(rows) - src.get(r, set())) for r, rows in dst.items()}
    assert len({(x.src, x.dst) for x in moves}) == len(moves)
    assert moves == row_moves({r: src[r] for r in reversed(list(src))}, dst, devices_per_node)


def test_equal_holders_share_the_load():
    moves = row_moves({0: (0, 1), 1: (0, 1)}, {2: (0, 1), 3: (0, 1), 4: (0,), 5: (1,)}, 8)
    assert moves == (RowMove(0, 2, (0, 1)), RowMove(1, 3, (0, 1)), RowMove(0, 4, (0,)), RowMove(1, 5, (1,)))


def test_a_row_that_nobody_holds_is_caught():
    with pytest.raises(InternalError):
        row_moves({0: (0,)}, {1: (0, 1)}, 8)


# -------------------------------------------------------------------------------- frames with rows that are not there

WHOLE = frame("gen", 12, 3)
KEPT = made("kept", "kept", "kept.prompt", 12, 3, of=WHOLE, selected_from="gen", present_in="kept")
MORE = made("more", "more", "kept", 24, 2, below=KEPT, known=(WHOLE,), present_in="kept")


@given(st.lists(st.integers(0, 9), min_size=12, max_size=12), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_a_selection_is_divided_like_any_batch(lengths, dp, minibatches, shuffle):
    """Every row that is there is in one shard and one minibatch of an epoch; no other is anywhere."""
    here = [r for r, n in enumerate(lengths) if n]
    known = (WHOLE, KEPT)
    spread = Spread("s", "m", "L", ("kept",), "row", "tokens", minibatches, 2, shuffle)
    for epoch in minibatch_rows_by_dp(spread, dp, known, {"kept": lengths}, 3, 4):
        assert sorted(r for minibatch in epoch for shard in minibatch for r in shard) == here
        assert len(epoch) == minibatches and all(len(m) == dp for m in epoch)
    by_prompt = rows_by_dp(Spread("s", "m", "L", ("kept",), "prompt", "tokens"), dp, known, {"kept": lengths}, 0, 0)
    assert sorted(r for shard in by_prompt for r in shard["kept"]) == here
    assert all(len({i for i, s in enumerate(by_prompt) if r in s["gen"]}) == 1 for r in here)


@given(st.lists(st.integers(0, 9), min_size=12, max_size=12), st.integers(1, 5))
def test_a_selection_lies_where_its_rows_lie(lengths, dp):
    """In a spread over the whole frame, the kept rows of a shard are among its own; what was generated from kept
    prompts follows them."""
    spread = Spread("s", "m", "L", ("gen",), "prompt", "count")
    shards = rows_by_dp(spread, dp, (WHOLE, KEPT, MORE), {"kept": lengths}, 0, 0)
    for shard in shards:
        assert set(shard["kept"]) == {r for r in shard["gen"] if lengths[r]}
        assert set(shard["more"]) == {r for k in shard["kept"] for r in (2 * k, 2 * k + 1)}


@given(st.integers(1, 5), st.integers(1, 4))
def test_slots_are_the_same_in_every_turn(dp, turns):
    one = made("g", "g", "p", 12, 3)
    all_ = made("g.all", "g.all", "p.all", 12 * turns, 3, present_in="g.all", iterations=turns)
    there_ = {"g.all": [1] * (12 * turns)}
    slots = rows_by_dp(Spread("s", "m", "L", ("g",), "prompt", "slot"), dp, (one,), {}, 0, 0)
    whole = rows_by_dp(Spread("s", "m", "L", ("g.all",), "prompt", "slot"), dp, (all_,), there_, 0, 0)
    for a, b in zip(slots, whole):
        assert b["g.all"] == tuple(sorted(t * 12 + r for t in range(turns) for r in a["g"]))


def test_a_selection_of_nothing():
    spread = Spread("s", "m", "L", ("kept",), "row", "tokens", 2)
    assert minibatch_rows_by_dp(spread, 2, (WHOLE, KEPT), {"kept": [0] * 12}, 0, 0) == ((((), ()), ((), ())),)


def test_rows_of_a_selection_need_its_lengths():
    with pytest.raises(KeyError):
        rows_by_dp(Spread("s", "m", "L", ("kept",), "row", "count"), 2, (WHOLE, KEPT), {}, 0, 0)
