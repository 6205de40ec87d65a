"""Counts of batches at run time, and `minibatch=` in whole plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.programs import compile_program, run_program
from tests.tiny import make_all

PROGRAM = """
use std.sft (sft)
loss counted(logprobs: token) {{
  metric tokens = count(logprobs)
  return -mean(logprobs)
}}
data prompts = jsonl("data/prompts.jsonl", batch=4 prompts, max_prompt_tokens=16 tokens)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
flow counts(steps=1, seed=3) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4 sequences, max_new_tokens=5 tokens)
  kept   = gen where len(gen) > 1 tokens
  metric prompts   = count(prompt)
  metric sequences = count(gen)
  metric kept      = count(kept)
  metric long      = sum(where(len(gen) > 1 tokens, 1, 0))
  metric tokens    = count(gen.logprobs) - sum(len(gen))
  metric all       = count(gen.logprobs)
  actor.train(gen, loss=counted(), {division})
}}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("tiny")
    make_all(base, num_hidden_layers=2)
    return base


def program(base: Path, division: str) -> Path:
    path = base / "counts.rlf"
    path.write_text(PROGRAM.format(division=division))
    return path


@pytest.mark.parametrize("size", ["8", "8 sequences", "2 prompts"])
def test_the_plan_is_that_of_the_number_of_minibatches(size: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)

    def events(division: str) -> list[dict[str, object]]:
        lines = compile_program(program(tiny, division), {}, None, tiny).splitlines()
        return [json.loads(line) for line in lines[1:-1]]  # the last is the digest

    def bare(value: object) -> object:
        """Without places in the text, which differ."""
        if isinstance(value, dict):
            return {k: bare(v) for k, v in value.items() if k not in ("span", "at", "sources")}
        return [bare(v) for v in value] if isinstance(value, list) else value

    assert bare(events(f"minibatch={size}")) == bare(events("minibatches=2"))
    assert bare(events(f"minibatch={size}")) != bare(events("minibatches=4"))


def test_counts_are_what_they_say(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    place = "mesh m = mesh(0:2)\nplace *.* on m dp=2 mbs=3 sequences\n"
    [step] = run_program(program(tiny, "minibatch=2 prompts"), {}, tiny / "run", place=place)
    assert step["prompts"] == 4 and step["sequences"] == 16 and step["tokens"] == 0
    assert step["kept"] == step["long"]
    assert step["actor/tokens"] * 2 == step["all"]  # the mean over two minibatches
