"""Scores and samples on Megatron: those of plain transformers, and of the torch backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import pytest

from rldsl.plan.events import Sampling
from rldsl.plan.model import Layout
from tests.backend_torch.shards import pack, plan_model
from tests.backend_torch.test_forward import ROWS
from tests.megatron.shards import layout_of as at
from tests.megatron.shards import make, needed, shard_of
from tests.world import run_world

needed()


def scores(rank: int, path: str, layouts: list[Layout]) -> list[Any]:
    """As arrays: a tensor would be shared by a process that has ended."""
    made = [shard_of(plan_model(path, "reward_model"), layout, rank) for layout in layouts]
    return [m[0].infer([pack(ROWS[:4]), pack(ROWS[4:])], "scores", 1.0).numpy() for m in made if m is not None]


def test_scores_equal_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    path = make(tmp_path, "qwen3", "reward_model")
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.stack([
            model.model(torch.tensor([p + r])).last_hidden_state[0, -1] @ model.score.weight[0] for p, r in ROWS])
    for found in run_world(4, scores, path, [at(), at(tp=2, pp=2)]):
        for result in found:
            assert torch.allclose(torch.from_numpy(result), expected, rtol=0, atol=1e-5)


def samples(rank: int, path: str, layouts: list[Layout], sampling: Sampling) -> list[Any]:
    model, found = plan_model(path), []
    for layout in layouts:
        made = shard_of(model, layout, rank)
        if made is not None:
            for limit in (0, 4):
                out = made[0].generate(pack([(p, []) for p, _ in ROWS]), sampling, seed=3, step=5, max_num_seqs=limit)
                again = made[0].infer([out.batch], "logprobs", sampling.temperature)
                assert torch.allclose(again, out.logprobs, rtol=0, atol=1e-5)
                found.append((out.batch.tokens.tolist(), out.batch.response_lens.tolist()))
    return found


@pytest.mark.thorough
def test_samples_are_those_of_the_torch_backend(tmp_path: Path) -> None:
    from tests.backend_torch.test_forward import _generations

    sampling = Sampling(max_new_tokens=8, temperature=1.3, top_p=0.95, top_k=30, min_new_tokens=2)
    for name, layouts in (("qwen3", [at(), at(tp=2), at(pp=2)]), ("mixtral", [at(dp=2, ep=2)])):
        path = make(tmp_path, name)
        (expected, *_), = run_world(1, _generations, path, [(1, 1, 1)], [(sampling, 0)])
        for rank in run_world(2, samples, path, layouts, sampling):
            assert all(found == expected[:2] for found in rank)
