"""Every dimension of the space decides somewhere: a small program whose best answer changes with it.

Of a dimension of the placement, the best with it is faster than the best without it, which the program's own rules
forbid, and both are optimal (gap 0). A lag belongs to the program: the best placement differs with it. What
environments take is in the time and in the bound of every placement (`test_environments.py`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rldsl.clusters import Cluster
from rldsl.models.families import Family
from rldsl.plan.model import ParamSpec
from rldsl.search import prepare_program, unless_locked
from rldsl.search.branch_and_bound import branch_and_bound
from rldsl.search.candidates import CandidateTable
from rldsl.search.evaluator import Evaluation, Evaluator
from rldsl.search.problem import build_problem
from rldsl.search.space import Strategy
from rldsl.simulate import Lengths
from tests.search.programs import ACTOR, HEAD, PROGRAMS, cluster, family, graph, instance

SFT = HEAD + "use std.sft (sft)\n" + ACTOR + """
data answers = jsonl("p.jsonl", batch=batch, max_prompt_tokens=256, max_answer_tokens=tokens)
flow sft(steps=10, seed=1) {
  answer = answers.next()
  actor.train(answer, loss=sft(), minibatches=4)
}
"""


def best(rule: str, size: str, machines: Cluster, lengths: Lengths = Lengths(), **sets: int) -> Evaluation | None:
    """The optimum of one training; None where nothing fits. rule: options that bind it; "": none."""
    text = SFT + (f"place actor.train {rule}\n" if rule else "")
    found = branch_and_bound(instance("sft", size, machines, lengths, text=text, **sets), gap=0.0)
    assert found.complete
    return found.best[0] if found.best else None


def strategy(found: Evaluation | None) -> Strategy:
    assert found is not None, "nothing fits"
    return found.assignment.candidates[-1].strategy


@pytest.mark.parametrize("name, free, bound, size, machines, sets", [
    ("zero", "", "zero=0", "1B", cluster(1, 8, 24.0), {}),
    ("recompute", "tp=1 pp=1", "tp=1 pp=1 recompute=none", "1B", cluster(1, 2, 27.0), {"tokens": 4096}),  # fits by it
    ("vpp", "tp=1 dp=1", "tp=1 dp=1 vpp=1", "7B", cluster(1, 8), {"batch": 64}),
    ("cp", "tp=1 zero=0", "tp=1 zero=0 cp=1", "1B", cluster(1, 4), {"batch": 4, "tokens": 7936}),
])
def test_a_dimension_decides(name: str, free: str, bound: str, size: str, machines: Cluster,
                             sets: dict[str, int]) -> None:
    with_it, without = best(free, size, machines, **sets), best(bound, size, machines, **sets)
    assert getattr(strategy(with_it), name) != getattr(Strategy(), name)
    if without is not None:
        assert with_it is not None and with_it.seconds < 0.995 * without.seconds
        assert getattr(strategy(without), name) == getattr(Strategy(), name)
    assert (without is None) == (name == "recompute")


def test_limits_of_tokens_decide_where_rows_are_short() -> None:
    machines = cluster(1, 4)
    short, full = (best("", "1B", machines, Lengths(0.0, mean)) for mean in (100.0, 0.0))
    assert strategy(short).mbt and not strategy(full).mbt


def offloading(name: str, gpus: int, memory: float, rule: str = "") -> Evaluation | None:
    """The optimum of a 7B program on one node; None where nothing fits."""
    found = branch_and_bound(instance(name, "7B", cluster(1, gpus, memory), text=PROGRAMS[name] + rule), gap=0.0)
    assert found.complete
    return found.best[0] if found.best else None


def strategies(found: Evaluation | None) -> list[Strategy]:
    assert found is not None, "nothing fits"
    return [e.strategy for e in found.assignment.candidates]


@pytest.mark.parametrize("name, gpus, memory", [("dpo", 2, 80.0), ("dpo", 4, 40.0)])
def test_offload_decides_whether_anything_fits(name: str, gpus: int, memory: float) -> None:
    assert offloading(name, gpus, memory, "place * offload=false\n") is None
    assert any(s.offload for s in strategies(offloading(name, gpus, memory)))


@pytest.mark.parametrize("name, gpus, memory", [("dpo", 2, 100.0), ("grpo", 8, 40.0), ("grpo", 8, 80.0)])
def test_offload_leaves_memory_for_faster_strategies(name: str, gpus: int, memory: float) -> None:
    with_it, without = offloading(name, gpus, memory), offloading(name, gpus, memory, "place * offload=false\n")
    assert any(s.offload for s in strategies(with_it)) and not any(s.offload for s in strategies(without))
    assert with_it is not None and without is not None and with_it.seconds < 0.995 * without.seconds


@pytest.mark.parametrize("name, gpus, memory", [("dpo", 4, 120.0), ("grpo", 8, 120.0)])
def test_nothing_is_offloaded_without_need(name: str, gpus: int, memory: float) -> None:
    assert not any(s.offload for s in strategies(offloading(name, gpus, memory)))


@pytest.mark.parametrize("given", ["true", "false"])
def test_a_rule_decides_what_is_offloaded(given: str) -> None:
    found = strategies(offloading("grpo", 8, 80.0, f"place ref.* offload={given}\nplace judge.* offload=false\n"))
    assert [s.offload for s in found[1:3]] == [False, given == "true"]


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_an_offloaded_candidate_costs_what_is_computed_for_it(name: str) -> None:
    """It is derived from the one without offloading."""
    i, count = instance(name, "1B", cluster(1, 4), batch=64), 0
    for job in i.calls:
        for e in i.table.candidates(job, 4):
            if e.strategy.offload:
                fresh = CandidateTable(i.problem)
                assert fresh.candidate(job, e.strategy, 4) == e
                count += 1
    assert count >= 4


# -------------------------------------------------------------------------------------------------- experts


def mixture(path: str, kind: str, span: object = None, trained: bool = False) -> Family:
    """A mixture of 16 experts, two of which work on a token, with the width of a dense model of 1B."""
    dense, width = family("1B", path, kind), 2048
    experts = (ParamSpec("model.layers.{}.mlp.experts.gate_up_proj", (16, 2 * width, dense.hidden), "layer",
                         dense.layers, style="experts", experts=16),
               ParamSpec("model.layers.{}.mlp.experts.down_proj", (16, dense.hidden, width), "layer", dense.layers,
                         style="experts", experts=16))
    return replace(dense, params=(*(p for p in dense.params if ".mlp." not in p.name), *experts), experts=16, chosen=2,
                   expert_width=width)


def test_ep_decides() -> None:
    def found(rule: str) -> Evaluation:
        machines = cluster(1, 8)
        made = graph("sft", SFT + f"place actor.train {rule}\n")
        memory = int(machines.memory_gb * 1e9)
        p = prepare_program(made, "", machines, memory, unless_locked(made, ()), mixture)
        i = Evaluator(build_problem(p.placed, machines, Lengths(), memory, p.fixed))
        return branch_and_bound(i, gap=0.0).best[0]

    free, bound = found("tp=1 pp=1 zero=0"), found("tp=1 pp=1 zero=0 ep=1")
    assert strategy(free).ep > 1 and free.seconds < 0.995 * bound.seconds


def test_a_lag_decides() -> None:
    """Without it all ranks generate together; with it some have generation for themselves."""
    lengths, name = Lengths(0.0, 150.0, 512.0), "grpo"
    for text, everywhere in ((PROGRAMS[name], True), (PROGRAMS[name].replace("seed=1", "seed=1, lag=1"), False)):
        i = instance(name, "1B", cluster(1, 8), lengths, text=text)
        block = branch_and_bound(i, gap=0.02).best[0].assignment.blocks[0]
        assert (block.size == 8) == everywhere


def test_no_strategy_with_chunks_is_beaten_by_one_without() -> None:
    i = instance("sft", "7B", cluster(1, 8), text=SFT, batch=64)
    (job,) = i.calls
    every = [e for e in i.table.candidates(job, 8) if e.strategy.pp > 1]
    plain, chunked = ([e for e in every if (e.strategy.vpp > 1) == with_chunks] for with_chunks in (False, True))
    assert plain and chunked
    assert not any(p.seconds <= e.seconds and p.resident_bytes <= e.resident_bytes
                   and p.active_bytes <= e.active_bytes for p in plain for e in chunked)
