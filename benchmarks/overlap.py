"""How much of a step is hidden with `lag=1`: two processes, one generates and calls a slow reward, the other trains.

    python -m benchmarks.overlap [STEPS]

Each case is a whole run of a random model on two ranks, with and without the lag, and its recorded timeline
(`--trace`). The reward is a Python function that takes a second for each step. Printed, as medians over the steps
between the first and the last: the time of a step without the lag and its two sides, training and the rest (generation,
reward, weights and rows sent); the time of a step with it; the bound, which is the longer side; and how much of the
shorter side is hidden: what the lag saves over it. Cases: either side is the longer one, and rank 0 generates or
trains. Gate: 0.9 hidden in every case.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.tiny import make_all

REWARD = '''import time


def slow(rows):
    time.sleep(len(rows) / {rows})
    return [float(len(set(row["completion_ids"]))) for row in rows]
'''
PROGRAM = '''use std.grpo (group_norm, grpo_free)
use py "reward.py" (slow: gen -> seq)
cluster nodes=1 gpus=2
data prompts = jsonl("data/prompts.jsonl", batch={prompts}, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-4, eps=1e-3)
flow run(steps={steps}, seed=3, lag={lag}) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n={n}, max_new_tokens={tokens}, min_new_tokens={tokens}) on mesh({g}:{g1})
  r      = slow(gen)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(r)), epochs={epochs}) on mesh({t}:{t1})
  metric reward = mean(r)
}}
'''
GATE = 0.9


@dataclass(frozen=True)
class Case:
    """What a step does: {prompts} x {n} responses, trained on `epochs` times."""

    name: str
    generates: int  # the rank that does; the other one trains
    prompts: int
    n: int
    tokens: int
    epochs: int


CASES = (
    Case("generation is longer, rank 0 generates", 0, 12, 8, 90, 8),
    Case("generation is longer, rank 0 trains", 1, 12, 8, 90, 8),
    Case("training is longer, rank 0 generates", 0, 12, 8, 60, 40),
    Case("training is longer, rank 0 trains", 1, 12, 8, 60, 40),
)


@dataclass(frozen=True)
class Measured:
    """Seconds, medians."""

    training: float  # of a step
    step: float  # from the end of its training to that of the next


def run(folder: Path, case: Case, steps: int, lag: int) -> Measured:
    g, t = case.generates, 1 - case.generates
    (folder / "reward.py").write_text(REWARD.format(rows=case.prompts * case.n))
    (folder / "p.rlf").write_text(PROGRAM.format(
        prompts=case.prompts, n=case.n, tokens=case.tokens, epochs=case.epochs, steps=steps, lag=lag, g=g, g1=g + 1,
        t=t, t1=t + 1))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def call(*command: str) -> None:
        done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True,
                              text=True)
        if done.returncode:
            sys.exit(done.stderr[-3000:])

    call("-c", "from rldsl.rlc import main; main()", "compile", "p.rlf", "-o", "p.plan")
    call("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "rldsl.run", "p.plan", "--out", "out", "--overwrite",
         "--trace", "trace.json")
    return measured(json.loads((folder / "trace.json").read_text())["traceEvents"], steps)


def measured(events: list[dict], steps: int) -> Measured:
    """A step ends where its training does."""
    spans = sorted((e for e in events if e.get("ph") == "X" and e["name"].endswith(".train")), key=lambda e: e["ts"])
    if len(spans) != steps:
        sys.exit(f"{len(spans)} of {steps} steps were recorded")
    ends = [e["ts"] + e["dur"] for e in spans]
    return Measured(statistics.median(e["dur"] for e in spans[1:-1]) / 1e6,
                    statistics.median(b - a for a, b in zip(ends[:-2], ends[1:-1], strict=True)) / 1e6)


def main() -> None:
    steps, held = int(sys.argv[1]) if len(sys.argv) > 1 else 8, True
    with tempfile.TemporaryDirectory() as name:
        make_all(Path(name), tie_word_embeddings=True, num_hidden_layers=2)
        for case in CASES:
            plain, late = (run(Path(name), case, steps, lag) for lag in (0, 1))
            rest = plain.step - plain.training
            hidden = (plain.step - late.step) / min(rest, plain.training)
            held = held and hidden >= GATE
            print(f"{case.name:40} step {plain.step:5.2f} s: training {plain.training:5.2f} s, the rest {rest:5.2f} s   "
                  f"lag=1: step {late.step:5.2f} s, bound {max(rest, plain.training):5.2f} s   hidden {hidden:5.2f}",
                  flush=True)
    print("gate: held" if held else "gate: FAILED")
    sys.exit(not held)


if __name__ == "__main__":
    main()
