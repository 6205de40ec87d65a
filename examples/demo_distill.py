"""The demo of distillation: a student of 4 layers learns sums from a trained teacher of 8 layers.

    python examples/demo_distill.py          # or: make demo-distill

Everything is created under runs/distillation and runs on CPU in one process: a character tokenizer, a random teacher
that is trained on sums, and two students with the same random weights. Both see the same tokens, which the teacher
samples: one learns the tokens (SFT), the other the teacher's probabilities of all tokens (forward KL). The program
prints the held-out accuracy of both after every few steps, and fails if distillation is not ahead.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from tiny import make_model, make_sums, write_jsonl

ROOT = Path("runs/distillation")
PROGRAMS = Path(__file__).parent
HELD_OUT = 500
STEPS = {"teacher": 700, "students": 500}
LAYERS = {"base": 8, "student": 4}
SIZES = dict(characters="0123456789+=", scale=0.0, hidden_size=64, intermediate_size=128, head_dim=16,
             tie_word_embeddings=True, max_position_embeddings=64)


def main() -> int:
    started = time.monotonic()
    rows = make_sums(8_100, seed=0, low=10)
    write_jsonl(ROOT / "test.jsonl", rows[:HELD_OUT])
    write_jsonl(ROOT / "train.jsonl", rows[HELD_OUT:])
    for name, layers in LAYERS.items():
        make_model(ROOT / name, num_hidden_layers=layers, seed=layers, **SIZES)
    rlc("distill_teacher.rlf", ROOT / "run_teacher", steps=STEPS["teacher"])
    rlc("distill_students.rlf", ROOT / "run_students", steps=STEPS["students"])
    metrics = [json.loads(line) for line in (ROOT / "run_students" / "metrics.jsonl").read_text().splitlines()]
    return report([m for m in metrics if "distillation" in m], sum(m["teacher"] for m in metrics) / len(metrics),
                  time.monotonic() - started)


def rlc(program: str, out: Path, **sets: object) -> None:
    """Compile and run one program; exit if it fails."""
    options = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    print(f"\n$ rlc run {PROGRAMS.name}/{program} {' '.join(options)} --out {out}", flush=True)
    code = subprocess.run([sys.executable, "-m", "rldsl.cli", "run", str(PROGRAMS / program), *options, "--out",
                           str(out), "--overwrite"]).returncode
    if code:
        sys.exit(code)


def report(curve: list[dict[str, float]], teacher: float, seconds: float) -> int:
    """1 unless the student of distillation is ahead in the mean of the curve and at its end."""
    rule = "-" * 78
    print(f"\n{rule}\nheld-out accuracy ({HELD_OUT} sums); samples of the teacher are right in {teacher:.1%}\n"
          f"{'step':>6}{'distillation':>14}{'SFT':>9}")
    for m in curve:
        print(f"{m['step']:>6}{m['distillation']:>14.1%}{m['sft']:>9.1%}  {'#' * round(40 * m['distillation'])}")
    mean = {name: sum(m[name] for m in curve) / len(curve) for name in ("distillation", "sft")}
    print(f"{'mean':>6}{mean['distillation']:>14.1%}{mean['sft']:>9.1%}\ntime {seconds:.0f} s\n{rule}")
    ahead = mean["distillation"] > mean["sft"] and curve[-1]["distillation"] > curve[-1]["sft"]
    print("distillation is ahead" if ahead else "distillation is not ahead")
    return 0 if ahead else 1


if __name__ == "__main__":
    sys.exit(main())
