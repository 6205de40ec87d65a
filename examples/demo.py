"""The demo: a small model learns addition, first from examples, then by GRPO on four ranks.

    python examples/demo.py          # or: make demo

Everything is created under runs/arithmetic and runs on CPU with gloo: a character tokenizer and a random Qwen3 model,
a short supervised fine-tuning, then GRPO with an exact-match reward. A third program measures held-out accuracy, and
plain transformers measures it again from the checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from tiny import make_model, make_sums, write_jsonl

ROOT = Path("runs/arithmetic")
PROGRAMS = Path(__file__).parent
HELD_OUT = 500
STEPS = {"sft": 210, "grpo": 160}


def main() -> int:
    started = time.monotonic()
    prepare()
    accuracy = {"before": evaluate("base")}
    rlc("arithmetic_sft.rlf", ROOT / "run_sft", steps=STEPS["sft"])
    accuracy["SFT"] = evaluate("sft")
    rlc("arithmetic_grpo.rlf", ROOT / "run_grpo", steps=STEPS["grpo"])
    accuracy["GRPO"] = evaluate("grpo")
    theirs = plain_transformers(ROOT / "grpo")
    report(accuracy, theirs, time.monotonic() - started)
    return 0


def prepare() -> None:
    """Write the data and the random model with its tokenizer, as ordinary HuggingFace directories."""
    rows = make_sums(8_100, seed=0, low=10)
    write_jsonl(ROOT / "test.jsonl", rows[:HELD_OUT])
    write_jsonl(ROOT / "train.jsonl", rows[HELD_OUT:])
    make_model(ROOT / "base", characters="0123456789+=", scale=0.0, hidden_size=128, intermediate_size=256,
               num_hidden_layers=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=64)


def rlc(program: str, out: Path, **sets: object) -> None:
    """Compile and run one program; exit if it fails."""
    options = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    print(f"\n$ rlc run {PROGRAMS.name}/{program} {' '.join(options)} --out {out}", flush=True)
    command = [sys.executable, "-m", "rldsl.cli", "run", str(PROGRAMS / program), *options, "--out", str(out),
               "--overwrite"]
    code = subprocess.run(command).returncode
    if code:
        sys.exit(code)


def evaluate(model: str) -> float:
    out = ROOT / f"run_eval_{model}"
    rlc("arithmetic_eval.rlf", out, model_dir=ROOT / model)
    return last_metrics(out)["accuracy"]


def last_metrics(out: Path) -> dict[str, float]:
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])


def plain_transformers(directory: Path) -> dict[str, float]:
    """Evaluate the checkpoint with transformers alone: greedy accuracy, and the mean log-probability of its answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    right, total, tokens = 0, 0.0, 0
    for row in map(json.loads, (ROOT / "test.jsonl").read_text().splitlines()):
        prompt = tokenizer(row["prompt"], return_tensors="pt").input_ids
        with torch.no_grad():
            full = model.generate(prompt, max_new_tokens=4, do_sample=False)
            logits = model(full).logits[0, prompt.shape[1] - 1 : -1]
        answer = full[0, prompt.shape[1] :]
        right += tokenizer.decode(answer, skip_special_tokens=True).strip() == row["answer"]
        total += logits.log_softmax(-1).gather(1, answer[:, None]).sum().item()
        tokens += len(answer)
    return {"accuracy": right / HELD_OUT, "logprob": total / tokens}


def report(accuracy: dict[str, float], theirs: dict[str, float], seconds: float) -> None:
    ours = last_metrics(ROOT / "run_eval_grpo")
    summary = json.loads((ROOT / "run_grpo" / "summary.json").read_text())
    rule = "-" * 100
    print(f"\n{rule}\nheld-out accuracy ({HELD_OUT} sums)")
    for name, value in accuracy.items():
        print(f"  {name:<10}{value:7.1%}  {'#' * round(60 * value)}")
    print(f"  plain transformers on the checkpoint: {theirs['accuracy']:.1%}; mean log-prob of its answers "
          f"{theirs['logprob']:.6f}, ours {ours['logprob']:.6f}")
    print("parameters reallocated in each step")
    for move in summary["reallocs"]:
        print(f"  {move['model']:<8}{move['src']} -> {move['dst']}   {move['bytes']:,} bytes, {move['times']} times")
        print(f"          because {move['because']}")
    print(f"checkpoint\n  {ROOT / 'grpo'}\ntime\n  {seconds:.0f} s\n{rule}")
    same_answers = abs(theirs["accuracy"] - ours["accuracy"]) < 0.5 / HELD_OUT
    if not same_answers or abs(theirs["logprob"] - ours["logprob"]) > 1e-4:
        sys.exit("transformers and our evaluation disagree on the checkpoint")


if __name__ == "__main__":
    sys.exit(main())
