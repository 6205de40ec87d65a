"""How much of a step is hidden with `lag=1`: two processes, one generates and calls a slow reward, the other trains.

    python -m benchmarks.overlap [STEPS]

Each case is a whole run of a random model on two ranks, with and without the lag, and its recorded timeline
(`--trace`). The reward is a Python function that takes a second for each step. One side of a step is training, the
other one generation and reward. Printed, between the first training and the last but one:

- hidden: how much of the shorter side is done while the other one works, from the timeline, without the lag and with
  it;
- idle: the share of the time in which neither works: weights and rows are sent, or a rank waits;
- step: its time without the lag and with it, as medians, and what the lag saves of the shorter side. Where two busy
  ranks slow each other down, since they share caches, memory or cores, it saves less than it hides; so the last number
  is how much longer a training takes with the lag.

Cases: either side is the longer one, and rank 0 generates or trains. Gate: 0.9 hidden in every case with the lag, and
less than 0.1 without, since there the sides follow each other.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
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
    """Of a run."""

    training: float  # seconds of a step, median
    step: float  # seconds from the end of its training to that of the next, median
    hidden: float  # share of the shorter side that is done while the other one works
    idle: float  # share of the time in which no rank works


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
    call("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "rldsl.run", "p.plan", "--out", "out",
         "--overwrite", "--trace", "trace.json")
    return measured(json.loads((folder / "trace.json").read_text())["traceEvents"], steps)


def measured(events: list[dict], steps: int) -> Measured:
    """A step ends where its training does. A call begins to work when it has what it reads."""
    done = [e for e in events if e.get("ph") == "X"]
    spans = sorted((e for e in done if e["cat"] == "train"), key=lambda e: e["ts"])
    if len(spans) != steps:
        sys.exit(f"{len(spans)} of {steps} steps were recorded")
    ends = [e["ts"] + e["dur"] for e in spans]
    others = [e for e in done if e["cat"] == "generate" or e["name"] == "compute r"]
    sides = [Times.of((e["ts"] + 1e6 * e["args"]["waited"], e["ts"] + e["dur"]) for e in side).within(ends[0], ends[-2])
             for side in (spans, others)]
    either = Times.of(sides[0].spans + sides[1].spans).length
    both = sides[0].length + sides[1].length - either
    return Measured(statistics.median(e["dur"] for e in spans[1:-1]) / 1e6,
                    statistics.median(b - a for a, b in zip(ends[:-2], ends[1:-1], strict=True)) / 1e6,
                    both / min(side.length for side in sides), 1 - either / (ends[-2] - ends[0]))


@dataclass(frozen=True)
class Times:
    """Spans of time that do not touch, in order."""

    spans: tuple[tuple[float, float], ...]  # (start, stop), microseconds

    @staticmethod
    def of(spans: Iterable[tuple[float, float]]) -> Times:
        found: list[tuple[float, float]] = []
        for start, stop in sorted(spans):
            if found and start <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], stop))
            else:
                found.append((start, stop))
        return Times(tuple(found))

    def within(self, start: float, stop: float) -> Times:
        return Times(tuple((max(a, start), min(b, stop)) for a, b in self.spans if a < stop and b > start))

    @property
    def length(self) -> float:
        return sum(b - a for a, b in self.spans)


def main() -> None:
    steps, held = int(sys.argv[1]) if len(sys.argv) > 1 else 8, True
    with tempfile.TemporaryDirectory() as name:
        make_all(Path(name), tie_word_embeddings=True, num_hidden_layers=2)
        for case in CASES:
            plain, late = (run(Path(name), case, steps, lag) for lag in (0, 1))
            rest = plain.step - plain.training
            saved = (plain.step - late.step) / min(rest, plain.training)
            held = held and late.hidden >= GATE and plain.hidden < 1 - GATE
            print(f"{case.name:40} hidden {plain.hidden:4.2f} -> {late.hidden:4.2f}   idle {plain.idle:4.1%} -> "
                  f"{late.idle:4.1%}   step {plain.step:5.2f} s (training {plain.training:5.2f} s) -> {late.step:5.2f} s: "
                  f"{saved:4.2f} of the shorter side saved, a training {late.training / plain.training - 1:+.0%}",
                  flush=True)
    print("gate: held" if held else "gate: FAILED")
    sys.exit(not held)


if __name__ == "__main__":
    main()
