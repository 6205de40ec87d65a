"""Micro-batches by tokens (`mbt`): the same numbers as any other division, within the budget, known to every tool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rldsl import api
from rldsl.diag import Failure
from rldsl.memory import curves
from rldsl.memory.curve import during, each_rank
from rldsl.passes import pipeline
from rldsl.placement.place import place_graph
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Event, Generate, Infer, Item, Loop, Train
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.sharding.micro_batches import count_without_token_limit, micro_batches, num_micro_batches
from rldsl.simulate import simulate
from rldsl.verify import verify
from tests.compiler.graphs import family, on, ppo
from tests.end_to_end.programs import Metrics, run_program
from tests.frames import resized
from tests.library.harness import Batch, run_loss
from tests.samples import thorough_between
from tests.simulate.plans import ROUND
from tests.tiny import make_all

HERE = Path(__file__).parents[1]
GRPO = HERE / "end_to_end/grpo_small.rlf"
WIDE = 22  # a row of grpo_small: 16 of the prompt, 6 of the response

# ----------------------------------------------------------------------------------------------- division

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@given(lengths, st.integers(40, 200), st.integers(0, 6), st.integers(0, 6))
def test_every_row_once_and_within_the_budget(sizes: list[int], budget: int, limit: int, at_least: int) -> None:
    rows = range(len(sizes))
    parts = micro_batches(rows, sizes, limit, at_least, budget)
    assert sorted(r for p in parts for r in p) == list(rows) and all(parts)
    assert all(sum(sizes[r] for r in p) <= budget for p in parts)
    assert not limit or all(len(p) <= limit for p in parts)
    assert len(parts) >= min(at_least, len(sizes))
    assert parts == micro_batches(rows[::-1], sizes, limit, at_least, budget)
    assert num_micro_batches(rows, sizes, limit, at_least, budget) == len(parts)


@given(lengths, st.integers(40, 200))
def test_about_as_few_as_can_be(sizes: list[int], budget: int) -> None:
    """First fit, longest first, needs 11/9 of the fewest bins and one; evening them out may take another."""
    least = -(-sum(sizes) // budget)
    assert len(micro_batches(range(len(sizes)), sizes, 0, 1, budget)) <= 11 / 9 * max(
        least, len([s for s in sizes if 2 * s > budget])) * 1.5 + 2


@given(lengths, st.integers(0, 6), st.integers(1, 6))
def test_without_a_budget_nothing_changes(sizes: list[int], limit: int, at_least: int) -> None:
    rows = range(len(sizes))
    assert micro_batches(rows, sizes, limit, at_least, 0) == micro_batches(rows, sizes, limit, at_least, 10**6)
    assert num_micro_batches(rows, sizes, limit, at_least) == count_without_token_limit(len(sizes), limit, at_least)


def test_a_row_that_is_longer_is_alone() -> None:
    assert micro_batches(range(3), [50, 3, 4], 0, 1, 10) == ((0,), (1, 2))
    assert micro_batches((), [], 0, 1, 10) == ()


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("mbt", [30, 60, 1000])
@pytest.mark.parametrize("dp", [1, 3])
def test_losses_are_those_of_any_other_division(mbt: int, dp: int) -> None:
    """In float64, loss, gradients and metrics."""
    b = Batch.random(seed=1, prompts=6, n=4, max_len=20)
    given = dict(old=b.logprobs(4), adv=b.seqs(5), ref=b.logprobs(6))
    call = "grpo(old=old, adv=adv, ref=ref)"
    whole = run_loss("std.grpo", call, b, {"logprobs": b.logprobs(3)}, **given)
    found = run_loss("std.grpo", call, b, {"logprobs": b.logprobs(3)}, dp=dp, mbt=mbt, **given)
    assert found.loss == pytest.approx(whole.loss, rel=1e-10, abs=1e-10)
    assert found.metrics == {k: pytest.approx(v, rel=1e-10, abs=1e-10) for k, v in whole.metrics.items()}
    for name, gradient in whole.grads.items():
        assert (found.grads[name] - gradient).abs().max() < 1e-10


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


def grpo(tiny: Path, folder: Path, ranks: int, train: str, ref: str = "", like: Metrics | None = None) -> Metrics:
    # a large eps: where gradients are as small as rounding, Adam would make steps of full size out of it
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl"), "steps": 3, "eps": 1e-3}
    place = (f"cluster nodes=1 gpus={ranks}\nplace actor.train on mesh(0:{ranks}) {train}\n"
             f"place ref.* on mesh(0:{ranks}) {ref or 'dp=' + str(ranks)}\n")
    return run_program(GRPO, sets, folder, place, like=like)


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    return grpo(tiny, tmp_path_factory.mktemp("alone"), 1, "dp=1")


@pytest.mark.parametrize("ranks, train, ref", thorough_between([
    (1, f"dp=1 mbt={WIDE}", f"dp=1 mbt={2 * WIDE}"), (1, "dp=1 mbt=90 mbs=3", ""),
    (2, f"pp=2 mbt={2 * WIDE}", f"pp=2 mbt={WIDE}"), (2, f"dp=2 zero=3 mbt={WIDE + 3}", f"tp=2 mbt={3 * WIDE}"),
    (2, f"cp=2 mbt={2 * WIDE}", "")]))
def test_runs_have_the_same_numbers(tiny, alone, tmp_path, ranks, train, ref) -> None:
    for mine, theirs in zip(grpo(tiny, tmp_path, ranks, train, ref, alone), alone, strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}


def test_ranks_that_share_experts_make_as_many_passes(tmp_path) -> None:
    from tests.moe.shards import make
    from tests.tiny import make_sums, write_jsonl

    make(tmp_path / "mixtral", "mixtral")
    rows = write_jsonl(tmp_path / "prompts.jsonl", make_sums(64))
    sets = {"base": str(tmp_path / "mixtral"), "rows": str(rows), "steps": 2}

    def run(name: str, ranks: int, where: str, ref: str, like: Metrics | None = None) -> Metrics:
        place = (f"cluster nodes=1 gpus={ranks}\nplace actor.* on mesh(0:{ranks}) {where}\n"
                 f"place ref.* on mesh(0:{ranks}) {ref}\n")
        return run_program(GRPO, sets, tmp_path / name, place, like=like)

    expected = run("one", 1, "dp=1", "dp=1")
    found = run("two", 2, f"dp=2 ep=2 mbt={WIDE}", f"dp=2 ep=2 mbt={WIDE + 5}", expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}


# ------------------------------------------------------------------------------------------------ compiler

PROGRAM = """
use std.grpo (group_norm, grpo_free)
use std.dpo (dpo)
data prompts = jsonl("p.jsonl", batch=8, max_prompt_tokens=10)
data pairs = jsonl("q.jsonl", batch=8, max_prompt_tokens=10, max_answer_tokens=20)
model actor = causal_lm("m") train adamw(lr=1e-4)
flow run(steps=2) {{
  prompt = prompts.next()
  pair = pairs.next()
  gen = actor.generate(prompt, n=4, max_new_tokens=30)  on mesh(0:1) {0}
  lp = actor.logprobs(gen)  on mesh(0:1) {1}
  actor.train(gen, loss=grpo_free(old=lp, adv=group_norm(len(gen))))  on mesh(0:1) {2}
  one = actor.logprobs(pair.chosen)    on mesh(0:1)
  two = actor.logprobs(pair.rejected)  on mesh(0:1)
  actor.train(pair.chosen, pair.rejected, loss=dpo(ref_chosen=one, ref_rejected=two))  on mesh(0:1) {3}
}}
"""


@pytest.mark.parametrize("where, code, text", [
    ((0, "mbt=39"), "RL0328", "40 tokens"), ((1, "mbt=39"), "RL0328", "mbt=40"), ((2, "mbt=1"), "RL0328", "40 tokens"),
    ((3, "mbt=59"), "RL0328", "60 tokens"),  # both sides of a pair
    ((1, "mbt=1.5"), "RL0311", "at least 0"), ((1, "mbt=true"), "RL0311", "integer"),
    ((1, "mbt=64 sequences"), "RL0218", "tokens"), ((1, "mbt=64 mbt=64"), "RL0311", "twice"),
    ((1, "mtb=64"), "RL0310", "mbt")])
def test_what_cannot_be_is_refused(where, code, text) -> None:
    number, said = where
    [found] = api.check(PROGRAM.format(*(said if i == number else "" for i in range(4))), "p.rlf")
    assert found.code == code and text in f"{found.title} {found.label} {found.help}"


@pytest.mark.parametrize("number, said", [(0, "mbt=40 tokens"), (1, "mbt=40"), (2, "mbt=0"), (3, "mbt=60 mbs=2")])
def test_what_can_be_is_not(number, said) -> None:
    assert not api.check(PROGRAM.format(*(said if i == number else "" for i in range(4))), "p.rlf")


def planned(many: bool = True, **calls: dict) -> Plan:
    """PPO of ReaL on 8 ranks, with options for some calls. many: 128 rows of 64 tokens."""
    places = {"gen": on(1, 0, 8, dp=4, pp=2, **calls.get("gen", {})), "score": on(2, 2, 4, pp=2),
              "ref_lp": on(3, 4, 8, pp=4, **calls.get("ref_lp", {})), "v": on(4, 0, 2, dp=2),
              "critic.train": on(7, 4, 8, dp=2, pp=2),
              "actor.train": on(8, 0, 4, dp=2, pp=2, **calls.get("train", {}))}
    graph = ppo(places)
    if many:
        graph = replace(graph, frames=tuple(resized(f, 128, 1, 32, 32 * (f.id == "gen")) for f in graph.frames))
    return pipeline.planned(pipeline.run(place_graph(graph, "", family)), "test")[0]


def event(plan: Plan, kind: type[Event], model: str) -> Event:
    return next(e for e, _ in event_paths(plan) if isinstance(e, kind) and e.model == model)


def wide(plan: Plan) -> int:
    frame = next(f for f in plan.frames if f.id == "gen")
    return frame.max_prompt_tokens + frame.max_response_tokens


def test_the_plan_says_it_and_generation_gets_slots() -> None:
    longest = wide(planned())
    budget = 3 * longest + 1
    plan = planned(gen=dict(mbt=budget), ref_lp=dict(mbt=budget), train=dict(mbt=budget, mbs=2))
    assert event(plan, Infer, "ref").mbt == budget and event(plan, Train, "actor").mbt == budget
    assert event(plan, Train, "actor").mbs == 2 and event(plan, Generate, "actor").mbs == 3
    assert decode(encode(plan), "p").body == plan.body and b'"mbt"' not in encode(planned())


def _with(items: tuple[Item, ...], mbt: int) -> tuple[Item, ...]:
    return tuple(replace(x, mbt=mbt) if isinstance(x, Infer) and x.model == "ref" else
                 replace(x, body=_with(x.body, mbt)) if isinstance(x, Loop) else x for x in items)


@pytest.mark.parametrize("mbt", [-1, 1])
def test_a_plan_with_a_budget_that_cannot_be_is_refused(mbt: int) -> None:
    plan = planned(many=False)
    verify(replace(plan, body=_with(plan.body, 100 * wide(plan))))
    with pytest.raises(Failure) as failure:
        verify(replace(plan, body=_with(plan.body, mbt)))
    assert "RL0615" in {d.code for d in failure.value.diagnostics}


def test_memory_knows_it() -> None:
    longest = wide(planned())

    def activations(**said: int) -> int:
        plan = planned(train=said)
        e = event(plan, Train, "actor")
        return dict(during(dict(each_rank(curves(plan)))[0], e.id))["activations of actor.train"]

    assert activations(mbt=longest) < activations(mbt=8 * longest) < activations()
    assert activations(mbt=8 * longest) == activations(mbs=8)  # where every row is as long as it may be
    assert activations(mbt=10**9) == activations()


def test_the_simulator_knows_it() -> None:
    longest = wide(planned())
    whole, bounded, wider = (simulate(planned(train=said), ROUND).seconds
                             for said in ({}, dict(mbt=longest), dict(mbt=10**9)))
    assert bounded != whole == wider
