"""Blocks, their symmetry, strategies."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from rldsl.search.candidates import CHUNKS, MIN_FILL, _needs_as_little
from rldsl.search.space import Block, BlockTree, Strategy, can_tp, divisions, micro_batch_sizes, zero_levels
from rldsl.simulate import Lengths
from tests.search.programs import PROGRAMS, cluster, family, instance


@pytest.mark.parametrize("nodes, gpus", [(1, 1), (1, 8), (2, 4), (3, 8), (5, 6), (4, 3), (16, 8)])
def test_blocks_are_meshes_that_can_be_named_and_nest(nodes: int, gpus: int) -> None:
    tree = BlockTree(nodes, gpus)
    assert tree.all_blocks[0] == Block(0, nodes * gpus) and len(set(tree.all_blocks)) == len(tree.all_blocks)
    for b in tree.all_blocks:
        whole = b.start % gpus == 0 and b.size % gpus == 0
        assert whole or b.start // gpus == (b.stop - 1) // gpus and gpus % b.size == 0, b
    for a, b in combinations(tree.all_blocks, 2):
        assert a.contains(b) or b.contains(a) or not a.overlaps(b)


def test_of_nodes_in_which_nothing_stands_only_the_first_counts() -> None:
    tree = BlockTree(4, 2)
    assert list(tree.distinct_blocks(())) == [(0, 8), (0, 4), (0, 2), (0, 1)]
    used = [Block(0, 2)]
    assert set(tree.distinct_blocks(used)) == {(0, 8), (0, 4), (0, 2), (0, 1), (2, 4), (2, 3), (4, 8), (4, 6), (4, 5)}


def test_halves_of_three_nodes_are_not_alike() -> None:
    assert {b for b in BlockTree(3, 1).distinct_blocks(()) if b.size == 1} == {(0, 1), (2, 3)}


def test_every_block_is_alike_to_one_that_is_tried() -> None:
    """By number: whatever stands already, the sizes of all blocks disjoint from it are among those tried."""
    tree = BlockTree(4, 4)
    for used in combinations(tree.all_blocks, 2):
        tried = {(b.size, tuple(b.contains(u) - (u.contains(b) and u != b) for u in used),
                  tuple(b.overlaps(u) for u in used))
                 for b in tree.distinct_blocks(used)}
        for b in tree.all_blocks:
            key = (b.size, tuple(b.contains(u) - (u.contains(b) and u != b) for u in used),
                   tuple(b.overlaps(u) for u in used))
            assert key in tried, (used, b)


def test_degrees_fill_the_block_and_suit_the_model() -> None:
    found = list(divisions("train", 16, 8, family("0.5B", "m", "causal_lm"), 1024))
    assert found and all(s.dp * s.tp * s.pp * s.cp == 16 for s in found)
    assert {s.tp for s in found} == {1, 2}, "14 heads"
    assert all(s.cp == 1 for s in found)
    assert any(s.cp == 4 for s in divisions("infer", 16, 8, family("7B", "m", "causal_lm"), 16384))
    assert all(s.cp == 1 for s in divisions("generate", 16, 8, family("7B", "m", "causal_lm"), 16384))


def test_what_a_model_does_not_allow_is_no_degree() -> None:
    assert not can_tp(family("0.5B", "m", "causal_lm"), 4)
    assert can_tp(family("7B", "m", "causal_lm"), 8)
    assert not any(s.pp > 24 for s in divisions("train", 64, 8, family("0.5B", "m", "causal_lm"), 64))
    assert not any(s.tp > 4 for s in divisions("train", 8, 4, family("7B", "m", "causal_lm"), 64)), "inside a node"


def test_zero_is_for_training_over_several_ranks() -> None:
    assert len(zero_levels("train", Strategy(dp=2))) == 4
    assert zero_levels("train", Strategy(tp=2)) == (Strategy(tp=2),)
    assert zero_levels("infer", Strategy(dp=2)) == (Strategy(dp=2),)


@pytest.mark.parametrize("rows, pp, found", [(8, 1, (1, 2, 4, 0)), (8, 4, (1, 0)), (1, 1, (0,)), (6, 1, (1, 2, 4, 0)),
                                             (3, 4, (0,))])
def test_micro_batches_differ(rows: int, pp: int, found: tuple[int, ...]) -> None:
    assert micro_batch_sizes(rows, pp) == found


def test_limits_of_tokens_are_tried_where_rows_are_shorter_than_they_may_be() -> None:
    short, full = (instance("grpo", "1B", cluster(1, 4), Lengths(*of)) for of in ((0.0, 100.0), (0.0, 0.0)))
    for i, limited in (short, True), (full, False):
        for job in i.calls:
            some = [e.strategy for e in i.table.candidates(job, 4)]
            assert any(s.mbt for s in some) == (limited and job.kind != "generate"), job.name
            assert all(s.mbt % 768 == 0 and not (s.mbt and s.mbs) for s in some), "of rows of 256 + 512 tokens"
    train = next(j for j in short.calls if j.kind == "train")
    packed, whole = (short.table.candidate(train, Strategy(dp=4, mbs=m, mbt=t), 4) for m, t in ((0, 1536), (2, 0)))
    assert packed.seconds < whole.seconds and packed.active_bytes < 1.01 * whole.active_bytes


def test_a_size_that_the_program_gives_is_kept() -> None:
    i = instance("grpo", "1B", cluster(1, 4), Lengths(0.0, 100.0), text=PROGRAMS["grpo"] + "place actor.train mbs=2\n")
    train = next(j for j in i.calls if j.kind == "train")
    assert {(e.strategy.mbs, e.strategy.mbt) for e in i.table.candidates(train, 4)} == {(2, 0)}


def test_chunks_of_layers_are_tried_where_they_may_pay() -> None:
    """Those that are left out, though the layout fits and its pipeline takes long to fill, are no faster than another
    layout that needs no more memory."""
    i = instance("ppo", "7B", cluster(2, 4), batch=64)
    table, left, kept = i.table, 0, 0
    for job in (j for j in i.calls if j.kind == "train"):
        found = {e.strategy for e in table._all_candidates(job, 8, {})}
        front = [e for e in table._all_candidates(job, 8, {}) if e.strategy.vpp == 1]
        for e in front:
            for v in CHUNKS if e.strategy.pp > 1 and not e.strategy.mbt else ():
                chunked = table.candidate(job, replace(e.strategy, vpp=v), 8)
                kept += chunked.strategy in found
                if chunked.strategy not in found and table._fill(job, e.strategy) >= MIN_FILL:
                    left += 1
                    assert not table.fits(chunked.min_bytes) or any(
                        k.seconds <= chunked.seconds and _needs_as_little(k, chunked) for k in front)
    assert left and kept


@pytest.mark.parametrize("said, chunks", [("vpp=1", {1}), ("vpp=4", {1, 4}), ("", {1, 2, 4})])
def test_chunks_that_the_program_states_are_the_only_ones(said: str, chunks: set[int]) -> None:
    i = instance("ppo", "7B", cluster(2, 4), batch=64)
    job = next(j for j in i.calls if j.kind == "train")
    given = {name: int(value) for name, _, value in (x.partition("=") for x in said.split())}
    found = {e.strategy.vpp if e.strategy.pp > 1 else 1 for e in i.table._all_candidates(job, 8, given)}
    assert found <= chunks and max(found) == max(chunks)
