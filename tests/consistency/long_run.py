"""A program with an implicit process reward model (Cui et al. 2025, arXiv:2502.01456) on one rank and on two.

    python -m tests.consistency.long_run [--steps 200] [--place "dp=2"] [--plain]

Two models are trained on what one of them generates, so a token that rounding moves changes everything after it. With
`invariant=training` the metrics of all steps are equal, bit for bit; with --plain, without it, the first step that
differs is printed. The exit status is 1 if a run with `invariant=training` parts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.end_to_end.programs import Metrics, run_program
from tests.end_to_end.test_invariance import HERE, everywhere
from tests.tiny import make_model, make_sums, write_jsonl

PROGRAM = """
use std.grpo (group_norm, grpo_free)
use py "rewards_small.py" (digits: gen -> seq)

param base = "base"
param rows = "rows.jsonl"
param steps = 200

data prompts = jsonl(rows, batch=2, max_prompt_tokens=16)
model actor = causal_lm(base, invariant=training) train adamw(lr=1e-3, clip_grad=0.5)
model prm   = causal_lm(base, invariant=training) train adamw(lr=1e-3, clip_grad=0.5)
model ref   = causal_lm(base, invariant=true)

# The log-ratio of a model to a reference is a reward for each token; it is trained on the outcome alone.
loss outcome(logprobs: token; ref: token, good: seq) {
  score = 0.5 * sum(logprobs - ref by seq)
  return -mean(good * log(sigmoid(score)) + (1 - good) * log(sigmoid(-score)))
}

flow prime(steps=steps, seed=11) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=8, temperature=0.9)
  ref_lp = ref.logprobs(gen)
  right  = digits(gen)
  good   = where(right > 0, 1, 0)
  prm.train(gen, loss=outcome(ref=ref_lp, good=good))
  prm_lp = prm.logprobs(gen)
  adv    = group_norm(right + 0.5 * sum(prm_lp - ref_lp by seq))
  metric reward = mean(right)
  metric implicit = mean(prm_lp - ref_lp)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=adv))
}
"""


def runs(folder: Path, steps: int, place: str, invariant: bool = True) -> tuple[Metrics, Metrics]:
    """On one rank, and on the two of `place`."""
    model = make_model(folder / "m", num_hidden_layers=2)
    write_jsonl(folder / "rows.jsonl", make_sums(64))
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    text = PROGRAM if invariant else PROGRAM.replace(", invariant=training", "").replace(", invariant=true", "")
    (folder / "prime.rlf").write_text(text)
    sets = {"base": str(model), "rows": str(folder / "rows.jsonl"), "steps": steps}
    names = "actor", "prm", "ref"
    one, two = (run_program(folder / "prime.rlf", sets, folder / name, everywhere(ranks, where, *names), timeout=3600)
                for name, ranks, where in (("one", 1, "dp=1"), ("two", 2, place)))
    return one, two


def parted(one: Metrics, two: Metrics) -> int:
    """The first step whose metrics differ; 0 if none does."""
    assert len(one) == len(two)
    return next((int(a["step"]) for a, b in zip(one, two) if a != b), 0)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--place", default="dp=2")
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as place:
        step = parted(*runs(Path(place), given.steps, given.place, not given.plain))
    print(f"{given.steps} steps on 1 rank and with {given.place}: " + (f"parted in step {step}" if step else "equal"))
    return int(step > 0 and not given.plain)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
