"""A program whose rows are drawn by states of these rows, and data with a tiny model for it."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path

from tests.end_to_end.programs import compile_program
from tests.tiny import make_model

ROWS = 20
REWARDS = """
import json

def share(rows):
    with open({file!r}, "a") as out:
        out.write(json.dumps([row["number"] for row in rows]) + chr(10))
    return [row["number"] / 32 for row in rows]
"""
HEAD = """
use py "share.py" (share: gen -> seq)
data prompts = jsonl("prompts.jsonl", batch=4, max_prompt_tokens=16, numbers=["number"])
state rate of prompts = 0.5
state seen of prompts = 0
state heat = 2
model actor = causal_lm("model") train adamw(lr=0.001)
loss pg(logprobs: token; adv: seq) { return -mean(mean(adv * logprobs by seq)) }
"""
# Lookups above and below the updates; an update of a selection; a weight of two states and a column.
BODY = """
  prompt = prompts.next(weight=exp(-prompts.rate / heat) * (1 + prompts.number))
  gen    = actor.generate(prompt, n=2, max_new_tokens=4)
  r      = share(gen)
  before = prompt.rate
  prompt.rate = 0.5 * prompt.rate + mean(r by prompt)
  often  = prompt where prompt.rate > before
  often.seen = often.seen + 1
  metric gain = mean(prompt.rate - before)
  metric seen = sum(prompt.seen)
  metric numbers = sum(prompt.number)
  actor.train(gen, loss=pg(adv=r - prompt.rate), minibatches=2)
  heat = 0.9 * heat
  checkpoint every 1 keep=9
"""


def folder(base: Path) -> Path:
    """A directory with a model, data and a reward."""
    make_model(base / "model", num_hidden_layers=2)
    rows = ({"prompt": f"{i} + {i * 7 % 10} =" + "x" * (i % 5), "number": i} for i in range(ROWS))
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "share.py").write_text(REWARDS.format(file=str(base / "drawn.jsonl")))
    return base


def compiled(base: Path, body: str = BODY, place: str | None = None, *, steps: int = 5, head: str = HEAD) -> bytes:
    """The plan of a flow with these statements."""
    (base / "f.rlf").write_text(f"{head}\nflow f(steps={steps}, seed=3) {{\n{body}\n}}\n")
    with chdir(base):
        return compile_program(base / "f.rlf", {}, place, base)
