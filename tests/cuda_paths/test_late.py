"""Runs whose messages are as late as NCCL's may be have the numbers of those whose messages are early."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rldsl.runtime.metrics.names import computed
from tests.cuda_paths.late import late_communication
from tests.end_to_end.programs import _rank, compile_program
from tests.responses import forget
from tests.tiny import make_all
from tests.world import run_world

PPO = """
use std.ppo (gae, ppo_clip, value_clip, kl_rewards)

data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
model critic = value_model("models/sft") train adamw(lr=1e-3)
model ref = causal_lm("models/sft")

flow ppo(steps=2, seed=1LAG) {
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=6)
  v = critic.values(gen)
  ref_lp = ref.logprobs(gen)
  r = kl_rewards(len(gen) / 8.0, gen.logprobs, ref_lp, coef=0.1)
  adv, ret = gae(r, v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=2)
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)), minibatches=2)
  metric kl = mean(gen.logprobs - ref_lp)
  ema ref from actor 0.9
}
"""

PLACEMENTS = {
    "moves": ("place actor.generate on mesh(0:2) dp=2\nplace actor.train on mesh(2:4) pp=2 mbs=2\n"
              "place critic.values on mesh(0:1)\nplace critic.train on mesh(1:3) tp=2\nplace ref.logprobs on mesh(2:4) dp=2",
              ""),
    "zero": ("place actor.generate on mesh(0:4) dp=2 pp=2\nplace actor.train on mesh(0:4) dp=4 zero=3\n"
             "place critic.* on mesh(0:4) dp=2 tp=2\nplace critic.train on mesh(0:4) dp=2 tp=2 zero=2\n"
             "place ref.logprobs on mesh(0:4) dp=4", ""),
    "chunks": ("place actor.generate on mesh(0:2) dp=2\nplace actor.train on mesh(2:4) pp=2 vpp=2 mbs=1\n"
               "place critic.* on mesh(0:2) cp=2\nplace ref.logprobs on mesh(2:4) pp=2", ""),
    "lag": ("place actor.generate on mesh(0:2) dp=2\nplace actor.train on mesh(2:4) dp=2 zero=1\n"
            "place critic.* on mesh(2:4) dp=2\nplace ref.logprobs on mesh(0:2) dp=2", ", lag=1"),
}

# placement -> who posts messages in its run, besides transfers and reallocs: sharded parameters, pipelines in training
# and in generation, metrics. Others wait where they post
POSTERS = {"moves": {"pipeline.py", "metric_log.py"}, "zero": {"zero.py", "clock_ticks.py"},
           "chunks": {"pipeline.py", "metric_log.py"}, "lag": {"zero.py", "metric_log.py"}}


def run(rank: int, data: bytes, folder: str, cwd: str, late: bool) -> dict[str, int]:
    if not late:
        _rank(rank, data, f"{folder}/out", cwd, None, Path(folder) / "responses")
        return {}
    with late_communication() as counts:
        _rank(rank, data, f"{folder}/out", cwd, None, Path(folder) / "responses")
    return counts


def numbers(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in computed(line)} for line in lines]


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLACEMENTS)
def test_late_messages_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_all(tmp_path / "tiny"))
    place, lag = PLACEMENTS[name]
    (tmp_path / "p.rlf").write_text(PPO.replace("LAG", lag))
    data = compile_program(tmp_path / "p.rlf", {}, f"cluster nodes=1 gpus=4\n{place}\n", tmp_path)
    found = []
    for late in (False, True):
        folder = tmp_path / f"late-{late}"
        folder.mkdir()
        forget(folder / "responses")
        counts = run_world(4, run, data, str(folder), os.getcwd(), late)
        found.append(numbers(folder))
    assert found[0] == found[1] and len(found[0]) == 2
    assert sum(c["posted"] for c in counts) > 20
    assert POSTERS[name] | {"exchange.py", "reshard.py"} <= {file for c in counts for file in c}, "who posts messages"
    assert all(c["waited"] == c["posted"] for c in counts), counts


# --------------------------------------------------------------------------------------- the instrument itself


def sloppy(rank: int, fault: str) -> str:
    """A message between two ranks that is read too early, or overwritten too early."""
    with late_communication():
        x = torch.full((3,), float(rank))
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend if rank == 0 else dist.irecv, x, 1 - rank)])
        early = x * 2 if fault == "read" else x.clone()
        if fault == "write" and rank == 0:
            x.add_(1)
        try:
            work.wait()
        except AssertionError as error:
            return str(error)
        return "NaN" if early.isnan().any() else "ok" if torch.equal(x, torch.zeros(3)) else "wrong"


@pytest.mark.parametrize(("fault", "expected"), [
    ("read", ["ok", "NaN"]), ("write", ["a tensor was changed while it was being sent", "NaN"])])
def test_what_is_too_early_shows(fault: str, expected: list[str]) -> None:
    assert run_world(2, sloppy, fault) == expected
