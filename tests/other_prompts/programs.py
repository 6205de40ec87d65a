"""Programs in which a teacher reads the responses of a student behind prompts of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.end_to_end.programs import Metrics, run_text
from tests.tiny import make_model

HERE = Path(__file__).parent
HEAD = """
use py "{hints}" (ask: gen -> prompts(max_tokens=most, over_long={over_long}), hint: prompt -> prompts(max_tokens=40),
                  nothing: gen -> prompts(max_tokens=8), number: gen -> prompts(max_tokens=8),
                  nobody: gen -> prompts(max_tokens=8),
                  fails: gen -> prompts(max_tokens=8))
use std.gkd (gkd)
use std.sdft (sdft, sdft_sampled)
param most = {most}
data prompts = jsonl("prompts.jsonl", batch=4, max_prompt_tokens=16, shuffle=false)
model student = causal_lm("model") train {optimizer}
model other   = causal_lm("model") train {optimizer}
model teacher = causal_lm("teacher")
model judge   = reward_model("judge")
"""


def folder(base: Path) -> Path:
    """A directory with models of one tokenizer, and data."""
    make_model(base / "model", num_hidden_layers=2)
    make_model(base / "teacher", num_hidden_layers=2, seed=3)
    make_model(base / "judge", num_hidden_layers=2, seed=4, head="reward")
    rows = [{"prompt": f"{i}+{i * 7 % 10}=", "answer": str(i + i * 7 % 10), "number": i} for i in range(24)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return base


def text(body: str, *, steps: int = 2, lag: int = 0, most: int = 64, over_long: str = "error",
         optimizer: str = "sgd(lr=0.05, clip_grad=0)") -> str:
    head = HEAD.format(hints=HERE / "hints.py", most=most, over_long=over_long, optimizer=optimizer)
    return f"{head}\nflow f(steps={steps}, lag={lag}) {{\n{body}\n}}\n"


def run(base: Path, body: str, out: str = "run", *, place: str | None = None, like: Metrics | None = None,
        **more: Any) -> Metrics:
    """The metrics of a flow with these statements."""
    return run_text(base, text(body, **more), out, place, like)
