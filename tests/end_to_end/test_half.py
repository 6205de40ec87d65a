"""A policy and its reference in bfloat16 are equal before the first update, wherever each of them is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.programs import run_program
from tests.samples import thorough_between
from tests.tiny import make_model, make_sums, write_jsonl

PROGRAM = """
use std.grpo (group_norm, grpo)
data prompts = jsonl("{rows}", batch=4, max_prompt_tokens=16)
model actor = causal_lm("{base}", dtype="bfloat16") train adamw(lr=0.02)
model ref   = causal_lm("{base}", dtype="bfloat16")
flow f(steps=2, seed=1) {{
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=8)
  old = actor.logprobs(gen)
  ref_lp = ref.logprobs(gen)
  adv = group_norm(sum(old by seq))
  actor.train(gen, loss=grpo(old=old, adv=adv, ref=ref_lp, beta=0.1))
  metric apart = mean((old - ref_lp) * (old - ref_lp))
}}
"""
HOME = "place actor.train on mesh(0:1)\nplace ref.logprobs on mesh(0:1)\n"
PLACES = {"at home": "place *.* on mesh(0:1)",
          "copies": HOME + "place actor.logprobs on mesh(1:2)\nplace actor.generate on mesh(1:2)",
          "reference elsewhere": "place actor.* on mesh(0:1)\nplace ref.logprobs on mesh(1:2)"}


@pytest.mark.parametrize("place", thorough_between(PLACES))
def test_ratio_and_kl_are_exact_in_the_first_step(place: str, tmp_path: Path) -> None:
    base, rows = make_model(tmp_path / "m", num_hidden_layers=2), write_jsonl(tmp_path / "rows.jsonl", make_sums(16))
    (tmp_path / "f.rlf").write_text(PROGRAM.format(base=base, rows=rows))
    first, second = run_program(tmp_path / "f.rlf", {}, tmp_path / "run", PLACES[place])
    assert first["apart"] == first["actor/kl"] == first["actor/clip_frac"] == 0.0
    assert second["apart"] > 0 and second["actor/kl"] > 0
