"""The example `dapo_curriculum` against plain torch: which rows are drawn and kept, their numbers, loss and gradients.
Nothing of rldsl is used but the random number of each row, and the rows that the reward function saw."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from rldsl.runtime.draws import uniform
from rldsl.sharding.partition import key_of, mix
from tests.end_to_end import reference
from tests.end_to_end.reference import response_logprobs
from tests.end_to_end.test_reference import OPTIMIZER, assert_same, moved
from tests.papers.programs import program, root, run_all, sample

N, BATCH, TOKENS, BUFFER, WANTED = 8, 4, 6, 4, 40


def drawn(weights: list[float], iteration: int) -> list[int]:
    """The rows of the first step's batch: those with the largest log(u) / weight."""
    seed, count = mix(1, key_of("prompt"), iteration) >> 1, len(weights)
    u = uniform(seed, 0, torch.arange(count), torch.zeros(count, dtype=torch.int64)).tolist()
    return sorted(range(count), key=lambda i: -float(np.log(u[i])) / weights[i])[:BATCH]


def test_the_first_step(tmp_path: Path) -> None:
    base = root(tmp_path)
    here = str(base / "dapo_curriculum")
    made = program(base, "dapo_curriculum", (r"adamw\(lr=lr\)", OPTIMIZER), (r", minibatches=4", ""),
                   (r"  every 100 .*\n  checkpoint.*\n", ""),
                   (r"(  actor\.train.*\n)", f'  save actor to "{here}/before"\n\\1  save actor to "{here}/after"\n'),
                   note=True, steps=1, batch=BATCH, tokens=TOKENS, buffer=BUFFER, wanted=WANTED)
    ((step,),) = run_all(1, {made.name: made.compiled("place *.* on mesh(0:1)")}, base).values()
    prompts = [json.loads(line)["prompt"] for line in (base / "data/prompts.jsonl").read_text().splitlines()]
    seen = made.rows("exact_match")

    rates, kept, rewards, iteration = np.full(len(prompts), 0.5, np.float32), [], [], 0
    while len(kept) < WANTED and iteration < 4:
        rows = drawn(np.maximum(1 - rates, np.float32(0.05)).tolist(), iteration)
        for row in rows:
            answers, seen = seen[:N], seen[N:]
            assert {x["prompt"] for x, _ in answers} == {prompts[row]}
            right = [x for _, x in answers]
            rates[row] = np.float32(0.5) * rates[row] + np.float32(0.5) * np.float32(fmean(right))
            own = [sample(x) for x, _ in answers]
            own_rewards = [x + min(0.0, max(-1.0, (TOKENS - BUFFER - len(a.response)) / BUFFER))
                           for a, x in zip(own, right, strict=True)]
            rewards += own_rewards
            numbers = torch.tensor(own_rewards, dtype=torch.float64)
            advantages = (numbers - numbers.mean()) / (numbers.std() + 1e-4)
            kept += [*zip(own, advantages.tolist(), strict=True)] if max(right) > min(right) else []
        iteration += 1
    assert not seen and iteration > 1 and step["reward"] == pytest.approx(fmean(rewards), abs=1e-5)

    actor = reference.causal_lm(made.folder / "before")
    terms = []
    for answer, advantage in kept:
        new = response_logprobs(actor, answer)
        ratio = (new - new.detach()).exp()
        terms.append(torch.max(-advantage * ratio, -advantage * ratio.clip(0.8, 1.28)))
    loss = torch.cat(terms).mean()
    assert step["actor/loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    assert_same(moved(made.folder / "before", made.folder / "after"), reference.gradients(actor, loss))
