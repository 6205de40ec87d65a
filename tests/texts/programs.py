"""Programs in which text crosses from one model to another, with another tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.end_to_end.programs import Metrics, run_text
from tests.tiny import CHARACTERS, make_model

HERE = Path(__file__).parent
OTHER = "".join(reversed(CHARACTERS)) + "AB:"  # the same letters under other ids
HEAD = """
use py "{judges}" (ask: gen -> prompts(max_tokens=most, over_long={over_long}), ask_some: gen -> prompts?(max_tokens=12),
                   rewrite: prompt -> prompts(max_tokens=32), grade: verdict, gen -> seq, prefers: a, b -> seq,
                   short: gen -> seq, revise: critique, gen -> prompts(max_tokens=32))
use std.grpo (group_norm)
param most = {most}
data prompts = jsonl("prompts.jsonl", batch=4, max_prompt_tokens=16, shuffle=false)
model actor = causal_lm("model") train adamw(lr=0.01)
model judge = causal_lm("judge"){train}
loss pg(logprobs: token; adv: seq) {{ return -mean(mean(adv * logprobs by seq)) }}
"""
SELF_REWARDING = """
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=6)
  verdict = judge.generate(ask(gen), n=3, max_new_tokens=5)
  r = mean(grade(verdict, gen) by prompt)
  actor.train(gen, loss=pg(adv=group_norm(r + 0.1 * len(gen))), minibatches=2)
  metric reward = mean(r)
  metric spread = mean(std(r by prompt))
  metric long = mean(len(verdict))
  metric best = mean(max(r by prompt))
  metric likely = mean(sum(verdict.logprobs by seq))
  metric apart = mean(abs(grade(verdict, gen) - r))
"""


def folder(base: Path) -> Path:
    """A directory with two models, whose tokenizers differ, and data."""
    make_model(base / "model", num_hidden_layers=2)
    make_model(base / "judge", num_hidden_layers=2, characters=OTHER, seed=3)
    rows = [{"prompt": f"{i}+{i * 7 % 10}=", "answer": str(i + i * 7 % 10), "number": i} for i in range(24)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return base


def text(body: str, *, steps: int = 3, most: int = 64, over_long: str = "error") -> str:
    train = " train adamw(lr=0.01)" if "judge.train" in body else ""
    head = HEAD.format(judges=HERE / "judges.py", train=train, most=most, over_long=over_long)
    return f"{head}\nflow f(steps={steps}) {{\n{body}\n}}\n"


def run(base: Path, body: str, out: str = "run", *, place: str | None = None, like: Metrics | None = None,
        **more: Any) -> Metrics:
    """The metrics of a flow with these statements."""
    return run_text(base, text(body, **more), out, place, like)
