"""Whole runs with engine processes on two ranks: GRPO that learns, an engine that dies, and the resumed run. Always
with the stand-in, and with vLLM where there is one."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rldsl.plan.metrics_file import MEASURED
from tests.environments.test_branches import with_template
from tests.forked import command
from tests.tiny import make_model, make_sums, write_jsonl
from tests.vllm.engines import BOTH, engine_of, variables

PROGRAM = """
use std.grpo (group_norm)
use std.ppo (ppo_clip)
use py "rewards.py" (digits: gen -> seq)
cluster nodes=1 gpus=2
data prompts = jsonl("prompts.jsonl", batch=8, max_prompt_tokens=8)
model actor = causal_lm("model") train adamw(lr=4e-3)
param steps = 6
flow g(steps=steps{flow}) {{
  checkpoint every 1 keep=9
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6, temperature=0.9, top_p=0.95) on mesh({mesh} backend=vllm {more}
  reward = digits(gen)
  metric reward = mean(reward)
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=group_norm(reward)), minibatches=2) on mesh({train}
  every 6 {{ save actor }}
}}
"""
REWARDS = """
def digits(rows):
    return [sum(c.isdigit() for c in row["completion"]) for row in rows]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("runs")
    make_model(base / "model", head_dim=32, num_hidden_layers=2)
    write_jsonl(base / "prompts.jsonl", make_sums(32))
    (base / "rewards.py").write_text(REWARDS)
    return base


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    yield


def program(name: str, flow: str = "", mesh: str = "0:2) dp=2", more: str = "", train: str = "0:2) dp=2") -> str:
    Path(f"{name}.rlf").write_text(PROGRAM.format(flow=flow, mesh=mesh, more=more, train=train))
    return f"{name}.rlf"


def run(file: str, engine: str, out: str, *options: str, **env: str) -> Any:
    return command("rldsl.cli", "run", file, "--out", out, "--plain", *options, timeout=400.0,
                   env={**variables(engine), **env})


def lines(out: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def computed(out: str) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines(out)]


def weights(out: str) -> dict[str, torch.Tensor]:
    files = list(Path(out).glob("step-6/actor/*.safetensors"))
    assert files
    return {name: x for file in files for name, x in load_file(file).items()}


@pytest.mark.thorough
@pytest.mark.parametrize("engine", BOTH)
def test_grpo_learns_dies_and_resumes(engine: str) -> None:
    """The run that resumes after an engine died ends with the same tokens, metrics and weights as the undisturbed
    one."""
    file, whole, broken = program(f"grpo-{engine}"), f"whole-{engine}", f"broken-{engine}"
    done = run(file, engine, whole)
    assert done.returncode == 0, done.stderr
    found = lines(whole)
    assert found[-1]["reward"] > found[0]["reward"] + 0.5
    assert all(0 < line["gen/logprob_difference"] <= line["gen/logprob_difference_max"] < 1e-4 for line in found)
    if engine == "standin":
        died = run(file, engine, broken, STANDIN_DIE_AT="300", STANDIN_LOG="log")
        assert died.returncode != 0 and "RL0801" in died.stderr and "ended with exit status 3" in died.stderr
        assert "Traceback" not in died.stderr
        assert not any(engine_of(int(line.split()[0])) for line in Path("log").read_text().splitlines())
    else:
        run_until_killed(file, engine, broken)
    assert 0 < len(lines(broken)) < 6
    resumed = run(file, engine, broken, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert computed(broken) == computed(whole)
    mine, theirs = weights(broken), weights(whole)
    assert all(torch.equal(mine[name], x) for name, x in theirs.items())


def run_until_killed(file: str, engine: str, out: str) -> None:
    """A run whose engine is killed after two steps."""
    def kill() -> None:
        metrics = Path(out) / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            time.sleep(0.05)
        pid = next(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and engine_of(int(p.name))
                   and os.readlink(p / "cwd") == os.getcwd())
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    done = run(file, engine, out)
    assert done.returncode != 0 and "RL0801" in done.stderr and "SIGKILL" in done.stderr, done.stderr


TALKS = """
use std.grpo (group_norm)
use std.ppo (ppo_clip)
use py "games.py" (Digits: env)
cluster nodes=1 gpus=2
data prompts = jsonl("prompts.jsonl", batch=4, max_prompt_tokens=8)
model actor = causal_lm("model", lora(r=4)) train adamw(lr=2e-2)
flow g(steps=4) {{
  checkpoint every 1 keep=9
  prompt = prompts.next()
  gen    = actor.generate(prompt, env=Digits, n=4, max_turns=2, max_new_tokens=4, max_tokens=40) {place}
  metric reward = mean(gen.reward)
  metric turns  = mean(gen.turns)
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=group_norm(gen.reward)), minibatches=2) on mesh(0:2) dp=2
  every 4 {{ save actor }}
}}
"""
GAMES = """
class Digits:
    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        reward = float(sum(c.isdigit() for c in action))
        return {"observations": [{"role": "user", "content": "more"}], "reward": reward, "done": False}
"""


@pytest.mark.thorough
@pytest.mark.parametrize("engine", BOTH)
def test_conversations_of_a_model_with_adapters(engine: str) -> None:
    """It learns; and, with the stand-in, an engine that dies in a turn ends the run, which resumes to the same."""
    Path("talks.rlf").write_text(TALKS.format(place="on mesh(0:2) dp=2 backend=vllm mbs=3 waiting=recompute"))
    Path("games.py").write_text(GAMES)
    with_template(Path("model"))
    whole, broken = f"talks-{engine}", "talks-broken"
    done = run("talks.rlf", engine, whole)
    assert done.returncode == 0, done.stderr
    found = lines(whole)
    assert all(0 < line["gen/logprob_difference"] <= line["gen/logprob_difference_max"] < 1e-4 for line in found)
    assert all(line["turns"] == 2 for line in found)
    if engine != "standin":
        return
    died = run("talks.rlf", engine, broken, STANDIN_DIE_AT="150")
    assert died.returncode != 0 and "RL0801" in died.stderr and "ended with exit status 3" in died.stderr, died.stderr
    assert "Traceback" not in died.stderr and 0 < len(lines(broken)) < 4
    resumed = run("talks.rlf", engine, broken, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert computed(broken) == computed(whole)


@pytest.mark.thorough
def test_placements_give_the_same_tokens() -> None:
    """One rank or two, few slots, training with tp, a copy that is dropped in every step."""
    runs = {"plain": dict(), "slots": dict(more="mbs=3", train="0:2) tp=2"), "dropped": dict(mesh="1:2)", more="keep=false")}
    found = {}
    for name, given in runs.items():
        done = run(program(name, **given), "standin", name, "--set", "steps=3")
        assert done.returncode == 0, done.stderr
        found[name] = [line["reward"] for line in lines(name)]
    assert all(rewards == pytest.approx(found["plain"]) for rewards in found.values())


def test_generation_ahead_on_ranks_of_its_own() -> None:
    """Each step trains on what the parameters of the step before sampled."""
    file = program("ahead", flow=", lag=1", mesh="0:1)", train="1:2)")
    done = run(file, "standin", "ahead", "--set", "steps=3")
    assert done.returncode == 0, done.stderr
    assert lines("ahead")[1]["gen/logprob_difference"] > 1e-3, "the parameters that sampled are older"
