"""A weight that is negative at run time ends the run, and the message shows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoint.runs import run
from tests.end_to_end.programs import compile_program
from tests.tiny import make_all

PROGRAM = """
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft")
buffer good = rows(capacity=8)
flow f(steps=2) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=4)
  scored = gen with x=mean(gen.logprobs by seq)
  old    = good.sample(2, weight=good.x)
  good.add(scored)
  metric m = mean(old.x)
}
"""


def test_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.rlf").write_text(PROGRAM)
    plan = compile_program(tmp_path / "p.rlf", {}, "cluster nodes=1 gpus=1\nplace *.* on mesh(0:1)\n", tmp_path)
    assert set(run(plan, Path(os.getcwd()) / "out")) == {"RL0738"}
