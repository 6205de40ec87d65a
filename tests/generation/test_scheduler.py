"""Which sequence has which slot: any order of ends, without a model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.backends.torch.generate.scheduler import DecodeBatch, MicroBatchGroup, PrefillBatch, Scheduler
from rldsl.memory.decode_shapes import MAX_CAPTURES_WITH_MEMORY, num_captures_with_memory, round_to_bucket, tokens_to_read


class Story:
    """Plays the device: what is in each slot, who has ended, what the host may know."""

    def __init__(self, lens: list[int], same: list[bool], slots: int, num_groups: int, longest: int, every: int,
                 seed: int):
        self.rng, self.lens, self.same, self.longest = random.Random(seed), lens, same, longest
        self.ends = [self.rng.randint(1, longest) for _ in lens]
        self.scheduler = Scheduler(lens, same, slots, num_groups, longest, every)
        self.prompt: dict[int, int] = {}   # slot -> the first sequence with the prompt that it holds
        self.holds: dict[int, list[int]] = {}  # slot -> [its sequence, its tokens]
        self.made = [0] * len(lens)
        self.steps = 0

    def first(self, sequence: int) -> int:
        while self.same[sequence]:
            sequence -= 1
        return sequence

    def turn(self, number: int) -> None:
        group = self.scheduler.groups[number]
        mine = range(group.start, group.start + group.size)
        match self.scheduler.schedule(group):
            case PrefillBatch() as work:
                assert set(work.slots) <= set(mine) and len(set(work.slots)) == len(work.slots)
                assert not any(s in self.holds for s in work.slots)
                for i, slot in enumerate(work.slots):
                    sequence = work.first_seq + i
                    if i < work.num_shared:
                        assert self.prompt[work.source_slot] == self.first(sequence)
                    else:
                        assert self.first(sequence) in work.new_prompts
                begun = {slot: work.first_seq + i for i, slot in enumerate(work.slots)}
                self.holds |= {slot: [sequence, 0] for slot, sequence in begun.items()}
                self.prompt |= {slot: self.first(sequence) for slot, sequence in begun.items()}
                self.token(list(begun), True, group)
            case DecodeBatch() as work:
                self.steps += 1
                for source, into in work.slot_moves:
                    assert into not in self.holds and {source, into} <= set(mine)
                    self.holds[into], self.prompt[into] = self.holds.pop(source), self.prompt[source]
                here = [s for s in mine if s in self.holds]
                assert all(s < group.start + work.batch_size for s in here) and 0 < work.batch_size <= group.size
                for s in here:
                    sequence, count = self.holds[s]
                    assert self.lens[sequence] + min(count, self.longest - 1) <= work.kv_len <= self.scheduler.kv_width
                self.token(here, work.poll, group)
            case None:
                assert not group.seq_ids

    def token(self, here: list[int], poll: bool, group: MicroBatchGroup) -> None:
        """One more for each that has not ended; where the host polls, the others are gone."""
        for s in here:
            sequence, count = self.holds[s]
            self.holds[s][1] = min(count + 1, self.ends[sequence])
        if poll:
            mine = range(group.start, group.start + group.size)
            over = [s in self.holds and self.holds[s][1] >= self.ends[self.holds[s][0]] for s in mine]
            for s in self.scheduler.retire(group, over):
                sequence, count = self.holds.pop(s)
                assert self.made[sequence] == 0
                self.made[sequence] = count


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), max_size=12), st.integers(1, 12), st.integers(1, 4),
       st.integers(1, 12), st.integers(1, 9), st.integers(0, 10**6))
def test_every_sequence_gets_its_tokens(groups, slots, num_groups, longest, every, seed) -> None:
    lens = [n for n, count in groups for _ in range(count)]
    same = [i > 0 for _, count in groups for i in range(count)]
    story = Story(lens, same, min(slots, len(lens)), num_groups, longest, every, seed)
    for turn in range(4000):
        if not story.scheduler.has_work:
            break
        story.turn(turn % num_groups)
    assert not story.scheduler.has_work and story.made == story.ends


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 4)), min_size=1, max_size=9), st.integers(1, 12),
       st.integers(1, 60), st.integers(1, 2), st.booleans(), st.integers(0, 10**6))
def test_a_batch_repeats_until_a_sequence_ends(groups, slots, longest, every, narrow, seed) -> None:
    """So often in a row the scheduler says the same, and is where it is after `advance`."""
    lens = [n for n, count in groups for _ in range(count)]
    same = [i > 0 for _, count in groups for i in range(count)]
    ends = [random.Random(seed + i).randint(1, longest) for i in range(len(lens))]
    asked, told = (Scheduler(lens, same, min(slots, len(lens)), 1, longest, every, narrow=narrow) for _ in range(2))
    repeated = 0

    def over(scheduler: Scheduler) -> list[bool]:
        group = scheduler.groups[0]
        return [s in group.seq_ids and group.num_generated[s] >= ends[group.seq_ids[s]] for s in range(group.size)]

    while asked.has_work:
        batch, (mine, theirs) = asked.schedule(asked.groups[0]), (asked.groups[0], told.groups[0])
        assert told.schedule(theirs) == batch and batch is not None
        done = 0
        while isinstance(batch, DecodeBatch) and done < batch.repeats and not any(over(asked)):
            done += 1
            found = asked.schedule(mine)
            assert replace(found, repeats=0) == replace(batch, slot_moves=(), repeats=0)
            assert found.repeats == batch.repeats - done
        repeated += done
        told.advance(theirs, done)
        assert every == 1 or done == 0
        if isinstance(batch, PrefillBatch) or batch.poll:
            assert over(asked) == over(told)
            assert asked.retire(mine, over(asked)) == told.retire(theirs, over(told))
        assert (mine.seq_ids, mine.num_generated) == (theirs.seq_ids, theirs.num_generated)
    assert not told.has_work and (repeated or every > 1 or longest < 40 or len(lens) > 3)


@pytest.mark.parametrize("every, steps", [(1, 9), (4, 12), (100, 19)])
def test_the_host_looks_no_later_than_the_longest(every: int, steps: int) -> None:
    """One sequence that ends with its tenth token; at most twenty are allowed."""
    story = Story([5], [False], 1, 1, 20, every, 0)
    story.ends = [10]
    while story.scheduler.has_work:
        story.turn(0)
    assert story.steps == steps


def test_nobody_waits_for_a_look_when_the_end_is_sure() -> None:
    story = Story([5] * 8, [False] * 8, 4, 1, 10, 100, 0)
    story.ends = [10] * 8
    while story.scheduler.has_work:
        story.turn(0)
    assert story.steps == 18  # two waves, each of nine steps after its prefill


def test_fewer_rows_when_fewer_are_left() -> None:
    rows = []
    story = Story([3] * 16, [False] * 16, 16, 1, 30, 1, 0)
    story.ends = [2 + i for i in range(16)]
    plain = story.scheduler.schedule

    def noted(group):
        work = plain(group)
        rows.append(work.batch_size if isinstance(work, DecodeBatch) else 0)
        return work

    story.scheduler.schedule = noted
    while story.scheduler.has_work:
        story.turn(0)
    live = [16 - i for i in range(16)]
    assert rows[0] == 0 and rows[1:] == [round_to_bucket(n) for n in live]


@pytest.mark.parametrize("count, found", [
    (1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (6, 6), (7, 8), (9, 12), (13, 16), (17, 24), (25, 32), (33, 48)])
def test_buckets_of_rows(count: int, found: int) -> None:
    assert round_to_bucket(count) == found


@pytest.mark.parametrize("count, found", [
    (1, 64), (64, 64), (65, 128), (200, 256), (257, 320), (600, 640), (1100, 1280)])
def test_buckets_of_widths(count: int, found: int) -> None:
    assert round_to_bucket(count, 64, 4) == tokens_to_read(count) == found


@pytest.mark.parametrize("count, found", [(1, 16), (16, 16), (17, 32), (100, 112), (200, 208), (257, 288), (600, 640)])
def test_buckets_of_widths_on_a_cpu(count: int, found: int) -> None:
    assert tokens_to_read(count, cpu=True) == found


def test_buckets_are_few_and_near() -> None:
    for least, parts in ((1, 2), (64, 4)):
        found = [round_to_bucket(n, least, parts) for n in range(1, 5000)]
        assert found == sorted(found) and all(n <= b <= n * (1 + 1 / parts) + least for n, b in enumerate(found, 1))
        assert len(set(found)) <= parts * 13


@pytest.mark.parametrize("prompt", [0, 1, 30, 63, 64, 200, 1000])
@pytest.mark.parametrize("new", [0, 1, 2, 3, 40, 100, 700])
@pytest.mark.parametrize("cpu", [False, True])
def test_captured_steps_are_the_widths_of_two_steps_or_more(prompt: int, new: int, cpu: bool) -> None:
    widths = [min(tokens_to_read(prompt + made, cpu), prompt + new) for made in range(1, new)]
    one_for_all = cpu and len(widths) > 1  # of steps that do not read the width
    found = min(MAX_CAPTURES_WITH_MEMORY, max(one_for_all, sum(widths.count(w) > 1 for w in set(widths))))
    assert num_captures_with_memory(prompt, new, cpu) == found


def test_numbers_of_a_damaged_plan_are_counted_too() -> None:
    assert num_captures_with_memory(-5, 9) >= 0 and num_captures_with_memory(1 << 60, 1 << 60) == MAX_CAPTURES_WITH_MEMORY and round_to_bucket(0, 64, 4) == 0


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_batch_of_stateful_sequences_runs_its_first_prompt(slots: int) -> None:
    """It has none from a slot whose state has moved on, and none of its own twice."""
    scheduler = Scheduler([5] * 6, [False, True, True, True, False, True], slots, 1, 1, 1, stateful=True)
    (group,), begun = scheduler.groups, []
    while scheduler.has_work:
        if isinstance(batch := scheduler.schedule(group), PrefillBatch):
            assert batch.num_shared == 0 and batch.new_prompts[0] == batch.first_seq
            begun += batch.new_prompts
        scheduler.retire(group, [True] * slots)
    assert begun == {1: [0, 1, 2, 3, 4, 5], 2: [0, 2, 4], 3: [0, 3, 4]}[slots]
