"""Decode steps of models with experts are captured on CPUs: experts are opaque calls, which run once in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rldsl.backends.torch.generate.captured_step import CaptureSwitch
from rldsl.backends.torch.generate.op_trace import OpTrace
from rldsl.backends.torch.kernels.opaque_calls import OpaqueStep
from rldsl.plan.events import Sampling
from tests.backend_torch.shards import layout_of, make_shard, plan_model, shard_of
from tests.families import tiny_configs
from tests.generation.reference import made, rows_of
from tests.megatron import shards as megatron
from tests.moe.shards import make
from tests.samples import thorough_unless
from tests.world import run_world

DRAWN = Sampling(max_new_tokens=12, temperature=1.3, top_k=30)
GREEDY = Sampling(max_new_tokens=9, greedy=True)
PROMPTS = [[2 + (i * j) % 40 for j in range(3 + i % 4)] for i in range(6)]
LAYERS = 2  # of the models
Calls = list[tuple[list[list[int]], Sampling]]  # for each place in dp its prompts, and how it samples


def compared(shard: Any, prompts: list[list[int]], sampling: Sampling, first: int = 0) -> list[Any]:
    """[whether captures change nothing, opaque calls of each trace with them, traces without them]."""
    found: dict[str, Any] = {}
    traces: dict[str, list[OpTrace]] = {}
    for name, switch in (("captured", CaptureSwitch()), ("plain", CaptureSwitch(False))):
        states: dict[Any, Any] = {}
        rows = range(first, first + len(prompts))
        found[name] = [rows_of(made(shard, prompts, sampling, 4, rows, capture=switch, states=states)) for _ in range(3)]
        traces[name] = [x for state in states.values() for x in state.decode_steps.captures.values()
                        if isinstance(x, OpTrace)]
    calls = [sum(isinstance(op, OpaqueStep) for op in x.ops) for x in traces["captured"]]
    return [found["captured"] == found["plain"], calls, len(traces["plain"])]


@pytest.mark.parametrize("family, dtype, invariant, sampling", thorough_unless(
    lambda *case: case in [("qwen3_moe", "bfloat16", False, DRAWN), ("mixtral", "float32", True, DRAWN),
                           ("shared", "float32", False, GREEDY)],
    [(family, dtype, invariant, sampling) for family in ("mixtral", "qwen3_moe", "shared")
     for dtype in ("float32", "bfloat16") for invariant in (False, True) for sampling in (DRAWN, GREEDY)]))
def test_generation_replays_steps_with_experts(family: str, dtype: str, invariant: bool, sampling: Sampling,
                                               tmp_path: Any) -> None:
    """In bfloat16 under autocast; an invariant model in a mode of functions. Replays enter both again."""
    model = replace(plan_model(make(tmp_path / "m", family), dtype=dtype), invariant=invariant)
    same, calls, plain = compared(make_shard(model, 0), PROMPTS, sampling)
    assert same and set(calls) == {LAYERS} and not plain


def divided(rank: int, path: str, degrees: dict[str, int], calls: Calls, dtype: str) -> list[Any]:
    made_here = shard_of(plan_model(path, dtype=dtype), layout_of(**degrees), rank)
    assert made_here is not None
    shard, place = made_here
    return compared(shard, *calls[place], 10 * place)


TWICE: Calls = [(PROMPTS[:3], DRAWN), (PROMPTS[3:], DRAWN)]
# other rows, lengths and limits: the ranks capture other steps, at other calls, and one is done before the other
UNEQUAL: Calls = [(PROMPTS[:5], DRAWN), ([[5] * 40, [7, 8]], replace(DRAWN, max_new_tokens=29))]
NO_ROWS: Calls = [(PROMPTS[:3], DRAWN), ([], DRAWN)]
LAYOUTS: list[tuple[str, dict[str, int], Calls, str]] = [
    ("tp", dict(tp=2), TWICE, "float32"),
    ("ep", dict(dp=2, ep=2), TWICE, "float32"),
    ("ep, unequal", dict(dp=2, ep=2), UNEQUAL, "float32"),
    ("ep, unequal, bfloat16", dict(dp=2, ep=2), UNEQUAL, "bfloat16"),
    ("ep, a rank without rows", dict(dp=2, ep=2), NO_ROWS, "float32"),
    ("ep and tp", dict(dp=2, ep=2, tp=2), UNEQUAL, "float32"),
    ("ep and tp, bfloat16", dict(dp=2, ep=2, tp=2), UNEQUAL, "bfloat16"),
    ("ep and pp", dict(dp=2, ep=2, pp=2), UNEQUAL, "float32")]


@pytest.mark.parametrize("name, degrees, calls, dtype", thorough_unless(
    lambda name, *_: name in ("tp", "ep, unequal", "ep, a rank without rows"), LAYOUTS))
def test_ranks_that_divide_experts_replay_steps(name: str, degrees: dict[str, int], calls: Calls, dtype: str,
                                                tmp_path: Any) -> None:
    """A rank that replays a step and one that runs it, or captures or compares it, communicate equally often."""
    path = make(tmp_path / "m", "qwen3_moe")
    ranks = degrees.get("tp", 1) * degrees.get("dp", 1) * degrees.get("pp", 1)
    found = run_world(ranks, divided, path, degrees, calls, dtype)
    of_stage = LAYERS // degrees.get("pp", 1)
    for same, traced, plain in found:
        assert same and set(traced) <= {of_stage} and not plain
    with_traces = [bool(traced) for _, traced, _ in found]
    assert with_traces.count(True) == (1 if name == "ep, a rank without rows" else ranks)


@pytest.mark.parametrize("family, dtype, called", [
    ("longcat_flash", "float32", 4), ("longcat_flash", "bfloat16", 4), ("gpt_oss", "float32", 0)])
def test_experts_in_another_form_are_run(family: str, dtype: str, called: int, tmp_path: Any) -> None:
    """By transformers' own code, which in some families reads on the host which experts were chosen: then it is an
    opaque call."""
    path = tiny_configs.make(tmp_path / "m", family)
    same, calls, plain = compared(make_shard(replace(plan_model(path), dtype=dtype), 0), PROMPTS, DRAWN)
    assert same and set(calls) == {called} and not plain


@pytest.mark.parametrize("family, captured", [("gpt2", True), ("nemotron_h", False)])
def test_families_of_other_forms(family: str, captured: bool, tmp_path: Any) -> None:
    """GPT-2's code looks for padding tokens on the host, to warn. Nemotron-H's sequences are rows, which a step runs
    from their beginning: no two steps have the same shapes."""
    path = tiny_configs.make(tmp_path / "m", family)
    same, calls, plain = compared(make_shard(plan_model(path), 0), PROMPTS, DRAWN)
    assert same and bool(calls) == captured and not any(calls) and not plain


def on_megatron(rank: int, path: str, calls: Calls) -> list[Any]:
    made_here = megatron.shard_of(plan_model(path), megatron.layout_of(dp=2, ep=2), rank)
    assert made_here is not None
    shard, place = made_here
    return compared(shard, *calls[place], 10 * place)


def test_experts_of_megatron_are_opaque_calls(tmp_path: Any) -> None:
    megatron.needed()
    for same, calls, plain in run_world(2, on_megatron, megatron.make(tmp_path, "qwen3_moe"), UNEQUAL):
        assert same and set(calls) == {LAYERS} and not plain


def mixed(rank: int, path: str, calls: Calls) -> list[Any]:
    """Rank 1 captures nothing."""
    made_here = shard_of(plan_model(path), layout_of(dp=2, ep=2), rank)
    assert made_here is not None
    shard, place = made_here

    def generated(captured: Sequence[bool]) -> list[Any]:
        return [rows_of(made(shard, *calls[place], 4, range(len(calls[place][0])), states=states,
                             capture=CaptureSwitch(captured[rank]))) for states in [{}] for _ in range(3)]

    return [generated([True, False]) == generated([False, False])]


def test_each_rank_of_ep_decides_alone(tmp_path: Any) -> None:
    assert run_world(2, mixed, make(tmp_path / "m", "mixtral"), TWICE) == [[True]] * 2
