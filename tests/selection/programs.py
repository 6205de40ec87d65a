"""Small programs with selections, run in real worlds. Data and model are made once for each test session."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.end_to_end.programs import Metrics, run_program
from tests.tiny import make_model

HERE = Path(__file__).parent
HEAD = """
use py "{rewards}" (parity: gen -> seq, spread: gen -> seq, column: gen -> seq)
use std.grpo (group_norm)
data prompts = jsonl("prompts.jsonl", batch={batch}, max_prompt_tokens=16, shuffle=false)
data answers = jsonl("answers.jsonl", batch=6, max_prompt_tokens=16, max_answer_tokens=8)
data pairs = jsonl("pairs.jsonl", batch=6, max_prompt_tokens=16, max_answer_tokens=8)
model actor = causal_lm("model") train adamw(lr=0.01)
loss pg(logprobs: token; adv: seq, weight: seq) {{
  return -mean(weight * mean(adv * logprobs by seq))
}}
loss nll(logprobs: token;) {{ return -mean(mean(logprobs by seq)) }}
loss margin(chosen: token, rejected: token;) {{ return mean(mean(rejected by seq)) - mean(mean(chosen by seq)) }}
"""


def folder(base: Path) -> Path:
    """A directory with a model and data."""
    make_model(base / "model", num_hidden_layers=2)
    rows = [{"prompt": f"{i} + {i * 7 % 10} = " + "x" * (i % 5), "answer": f"{i}" * (1 + i % 3),
             "chosen": "yes" * (i % 4 + 1), "rejected": "no", "number": i} for i in range(36)]
    for name, keys in (("prompts", ("prompt", "number")), ("answers", ("prompt", "answer", "number")),
                       ("pairs", ("prompt", "chosen", "rejected", "number"))):
        text = "".join(json.dumps({k: row[k] for k in keys}) + "\n" for row in rows)
        (base / f"{name}.jsonl").write_text(text)
    return base


def run(base: Path, body: str, *, top: str = "", steps: int = 2, batch: int = 4, place: str | None = None,
        like: Metrics | None = None) -> Metrics:
    """The metrics of a flow with these statements; unused data sources are left out. like: as of `run_program`."""
    head = HEAD.format(rewards=HERE / "rewards_sel.py", batch=batch)
    for name in ("prompts", "answers", "pairs"):
        if f"{name}.next" not in body:
            head = "\n".join(line for line in head.splitlines() if not line.startswith(f"data {name} "))
    path = base / "program.rlf"
    path.write_text(f"{head}\n{top}\nflow f(steps={steps}) {{\n{body}\n}}\n")
    before = os.getcwd()
    os.chdir(base)
    try:
        return run_program(path, {}, base / "run", place=place, like=like)
    finally:
        os.chdir(before)


def under(base: Path, body: str, places: Sequence[str | None], **more: Any) -> list[list[dict[str, float]]]:
    """The numbers of one flow under several placements; responses are those of the first."""
    first = run(base, body, place=places[0], **more)
    return [numbers(x) for x in (first, *(run(base, body, place=p, like=first, **more) for p in places[1:]))]


def numbers(metrics: Metrics) -> list[dict[str, float]]:
    """Without what a clock measures."""
    return [{k: v for k, v in step.items() if "second" not in k and "tokens" not in k and "time" not in k}
            for step in metrics]
