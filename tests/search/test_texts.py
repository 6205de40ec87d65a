"""The search counts the time of Python functions that write prompts, as the simulator does."""

from __future__ import annotations

import pytest

from rldsl.graph import model as g
from rldsl.search.compiled_placements import compile_assignment
from rldsl.search.evaluator import Evaluator
from rldsl.search.greedy import choose_candidates
from rldsl.search.problem import Job, Problem, build_problem
from rldsl.simulate import Lengths
from rldsl.simulate.program import CALL_ROWS
from tests.search.programs import ACTOR, HEAD, PROMPTS, cluster, ready

JUDGED = HEAD + 'use std.grpo (group_norm, grpo_free)\nuse py "std/text.py" (whole: gen -> prompts(max_tokens=768))\n' \
    + PROMPTS + ACTOR + """model wise = causal_lm("actor", dtype="bfloat16")
flow judged(steps=10, seed=1) {
  prompt  = prompts.next()
  gen     = actor.generate(prompt, n=n, max_new_tokens=tokens)
  best    = pick(gen, len(gen))
  verdict = wise.generate(whole(gen), max_new_tokens=16)
  rest    = wise.generate(whole(best), max_new_tokens=16)
  metric rest = mean(len(rest))
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(mean(len(verdict) by prompt))))
}
"""


@pytest.fixture(scope="module")
def problem() -> Problem:
    machines = cluster(1, 4)
    prepared = ready("judged", "1B", machines, text=JUDGED)
    return build_problem(prepared.placed, machines, Lengths(), prepared.placed.memory, prepared.fixed)


def texts(problem: Problem) -> list[Job]:
    return [j for j in problem.jobs if isinstance(j.node, g.Derive)]


def test_text_is_a_job_between_two_calls(problem: Problem) -> None:
    by_frame = {getattr(j.node, "frame", ""): j for j in problem.jobs if j.is_call}
    first, second = texts(problem)
    assert first.depends_on == (by_frame["gen"].number,) and first.number in by_frame["verdict"].depends_on
    assert second.number in by_frame["rest"].depends_on
    assert not first.is_call and first.placed_with == by_frame["gen"].number


def test_each_row_takes_the_time_of_a_call(problem: Problem) -> None:
    """Four times as many rows as prompts; a pick alone takes none, it copies."""
    overheads = Evaluator(problem).overheads
    for job, rows in zip(texts(problem), (1024, 256), strict=True):
        for size in (1, 2, 4):
            alone = overheads.machine.rows(CALL_ROWS * rows / size)
            assert alone < overheads.job_seconds(job, size) < alone + 6e-3
    assert len(texts(problem)) == 2


def test_a_step_is_what_the_simulator_finds() -> None:
    machines = cluster(1, 4)
    prepared = ready("judged", "1B", machines, text=JUDGED)
    evaluator = Evaluator(build_problem(prepared.placed, machines, Lengths(), prepared.placed.memory, prepared.fixed))
    whole = max(evaluator.tree.all_blocks, key=lambda b: b.size)
    found = choose_candidates(evaluator, (whole,) * len(evaluator.calls))
    assert found is not None
    one = compile_assignment(prepared, evaluator, found, machines, Lengths())
    assert abs(found.seconds / one.seconds - 1) < 0.02
