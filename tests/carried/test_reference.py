"""What continues in a later step is sampled by that step's policy, and otherwise as if it had not been cut."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch

from tests.carried.programs import grpo
from tests.end_to_end import reference
from tests.end_to_end.programs import Metrics, run_program
from tests.end_to_end.test_reference import program, samples
from tests.tiny import make_all

N, BATCH, STEPS, MOST, PER_STEP = 2, 5, 8, 11, 4
Steps = list[list[reference.Sample]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


def run(tiny: Path, folder: Path, text: str) -> tuple[Metrics, Steps]:
    """The metrics of each step, and the responses that it trains on."""
    record = folder / "samples.jsonl"
    metrics = run_program(program(folder, "carried", text, record), {
        "base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}, folder / "run")
    found = iter(samples(record))
    return metrics, [list(itertools.islice(found, int(line["rows_of_step"]))) for line in metrics]


def parts(prompt: list[reference.Sample]) -> int:
    """In how many steps the responses of a prompt are sampled."""
    return max(-(-len(s.response) // PER_STEP) for s in prompt)


@pytest.mark.thorough
def test_at_a_learning_rate_of_zero_nothing_but_the_step_changes(tiny: Path, tmp_path: Path) -> None:
    """Every prompt comes with the last part of its longest response, older ones behind younger ones, with the tokens
    that it has without `per_step`; also through stop strings and `min_new_tokens` across a cut."""
    _, whole = run(tiny, tmp_path / "whole", grpo(0, lr=0, steps=STEPS, exact=True))
    metrics, cut = run(tiny, tmp_path / "cut", grpo(PER_STEP, lr=0, steps=STEPS, exact=True))
    prompts = [[rows[i:i + N] for i in range(0, len(rows), N)] for rows in whole]
    lengths = [len(s.response) for rows in whole for s in rows]
    assert set(lengths) > {2, 4, 8, 11} and min(lengths) >= 2, "the cuts fall on no interesting place"
    for step in range(STEPS):
        expected = [(age, prompt) for age in range(min(step, 2) + 1) for prompt in prompts[step - age]
                    if parts(prompt) == age + 1]
        assert [(s.prompt, s.response) for s in cut[step]] == [(s.prompt, s.response) for _, p in expected for s in p]
        assert metrics[step]["age"] == max((age for age, _ in expected), default=0)
    assert {parts(p) for rows in prompts for p in rows} == {1, 2, 3}


@pytest.mark.parametrize("lag", [0, 1])
def test_each_part_has_the_log_probs_of_its_own_step(lag: int, tiny: Path, tmp_path: Path) -> None:
    """Steps with `old=gen.logprobs`, in plain torch: the policy that sampled a token is that of its part."""
    metrics, steps = run(tiny, tmp_path, grpo(PER_STEP, steps=STEPS, flow=f", lag={lag}").replace(
        "minibatches=2", "minibatches=1"))
    actor = reference.causal_lm(tiny / "models/sft")
    adamw = torch.optim.AdamW(actor.parameters(), lr=2e-3, eps=1e-4, weight_decay=0.0)
    versions = [copy.deepcopy(actor)]
    stale = 0
    for number, rows in enumerate(steps):
        terms, ages = [], []
        for prompt in (rows[i:i + N] for i in range(0, len(rows), N)):
            begun = number - lag - parts(prompt) + 1  # the step, from 0, whose policy began it
            rewards = torch.tensor([s.reward for s in prompt])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for sample, advantage in zip(prompt, advantages, strict=True):
                of_part = [max(0, begun + t // PER_STEP) for t in range(len(sample.response))]
                ages += [number - begun - t // PER_STEP for t in range(len(sample.response))]
                with torch.no_grad():
                    each = {v: reference.response_logprobs(versions[v], sample) for v in set(of_part)}
                old = torch.stack([each[v][t] for t, v in enumerate(of_part)])
                ratio = (reference.response_logprobs(actor, sample) - old).exp()
                terms.append(torch.max(-advantage * ratio, -advantage * ratio.clip(0.8, 1.2)).mean())
        assert metrics[number]["mean_age"] == pytest.approx(sum(ages) / max(1, len(ages)), abs=1e-6)
        if terms:
            loss = torch.stack(terms).mean()
            assert metrics[number]["actor/loss"] == pytest.approx(loss.item(), abs=3e-5), f"step {number + 1}"
            adamw.zero_grad(), loss.backward(), adamw.step()
            stale = max(stale, *ages)
        versions.append(copy.deepcopy(actor))
    assert stale == 2 + lag and abs(metrics[-1]["actor/loss"]) > 1e-4
