"""What a program says of its calls holds in a search: locks, options, trainings that stand alike."""

from __future__ import annotations

from math import inf

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.graph.model import Graph
from rldsl.placement.place import place_graph
from rldsl.search import Options, PreparedProgram, find_placement, prepare_program, unless_locked
from rldsl.search.answer_text import call_rows
from rldsl.search.branch_and_bound import branch_and_bound
from rldsl.search.evaluator import Assignment, Evaluator
from rldsl.search.greedy import choose_candidates, greedy_evaluation
from rldsl.search.modes import place_by_mode
from rldsl.search.placement_file import place_rules
from rldsl.search.problem import build_problem
from rldsl.search.space import Block
from rldsl.simulate import Lengths
from rldsl.source import SourceFile
from tests.search.brute import assignments
from tests.search.programs import ACTOR, GRPO, HEAD, PROGRAMS, PROMPTS, REF, cluster, describe
from tests.search.test_exhaustive import few_entries

TWICE = HEAD + "use std.sft (sft)\n" + ACTOR + """
data answers = jsonl("a.jsonl", batch=batch, max_prompt_tokens=256, max_answer_tokens=tokens)
flow twice(steps=10, seed=1) {
  answer = answers.next()
  actor.train(answer, loss=sft(), minibatches=2)
  actor.train(answer, loss=sft(), minibatches=1)
}
"""
SHARED = HEAD + PROMPTS + REF + """
flow twice(steps=10, seed=1) {
  prompt = prompts.next()
  gen    = ref.generate(prompt, n=n, max_new_tokens=tokens)
  hot    = ref.logprobs(gen)
  best   = ref.generate(prompt, n=n, max_new_tokens=tokens, greedy=true)
  cold   = ref.logprobs(best)
  metric gap = mean(hot) - mean(cold)
}
"""


def read(text: str, rules: str = "", **sets: int) -> Graph:
    return api.build_graph(SourceFile("p.rlf", text + rules), sets)


def ready(text: str, machines, rules: str = "", locks: tuple[str, ...] = (), size: str = "1B",
          **sets: int) -> PreparedProgram:
    graph = read(text, rules, **sets)
    memory = int(machines.memory_gb * 1e9)
    return prepare_program(graph, "", machines, memory, unless_locked(graph, api.read_selectors(locks)), describe(size))


def instance(p: PreparedProgram, machines) -> Evaluator:
    return Evaluator(build_problem(p.placed, machines, Lengths(), p.placed.memory, p.fixed))


# ------------------------------------------------------------------------------------------------- symmetry


def test_a_call_that_stays_makes_devices_differ() -> None:
    machines = cluster(1, 2)
    i = instance(ready(PROGRAMS["dpo"], machines, "place @ref_chosen on mesh(1:2)\n", ("@ref_chosen",)), machines)
    free = [j for j in i.calls if j.number not in i.problem.fixed]
    assert [set(i.problem.blocks(j, ())) for j in free] == 2 * [{(0, 2), (0, 1), (1, 2)}]


@pytest.mark.parametrize("name, few, lock", [
    ("dpo", 2, "@ref_chosen on mesh(1:2)"), ("dpo", 3, "actor.train on mesh(1:2)"),
    ("remax", 1, "@best on mesh(1:2)"), ("grpo", 1, "ref.* on mesh(1:2)")])
def test_beside_a_call_that_stays_the_gap_is_nothing(name: str, few: int, lock: str) -> None:
    machines = cluster(1, 2, 80)
    selector = lock.split(" ")[0]
    p = ready(PROGRAMS[name], machines, f"place {lock} mbs=4\n", (selector,), "0.5B", batch=32)
    i = few_entries(instance(p, machines), few, 0)
    found = branch_and_bound(i, gap=0.0, max_nodes=10**6)
    known = min((j.seconds for a in assignments(i, few) if i.fits((j := i.evaluate(a)).bytes)), default=inf)
    assert found.complete and found.best[0].seconds == pytest.approx(known, rel=1e-9)
    assert found.bound == pytest.approx(known, rel=1e-9)


# ---------------------------------------------------------------------------------------------------- locks


def test_a_call_that_follows_another_stays_where_that_puts_it() -> None:
    machines = cluster(1, 4)
    p = ready(GRPO, machines, "place actor.train on mesh(0:2) tp=2\n", ("actor.generate",))
    assert dict(p.placed.placements)["gen"].layout.id == "0:2 tp=2"
    assert [f.block for f in p.fixed.values()] == [(0, 2)]


def test_a_number_of_ranks_stays_one() -> None:
    machines = cluster(1, 4)
    p = ready(GRPO, machines, "place ref.* on mesh(2) tp=2\n", ("ref.*",))
    answer = find_placement(p, machines, p.placed.memory, Options("heuristic"))
    assert any(r.split() == ["ref.logprobs", "on", "mesh(2)", "dp=1", "tp=2"]
               for r in place_rules(p.placed.graph, {**p.fixed_placements, **answer.best[0].placements}))


@pytest.mark.parametrize("said, how", [("mbt=1536", "mbt=1536"), ("pp=2 vpp=2 mbs=1", "vpp=2")])
def test_what_is_not_searched_for_is_costed_where_it_is_said(said: str, how: str) -> None:
    machines = cluster(1, 4)
    p = ready(GRPO, machines, f"place actor.train on mesh(0:4) {said} recompute=full\n", ("actor.train",))
    found = greedy_evaluation(instance(p, machines))
    assert found is not None and how in found.assignment.candidates[-1].strategy.text()
    answer = find_placement(p, machines, p.placed.memory, Options("heuristic"))
    assert abs(answer.best[0].evaluation.seconds / answer.best[0].seconds - 1) < 0.03
    assert abs(answer.best[0].evaluation.bytes / answer.best[0].bytes - 1) < 0.05


