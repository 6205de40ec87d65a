"""Whole programs on several backends: their metrics, and every token that they sample."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rldsl.plan.metrics_file import MEASURED
from rldsl.runtime.metrics.names import computed
from tests.end_to_end.programs import Metrics, compile_program
from tests.end_to_end.test_invariance import placement
from tests.megatron.shards import on_cpu
from tests.world import run_world

END_TO_END = Path(__file__).parents[1] / "end_to_end"
EXAMPLES = Path(__file__).parents[2] / "examples"
GRPO = END_TO_END / "grpo_small.rlf"
Samples = dict[tuple[int, int], tuple[int, ...]]  # (step, row) -> its tokens, prompt and response


def compiled(program: Path, sets: dict[str, Any], place: str, folder: Path) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    return compile_program(program, sets, place, folder)


def grpo(tiny: Path, folder: Path, **calls: str) -> bytes:
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    return compiled(GRPO, sets, placement(4, **calls), folder)


def results(plans: list[bytes], folder: Path, world: int, run: Any = None) -> list[tuple[Metrics, Samples]]:
    """Of each plan, in one world; all get the responses of the first. run: in the place of `execute`."""
    ranks = run_world(world, run or execute, plans, str(folder / "out"), os.getcwd(), timeout=240.0)
    found = []
    for i in range(len(plans)):
        lines = [json.loads(x) for x in (folder / f"out/{i}/metrics.jsonl").read_text().splitlines()]
        sampled: Samples = {}
        for key, tokens in (item for rank in ranks for item in rank[i].items()):
            assert sampled.setdefault(key, tokens) == tokens, "ranks of one shard sample differently"
        steps = ({k: line[k] for k in computed(line)} for line in lines)
        found.append((Metrics(steps, folder / "out/responses"), sampled))
    return found


def execute(rank: int, plans: list[bytes], out: str, cwd: str) -> list[Samples]:
    """What this rank sampled under each plan."""
    import torch.distributed as dist

    from rldsl.backends.torch.shard import TorchShard
    from rldsl.runtime.interpreter import interpreter
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile
    from tests.responses import followed, recorded

    plain, found = TorchShard.generate, [Samples() for _ in plans]

    def noted(shard: Any, *args: Any, step: int, **rest: Any) -> Any:
        made = plain(shard, *args, step=step, **rest)
        lens = (made.batch.prompt_lens + made.batch.response_lens).tolist()
        for row, tokens in zip(made.batch.rows.tolist(), made.batch.tokens.split(lens)):
            found[i][step, row] = tuple(tokens.tolist())
        return made

    TorchShard.generate = noted  # type: ignore[method-assign]
    on_cpu()
    os.chdir(cwd)
    responses = Path(out) / "responses"
    for i, data in enumerate(plans):
        with followed(responses) if i else recorded(responses):
            plan = PlanFile.from_bytes(data, "test.plan")
            interpreter.execute(plan, f"{out}/{i}", options=Options(allow_write=(out,)))
        dist.barrier()  # every rank has written its own
    return found


def alike(found: Metrics, expected: Metrics) -> None:
    assert len(found) == len(expected) >= 3
    for step, (mine, theirs) in enumerate(zip(found, expected), 1):
        for name, value in theirs.items():
            if not name.startswith(MEASURED):
                assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-5), f"step {step}: {name}"
