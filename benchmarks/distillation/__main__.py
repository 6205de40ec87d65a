"""Distillation of distributions against supervised fine-tuning on the same tokens.

    python -m benchmarks.distillation [FOLDER] [--jobs N] [--write]

The task is the demo's: sums of two numbers of two digits, one token per character. A fifth of the answers of the
training data are wrong, and nothing says which. The teacher, with 8 layers, is trained on all of these rows. A student
is every second of its layers, so it has to learn again what the other half knew. Two such students get the same 1,920
rows, ten times each, in the same order: one learns their answers (`sft`), the other what the teacher thinks at each of
their tokens (`gkd(beta=0)`, the forward KL over the whole vocabulary). Either learning rate is the one of RATES with
the highest accuracy at the end on `CHOICE`, whose rows, order and sums are not those of what is reported: 500 other
sums that no one is trained on, for each seed of SEEDS, which draws the 1,920 rows and their order.

FOLDER keeps data, models and runs: what is there is not made again. --jobs: how many runs at the same time. --write:
also write results.json, and the table and the curve of docs/distillation.md. The exit status is 1 if distillation is
not ahead on average at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.distillation.report import DOCS, RESULTS, Results, table, write
from tests.tiny import make_model, make_sums, write_jsonl

PROGRAMS = Path(__file__).parent
SIZES: dict[str, Any] = dict(characters="0123456789+=", scale=0.0, hidden_size=64, intermediate_size=128, head_dim=16,
                             tie_word_embeddings=True, max_position_embeddings=64)
WRONG = 0.2  # of the answers of the training data
HELD_OUT = 500  # sums, once for the choice of learning rates and once for the results
LAYERS = 8


@dataclass(frozen=True)
class Protocol:
    """Everything that decides about the results; fixed before the reported seeds were run."""

    teacher_steps: int = 2000
    student_rows: int = 1920
    student_steps: int = 300
    period: int = 50  # steps between two points of the curve
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3)
    choice: int = 0  # the seed with which learning rates are chosen
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.distillation")
    options.add_argument("folder", nargs="?")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--write", action="store_true")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(Path(given.folder or scratch).absolute(), Protocol(), given.jobs)
    print(table(results))
    if given.write:
        write(results, RESULTS, DOCS)
    return 0 if results.is_ahead else 1


def measure(folder: Path, protocol: Protocol, jobs: int = 1) -> Results:
    """Run what is missing in `folder`."""
    prepare(folder, protocol)
    run(folder, "teacher", "teacher", steps=protocol.teacher_steps)
    make_student(folder / "teacher", folder / "student")
    with ThreadPoolExecutor(jobs) as pool:
        searched = list(pool.map(lambda rate: students(folder, protocol, protocol.choice, "choice", rate, rate),
                                 protocol.rates))
        best = [max(zip(protocol.rates, searched, strict=True), key=lambda x, m=model: x[1][-1][f"{m}_accuracy"])[0]
                for model in ("distilled", "plain")]
        curves = list(pool.map(lambda seed: students(folder, protocol, seed, "test", *best), protocol.seeds))
    return Results(
        teacher=curves[0][-1]["teacher_accuracy"], rates=dict(zip(("distilled", "plain"), best, strict=True)),
        search={f"{rate:g}": searched[i] for i, rate in enumerate(protocol.rates)},
        curves={str(seed): curves[i] for i, seed in enumerate(protocol.seeds)})


def prepare(folder: Path, protocol: Protocol) -> None:
    """The data and the random model."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, draw = make_sums(8_100, seed=0, low=10), random.Random(5)
    write_jsonl(folder / "test.jsonl", rows[:HELD_OUT])
    write_jsonl(folder / "choice.jsonl", rows[HELD_OUT : 2 * HELD_OUT])
    noisy = [row if draw.random() >= WRONG else row | {"answer": str(draw.randint(20, 198))}
             for row in rows[2 * HELD_OUT :]]
    write_jsonl(folder / "train.jsonl", noisy)
    for seed in (protocol.choice, *protocol.seeds):
        write_jsonl(folder / f"rows{seed}.jsonl", random.Random(seed).sample(noisy, protocol.student_rows))
    if not (folder / "base").exists():
        make_model(folder / "base", num_hidden_layers=LAYERS, seed=8, **SIZES)


def make_student(teacher: Path, student: Path) -> None:
    """Every second layer of the teacher, and the rest of it."""
    from torch import nn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(teacher)
    model.model.layers = nn.ModuleList(model.model.layers[::2])
    model.config.num_hidden_layers = len(model.model.layers)
    model.config.layer_types = model.config.layer_types[::2]
    model.save_pretrained(student)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(student)


def students(folder: Path, protocol: Protocol, seed: int, held: str, distilled: float,
             plain: float) -> list[dict[str, float]]:
    """The metrics of both students at each point of the curve. The last point has the teacher's, too."""
    lines = run(folder, "students", f"students_{held}_{seed}_{distilled:g}_{plain:g}", rows=f"rows{seed}.jsonl",
                held=f"{held}.jsonl", distilled_rate=distilled, plain_rate=plain, steps=protocol.student_steps,
                period=protocol.period, seed=seed)
    kept = ("step", "distilled_accuracy", "plain_accuracy", "distilled_nll", "plain_nll", "teacher_accuracy")
    return [{k: round(line[k], 4) for k in kept if k in line} for line in lines if "plain_nll" in line]


def run(folder: Path, program: str, name: str, **sets: object) -> list[dict[str, float]]:
    """The metrics of a run, by step."""
    out = folder / "runs" / name
    if not (out / "summary.json").exists():
        options = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
        done = subprocess.run([sys.executable, "-m", "rldsl.cli", "run", str(PROGRAMS / f"{program}.rlf"), *options,
                               "--out", str(out), "--overwrite", "--plain"], cwd=folder, capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            sys.exit(f"{name}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
        print(f"{name} is done", flush=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
