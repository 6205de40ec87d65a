"""A small program of which nearly everything that runs do can be seen, and runs of it in forked gloo worlds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rldsl.runtime.metrics.reporter import ReportOptions
from tests.end_to_end.programs import compile_program
from tests.world import run_world

TEXT = """
use std.grpo (group_norm, grpo)
use py "rewards.py" (digits: gen -> seq)
param steps = 3
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
model ref   = causal_lm("models/sft")
flow small(steps=steps, seed=7) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=5)
  ref_lp = ref.logprobs(gen)
  reward = digits(gen)
  metric reward = mean(reward)
  metric length = mean(len(gen))
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(reward), ref=ref_lp, beta=0.05), minibatches=2)
}
"""
REWARDS = "def digits(rows):\n    return [float(sum(c.isdigit() for c in row['completion'])) for row in rows]\n"
ALONE = "cluster nodes=1 gpus=1\n"
TWO = "cluster nodes=1 gpus=2\nplace actor.generate on mesh(0:2) dp=2\nplace actor.train on mesh(0:2) tp=2\n" \
      "place ref.* on mesh(1:2)\n"


def plan(folder: Path, place: str = ALONE, text: str = TEXT, **sets: Any) -> bytes:
    """Compiled in the working directory, where models and data are."""
    Path("rewards.py").write_text(REWARDS)
    Path("p.rlf").write_text(text)
    return compile_program(Path("p.rlf"), sets, place, folder)


def run(data: bytes, out: Path, asked: ReportOptions = ReportOptions(), again: bool = False) -> list[str]:
    """What each rank said on stderr."""
    world = json.loads(data.splitlines()[0])["world"]
    return run_world(world, _rank, data, str(out), asked, again, os.getcwd())


def _rank(rank: int, data: bytes, out: str, asked: ReportOptions, again: bool, cwd: str) -> str:
    import io
    import sys

    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.metrics.run_record import claim_output
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(cwd)
    before, sys.stderr = sys.stderr, io.StringIO()
    try:
        claimed = claim_output(Path(out), None, again)
        execute(PlanFile.from_bytes(data, "test.plan"), out, options=Options(
            resume=claimed.resume, continues=claimed.continues, overwrite=not claimed.continues, reporting=asked))
        return sys.stderr.getvalue()
    finally:
        sys.stderr = before


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
