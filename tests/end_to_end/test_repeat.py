"""`repeat` and `every`: new rows and new samples in each turn, the same on every placement."""

from __future__ import annotations

import pytest

from tests.end_to_end.programs import run_program
from tests.tiny import make_all

PROGRAM = """
use std.ppo (ppo_clip)
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
flow turns(steps=2, seed=3) {{
  repeat 2 {{
    prompt = prompts.next()
    gen    = actor.generate(prompt, n=2, max_new_tokens=5)                 on mesh(0:{ranks}) dp={ranks}
    r      = len(gen) + sum(gen.logprobs by seq)
    actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=r))               on mesh(0:{ranks}) tp={ranks}
    metric r = mean(r)
  }}
  every 2 {{ save actor }}
}}
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_repeat_runs(ranks, tmp_path_factory, tmp_path, monkeypatch, shared={}):
    monkeypatch.chdir(shared.setdefault("tiny", tmp_path_factory.mktemp("tiny")))
    if not (shared["tiny"] / "models").exists():
        make_all(shared["tiny"])
    program = tmp_path / "turns.rlf"
    program.write_text(PROGRAM.format(ranks=ranks))
    lines = run_program(program, {}, tmp_path / "run")
    assert (tmp_path / "run/out/step-2/actor/config.json").is_file()
    assert len({line["r"] for line in lines}) == len(lines) >= 2
    shared[ranks] = [line["r"] for line in lines]
    assert shared[ranks] == pytest.approx(shared[1], rel=1e-4)
