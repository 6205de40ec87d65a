"""Six steps with a lag against plain torch, straight from the definition: the responses of step s are those of the
policy after step s - 1 - lag, and everything else is as without a lag."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end import reference
from tests.end_to_end.programs import run_program
from tests.end_to_end.test_reference import program, samples
from tests.tiny import make_all

STEPS, LR, EPS = 6, 2e-3, 1e-4
HEAD = """
use std.ppo (gae, kl_rewards, ppo_clip, value_clip)
use std.grpo (group_norm, grpo_free)
use py "recorder.py" (digits: gen -> seq)
data prompts = jsonl("{rows}", batch=6, max_prompt_tokens=16)
model actor = causal_lm("{base}") train adamw(lr={lr}, eps={eps}, clip_grad=0)
"""
GRPO = HEAD + """
flow grpo(steps={steps}, seed=3, lag={lag}) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=12)  on mesh(0:1) dp=1
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(digits(gen))))
  every {steps} {{ save actor to "{out}/actor" }}
}}
"""
PPO = HEAD + """
model critic = value_model("{base}") train adamw(lr={lr}, eps={eps}, clip_grad=0)
model ref    = causal_lm("{base}")
flow ppo(steps={steps}, seed=4, lag={lag}) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=12)  on mesh(0:1) dp=1
  ref_lp = ref.logprobs(gen)
  v      = critic.values(gen)
  adv, ret = gae(kl_rewards(digits(gen), gen.logprobs, ref_lp, coef=0.1), v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret))
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)))
  every {steps} {{ save actor, critic to "{out}/{{model}}" }}
}}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


def run(base: Path, folder: Path, text: str, lag: int) -> tuple[list[dict[str, float]], list[list[reference.Sample]]]:
    """The metrics of each step, and its responses with their rewards."""
    record = folder / "samples.jsonl"
    filled = text.format(rows=base / "data/prompts.jsonl", base=base / "models/sft", lr=LR, eps=EPS, steps=STEPS,
                         lag=lag, out=folder / "after")
    metrics = run_program(program(folder, "lagged", filled, record), {}, folder / "run")
    rows = samples(record)
    size = len(rows) // STEPS
    return metrics, [rows[i:i + size] for i in range(0, len(rows), size)]


def surrogate(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    ratio = (new - old).exp()
    return torch.max(-advantage * ratio, -advantage * ratio.clip(0.8, 1.2))


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)


def stepped(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def assert_equal_weights(model: torch.nn.Module, saved: Path) -> None:
    held = load_file(saved / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name in held:
            torch.testing.assert_close(held[name], parameter.detach(), rtol=0, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("lag", [1, 2])
def test_grpo(lag: int, base: Path, tmp_path: Path) -> None:
    metrics, steps = run(base, tmp_path, GRPO, lag)
    actor = reference.causal_lm(base / "models/sft")
    adamw, versions = optimizer(actor), [copy.deepcopy(actor)]
    for number, rows in enumerate(steps):
        behaviour = versions[max(0, number - lag)]
        rewards = torch.tensor([s.reward for s in rows]).view(-1, 4)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        terms = []
        for sample, advantage in zip(rows, advantages.flatten(), strict=True):
            with torch.no_grad():
                old = reference.response_logprobs(behaviour, sample)
            terms.append(surrogate(reference.response_logprobs(actor, sample), old, advantage).mean())
        loss = stepped(adamw, torch.stack(terms).mean())
        assert metrics[number]["actor/loss"] == pytest.approx(loss, abs=2e-5), f"step {number + 1}"
        versions.append(copy.deepcopy(actor))
    assert metrics[-1]["actor/clip_frac"] > 0  # the policy has moved away from the one that generated
    assert_equal_weights(actor, tmp_path / "after" / "actor")


def test_ppo(base: Path, tmp_path: Path) -> None:
    metrics, steps = run(base, tmp_path, PPO, 1)
    actor, ref = reference.causal_lm(base / "models/sft"), reference.causal_lm(base / "models/sft")
    critic = reference.value_model(base / "models/sft")
    adamw, of_critic, versions = optimizer(actor), optimizer(critic), [copy.deepcopy(actor)]
    for number, rows in enumerate(steps):
        behaviour = versions[max(0, number - 1)]
        olds, values, advantages, returns = [], [], [], []
        with torch.no_grad():
            for sample in rows:
                old, v = reference.response_logprobs(behaviour, sample), reference.response_values(critic, sample)
                rewards = -0.1 * (old - reference.response_logprobs(ref, sample))
                rewards[-1] += sample.reward
                advantage, running = torch.zeros_like(v), 0.0
                for t in reversed(range(len(v))):
                    following = v[t + 1] if t + 1 < len(v) else 0.0
                    running = rewards[t] + following - v[t] + 0.95 * running
                    advantage[t] = running
                olds.append(old), values.append(v), advantages.append(advantage), returns.append(advantage + v)
        flat = torch.cat(advantages)
        white = ((flat - flat.mean()) / (flat.var(unbiased=True) + 1e-8).sqrt()).split([len(a) for a in advantages])
        value = []
        for sample, v_old, ret in zip(rows, values, returns, strict=True):
            v = reference.response_values(critic, sample)
            near = v_old + (v - v_old).clip(-0.2, 0.2)
            value.append(0.5 * torch.max((v - ret) ** 2, (near - ret) ** 2))
        assert metrics[number]["critic/loss"] == pytest.approx(stepped(of_critic, torch.cat(value).mean()), rel=1e-3,
                                                               abs=2e-5), f"step {number + 1}"
        policy = [surrogate(reference.response_logprobs(actor, s), o, a)
                  for s, o, a in zip(rows, olds, white, strict=True)]
        assert metrics[number]["actor/loss"] == pytest.approx(stepped(adamw, torch.cat(policy).mean()), rel=1e-3,
                                                              abs=2e-4), f"step {number + 1}"
        versions.append(copy.deepcopy(actor))
    assert_equal_weights(actor, tmp_path / "after" / "actor")
