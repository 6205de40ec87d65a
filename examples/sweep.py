"""A sweep of learning rate and KL weight with Optuna: bad trials end early.

    python examples/tiny.py runs/tiny
    pip install 'rldsl[all]' optuna
    python examples/sweep.py runs/tiny/models/sft runs/tiny/data/prompts.jsonl 12

Each trial is a separate run below runs/sweep, which `rlc runs runs/sweep` lists and `rlc plot` draws.
"""

from __future__ import annotations

import sys
from pathlib import Path

import optuna

import rldsl

PROGRAM = """use std.grpo (group_norm, grpo)
use py "rewards.py" (close: gen -> seq)

param base = ""
param rows = ""
param lr   = 1e-4
param beta = 0.01

data  prompts = jsonl(rows, batch=8, max_prompt_tokens=8)
model actor   = causal_lm(base)  train adamw(lr=lr)
model ref     = causal_lm(base)

flow sweep(steps=10, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=4)
  ref_lp = ref.logprobs(gen)
  reward = close(gen)
  metric reward = mean(reward)
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(reward), ref=ref_lp, beta=beta))
}
"""
OUT = Path("runs/sweep")


def close(rows):
    """The more digits, the better."""
    return [sum(c.isdigit() for c in row["completion"]) / 4 for row in rows]


def trial(base: str, rows: str, trial: optuna.Trial) -> float:
    """The mean reward of the last steps."""
    def report(step: dict[str, float]) -> bool:  # after each step; True ends the run
        trial.report(step["reward"], int(step["step"]))
        return trial.should_prune()

    values = {"lr": trial.suggest_float("lr", 1e-5, 1e-2, log=True), "beta": trial.suggest_float("beta", 0.0, 0.1)}
    run = rldsl.train(PROGRAM, {"base": base, "rows": rows, **values}, rewards={"close": close}, callbacks=[report],
                      out=OUT / f"trial-{trial.number}", overwrite=True, quiet=True)
    if run.state == "stopped":
        raise optuna.TrialPruned
    return sum(line["reward"] for line in run.lines[-3:]) / 3


def main(base: str, rows: str, trials: int) -> optuna.Study:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=1),
                                pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=3))
    study.optimize(lambda t: trial(base, rows, t), n_trials=trials)
    print(f"best reward {study.best_value:.3f} with {study.best_params}")
    return study


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