@pytest.mark.parametrize("rule, option", [("actor.train mbt=1536", "mbt=1536"), ("actor.generate mbt=7680", "mbs=10"),
                                          ("actor.train mbs=3", "mbs=3"), ("actor.train pp=2 vpp=4", "vpp=4")])
def test_options_without_ranks_bind_the_search(rule: str, option: str) -> None:
    text = GRPO.replace("cluster nodes=1 gpus=1\n", "cluster nodes=1 gpus=4\n") + f"place * auto\nplace {rule}\n"
    graph, answer = place_by_mode(read(text), "", "manual", describe("1B"))
    assert answer is not None
    call = rule.split(" ")[0]
    (found,) = [r for r in place_rules(graph, answer.best[0].placements) if r.startswith(call)]
    assert option in found, found
    place_graph(graph, describe=describe("1B"))


def test_a_row_longer_than_a_micro_batch() -> None:
    text = GRPO.replace("cluster nodes=1 gpus=1\n", "cluster nodes=1 gpus=4\n")
    text += "place * auto\nplace actor.train mbt=7\n"
    with pytest.raises(Failure) as failure:
        place_by_mode(read(text), "", "manual", describe("1B"))
    assert {d.code for d in failure.value.diagnostics} == {"RL0328"}


def test_what_follows_an_automatic_call_is_automatic() -> None:
    text = GRPO.replace("cluster nodes=1 gpus=1\n", "cluster nodes=1 gpus=2\n") + (
        "place actor.train auto\nplace ref.* on mesh(0:2) tp=2 mbs=8\nplace judge.* on mesh(0:2) tp=2 mbs=8\n")
    _, answer = place_by_mode(read(text), "", "manual", describe("1B"))
    assert answer is not None and set(answer.best[0].placements) == {"gen", "actor.train"}


@pytest.mark.parametrize("said", ["mbt=1536", "zero=2", "recompute=full"])
def test_a_pattern_keeps_options(said: str) -> None:
    text = GRPO.replace("cluster nodes=1 gpus=1\n", "cluster nodes=1 gpus=2\n") + f"place actor.train {said}\n"
    graph, _ = place_by_mode(read(text), "", "d2", describe("1B"))
    (train,) = [p for i, p in place_graph(graph, describe=describe("1B")).placements if i == "actor.train"]
    name, value = said.split("=")
    assert str(getattr(train.layout if name == "zero" else train, name)) == value


# ------------------------------------------------------------------------------------------- trained twice


def test_trainings_of_one_model_stand_alike() -> None:
    machines = cluster(1, 4)
    p = ready(TWICE, machines)
    answer = find_placement(p, machines, p.placed.memory)
    assert len({p.layout for p in answer.best[0].placements.values()}) == 1
    list(call_rows(answer.evaluator, answer.best[0].evaluation.assignment))


@pytest.mark.parametrize("memory", [22, 26, 30, 40])
def test_making_room_for_two_trainings_ends(memory: float) -> None:
    machines = cluster(1, 2, memory)
    i = instance(ready(TWICE, machines), machines)
    found = choose_candidates(i, 2 * [i.tree.root])
    assert found is None or i.fits(found.bytes)


# ------------------------------------------------------------------------------------------------- copies


def test_what_runs_on_the_trained_copy_gets_its_own_when_training_moves() -> None:
    machines = cluster(1, 4)
    i = instance(ready(GRPO, machines), machines)
    job = {j.name: c for c, j in enumerate(i.calls)}
    gen, train = job["actor.generate"], job["actor.train"]
    root = i.tree.root
    entries = [i.table.candidates(j, 4)[0] for j in i.calls]
    same = next(e for e in i.table.candidates(i.calls[gen], 4) if any(
        t.strategy.degrees == e.strategy.degrees for t in i.table.candidates(i.calls[train], 4)))
    entries[gen] = same
    entries[train] = next(t for t in i.table.candidates(i.calls[train], 4)
                          if t.strategy.degrees == same.strategy.degrees)
    own = i.evaluate(Assignment((root,) * 4, tuple(entries))).assignment.candidates
    assert own[gen].on_trained_params
    other = next(t for t in i.table.candidates(i.calls[train], 4) if t.strategy.degrees != same.strategy.degrees)
    changed = i.with_candidate(own, train, other)
    assert changed is not None
    then = i.evaluate(Assignment((root,) * 4, changed)).assignment.candidates
    assert not then[gen].on_trained_params and then[gen].copy_bytes > 0


@pytest.mark.parametrize("first, second, same", [
    ((0, 4), (0, 4), True), ((0, 4), (2, 4), True), ((0, 2), (2, 4), True), ((0, 4), (0, 1), False)])
def test_slices_of_one_directory_count_once(first: tuple[int, int], second: tuple[int, int], same: bool) -> None:
    """On whichever blocks, where tensor parallelism alone divides them."""
    machines = cluster(1, 4, 80)
    i = instance(ready(SHARED, machines), machines)
    calls = [c for c, j in enumerate(i.calls) if j.name == "ref.logprobs"]
    blocks = [Block(*first), Block(*second)]
    entries = [next(e for e in i.table.candidates(i.calls[c], b.size) if e.strategy.tp == min(2, b.size)
                    and e.strategy.pp == 1) for c, b in zip(calls, blocks)]
    keys = [i.sharing_key(c, b, e) for c, b, e in zip(calls, blocks, entries)]
    assert (keys[0] == keys[1]) == same
