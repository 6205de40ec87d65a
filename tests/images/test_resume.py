"""The numbers of images outlast a step: in what runs ahead, in selections, in buffers, and in a checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from examples.tiny import make_vision_model
from tests.images.pictures import make_rows

HERE = Path(__file__).parent
PROGRAM = """
use py "rewards_images.py" (count_a: gen -> seq)
use std.grpo (group_norm, grpo_free)
data prompts = jsonl("rows.jsonl", batch=4, images="images", max_prompt_tokens=120)
model actor = causal_lm("m") train adamw(lr=1e-3)
buffer old = rows(capacity=16)
flow f(steps=4, seed=1, lag=1) {
  p = prompts.next()
  gen = actor.generate(p, n=2, max_new_tokens=5)
  r = count_a(gen)
  kept = gen where r > 0
  actor.train(kept, loss=grpo_free(old=kept.logprobs, adv=group_norm(r)))
  old.add(gen)
  again = old.sample(4)
  lp = actor.logprobs(again)
  metric reward = mean(r)
  metric lp = mean(lp)
  checkpoint every 2
}
"""


def lines(folder: Path, *options: str) -> list[dict[str, float]]:
    subprocess.run([sys.executable, "-m", "rldsl.cli", "run", "p.rlf", "--out", "out", *options], cwd=folder, check=True,
                   capture_output=True, timeout=240)
    names = ("step", "reward", "lp", "actor/loss", "actor/grad_norm")
    return [{k: line[k] for k in names} for line in map(json.loads, (folder / "out/metrics.jsonl").read_text().splitlines())]


def test_a_run_with_lag_and_a_buffer_resumes_exactly(tmp_path):
    make_vision_model(tmp_path / "m")
    make_rows(tmp_path, count=12)
    shutil.copy(HERE / "rewards_images.py", tmp_path)
    (tmp_path / "p.rlf").write_text(PROGRAM)
    complete = lines(tmp_path)
    assert len(complete) == 4 and len({line["lp"] for line in complete}) == 4
    shutil.rmtree(tmp_path / "out/checkpoints/step-000004")
    assert lines(tmp_path, "--resume") == complete
