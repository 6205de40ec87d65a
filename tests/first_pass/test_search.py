"""The time of a pass before each minibatch: the simulator has it, and the search estimates the same."""

from __future__ import annotations

import pytest

from rldsl.search.compiled_placements import compile_assignment
from rldsl.search.evaluator import Evaluator
from rldsl.search.problem import build_problem
from rldsl.simulate import Lengths
from tests.search import programs
from tests.search.test_evaluate import drawn

GRPO = programs.PROGRAMS["grpo"]
TWICE = GRPO.replace("use std.grpo", """loss twice(logprobs: token; adv: seq, old: token) {
  return -log(mean(exp(adv * (logprobs - old))))
}
use std.grpo""").replace("grpo(old=gen.logprobs, adv=group_norm(score), ref=ref_lp, beta=0.04)",
                         "twice(old=ref_lp, adv=group_norm(score))")
ONCE = TWICE.replace("-log(mean(exp(adv * (logprobs - old))))", "-mean(adv * exp(logprobs - old))")


def seconds(monkeypatch: pytest.MonkeyPatch, program: str) -> list[tuple[float, float]]:
    """(estimated, simulated) of the same assignments, drawn at random."""
    monkeypatch.setitem(programs.PROGRAMS, "own", program)
    machines = programs.cluster(1, 4)
    p = programs.ready("own", "1B", machines)
    i = Evaluator(build_problem(p.placed, machines, Lengths(), p.placed.memory, p.fixed))
    return [(judged.seconds, compile_assignment(p, i, judged, machines, Lengths()).seconds)
            for judged in drawn(i, 3, 2)]


def test_both_know_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    twice, once = seconds(monkeypatch, TWICE), seconds(monkeypatch, ONCE)
    assert len(twice) == 3
    for estimated, simulated in twice:
        assert estimated == pytest.approx(simulated, rel=0.03)
    assert min(t for _, t in twice) > min(t for _, t in once)
