"""The evaluation of an assignment beside the simulated plan, and its memory beside what the compiler counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import pytest

from rldsl.search.call_costs import Candidate
from rldsl.search.compiled_placements import CompiledPlacement, compile_assignment
from rldsl.search.evaluator import Assignment, Evaluation, Evaluator
from rldsl.search.greedy import choose_candidates
from rldsl.search.problem import Job, build_problem
from rldsl.search.space import Block
from rldsl.simulate import Lengths
from tests.search.programs import cluster, ready

DRAWN = [("ppo", "1B", 1, 8), ("ppo", "7B", 2, 8), ("grpo", "7B", 2, 4), ("remax", "1B", 1, 4), ("dpo", "7B", 1, 8),
         ("ppo lag=1", "1B", 1, 8), ("grpo lag=2", "7B", 2, 4)]


def drawn(i: Evaluator, count: int, seed: int, chunks: bool = False) -> Iterator[Evaluation]:
    """Assignments that fit: blocks at random, entries among the fastest few. chunks: trainings divide the layers of a
    stage where they may; else none does."""
    draw = random.Random(seed)
    tries = 0
    while count and tries < 200:
        tries += 1
        blocks = tuple(draw.choice([b for b in i.tree.all_blocks if i.table.candidates(j, b.size)]) for j in i.calls)
        entries = tuple(draw.choice(entries_of(i, j, b, chunks)[:12]) for j, b in zip(i.calls, blocks))
        found: Evaluation | None = i.evaluate(Assignment(blocks, entries))
        if found is not None and not i.fits(found.bytes):
            found = choose_candidates(i, blocks)
        if found is not None:
            count -= 1
            yield found


def entries_of(i: Evaluator, job: Job, block: Block, chunks: bool) -> list[Candidate]:
    found = i.table.candidates(job, block.size)
    return [e for e in found if (e.strategy.vpp > 1) == chunks and not (chunks and e.strategy.offload)] or list(found)


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Evaluation, CompiledPlacement]]:
    """Assignments as they are evaluated, and compiled and simulated."""
    found = []
    for name, size, nodes, gpus in DRAWN:
        machines = cluster(nodes, gpus)
        p = ready(name, size, machines)
        i = Evaluator(build_problem(p.placed, machines, Lengths(), p.placed.memory, p.fixed))
        found += [(judged, compile_assignment(p, i, judged, machines, Lengths())) for judged in drawn(i, 4, 1)]
    assert len(found) == 4 * len(DRAWN)
    return found


@pytest.mark.thorough
def test_a_step_is_what_the_simulator_finds(pairs: list[tuple[Evaluation, CompiledPlacement]]) -> None:
    off = sorted(abs(judged.seconds / one.seconds - 1) for judged, one in pairs)
    assert median(off) < 0.005 and off[-1] < 0.06, off
    assert sum(x > 0.02 for x in off) <= len(off) // 10, off


def test_memory_is_what_the_compiler_counts(pairs: list[tuple[Evaluation, CompiledPlacement]]) -> None:
    """Values and messages are left out; what does not fit with them is found out when it is compiled."""
    off = sorted(judged.bytes / one.bytes - 1 for judged, one in pairs)
    assert abs(median(off)) < 0.001 and off[0] > -0.005 and off[-1] < 0.02, off


@pytest.mark.thorough
def test_chunks_of_layers_are_judged_as_well() -> None:
    off, bytes = [], []
    for name, size, nodes, gpus in (("ppo", "7B", 2, 8), ("grpo", "7B", 2, 4), ("grpo lag=2", "7B", 2, 4)):
        machines = cluster(nodes, gpus, 400.0)
        p = ready(name, size, machines)
        i = Evaluator(build_problem(p.placed, machines, Lengths(), p.placed.memory, p.fixed))
        for judged in drawn(i, 4, 2, chunks=True):
            if any(e.strategy.vpp > 1 for e in judged.assignment.candidates):
                one = compile_assignment(p, i, judged, machines, Lengths())
                off.append(abs(judged.seconds / one.seconds - 1))
                bytes.append(judged.bytes / one.bytes - 1)
    assert len(off) > 6 and median(off) < 0.005 and max(off) < 0.02, off
    assert min(bytes) > -0.005 and max(bytes) < 0.05, bytes


def test_a_call_that_takes_longer_never_makes_a_step_shorter() -> None:
    machines = cluster(2, 2)
    p = ready("ppo", "1B", machines)
    i = Evaluator(build_problem(p.placed, machines, Lengths(), p.placed.memory, p.fixed))
    draw = random.Random(3)
    for judged in drawn(i, 6, 2):
        a = judged.assignment
        moves = i.reshards_of_copies(a.blocks, a.candidates)
        before = i.seconds(a.blocks, a.candidates, moves)
        for c in range(len(a.candidates)):
            longer = replace(a.candidates[c], seconds=a.candidates[c].seconds * draw.uniform(1, 3))
            entries = [longer if k == c else e for k, e in enumerate(a.candidates)]
            assert i.seconds(a.blocks, entries, moves) >= before - 1e-9
