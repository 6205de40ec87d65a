"""GRPO and PPO steps by hand: one process, plain transformers and autograd, sequence by sequence.

Nothing of rldsl is used. Formulas: Shao et al. 2024 (GRPO, eq. 3 and the k3 estimator), Schulman et al. 2017 (PPO),
Schulman et al. 2016 (GAE).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sample:
    prompt: list[int]
    response: list[int]
    reward: float = 0.0


def causal_lm(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def sequence_classifier(path: Path) -> torch.nn.Module:
    return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()


def value_model(path: Path) -> torch.nn.Module:
    """The base of a causal LM with a zero value head, as a fresh critic starts."""
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    torch.nn.init.zeros_(model.score.weight)
    return model


def response_logprobs(model: torch.nn.Module, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    tokens = torch.tensor([sample.prompt + sample.response])
    logits = model(tokens).logits[0, len(sample.prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(sample.response)[:, None])[:, 0]


def response_values(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    hidden = model.model(torch.tensor([sample.prompt + sample.response])).last_hidden_state[0]
    return (hidden @ model.score.weight[0])[len(sample.prompt) - 1 : -1]


def final_score(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    hidden = model.model(torch.tensor([sample.prompt + sample.response])).last_hidden_state[0]
    return hidden[-1] @ model.score.weight[0]


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> Gradients:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def grpo(actor: torch.nn.Module, ref: torch.nn.Module, samples: list[Sample], n: int, *, eps: float = 0.2,
         kl: float, temperature: float = 1.0) -> tuple[float, Gradients]:
    """Mean over sequences of the mean over tokens; `samples` holds n completions of each prompt, one prompt after the
    other."""
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64).view(-1, n)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten().float()
    terms = []
    for sample, advantage in zip(samples, advantages):
        new = response_logprobs(actor, sample, temperature)
        with torch.no_grad():
            old = new.clone()
            reference = response_logprobs(ref, sample, temperature)
        ratio = (new - old).exp()
        clipped = torch.max(-advantage * ratio, -advantage * ratio.clip(1 - eps, 1 + eps))
        gap = reference - new
        terms.append((clipped + kl * (gap.exp() - gap - 1)).mean())
    loss = torch.stack(terms).mean()
    return loss.item(), gradients(actor, loss)


def ppo(actor: torch.nn.Module, critic: torch.nn.Module, ref: torch.nn.Module, judge: torch.nn.Module,
        samples: list[Sample], *, coef: float = 0.1, gamma: float = 1.0, lam: float = 0.95, eps: float = 0.2,
        value_eps: float = 0.2) -> dict[str, tuple[float, Gradients]]:
    """One PPO step over the whole batch as a single minibatch; loss and gradients of actor and critic."""
    old, values, advantages, returns = [], [], [], []
    with torch.no_grad():
        for sample in samples:
            logprobs, v = response_logprobs(actor, sample), response_values(critic, sample)
            rewards = -coef * (logprobs - response_logprobs(ref, sample))
            rewards[-1] += final_score(judge, sample)
            advantage, running = torch.zeros_like(v), 0.0
            for t in reversed(range(len(v))):
                following = v[t + 1] if t + 1 < len(v) else 0.0
                running = rewards[t] + gamma * following - v[t] + gamma * lam * running
                advantage[t] = running
            old.append(logprobs), values.append(v), advantages.append(advantage), returns.append(advantage + v)
    flat = torch.cat(advantages)
    whitened = (flat - flat.mean()) / (flat.var(unbiased=True) + 1e-8).sqrt()
    whitened = whitened.split([len(a) for a in advantages])
    policy, value = [], []
    for sample, o, v_old, adv, ret in zip(samples, old, values, whitened, returns):
        ratio = (response_logprobs(actor, sample) - o).exp()
        policy.append(torch.max(-adv * ratio, -adv * ratio.clip(1 - eps, 1 + eps)))
        v = response_values(critic, sample)
        near = v_old + (v - v_old).clip(-value_eps, value_eps)
        value.append(0.5 * torch.max((v - ret) ** 2, (near - ret) ** 2))
    policy_loss, value_loss = torch.cat(policy).mean(), torch.cat(value).mean()
    return {"actor": (policy_loss.item(), gradients(actor, policy_loss)),
            "critic": (value_loss.item(), gradients(critic, value_loss))}
