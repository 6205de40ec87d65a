"""Megatron's GPTModel gives what plain transformers gives, for every family and on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.plan.events import Sampling
from rldsl.plan.layout import degree_product
from rldsl.plan.model import Layout
from tests.backend_torch.shards import pack, plan_model
from tests.backend_torch.test_forward import ROWS, reference
from tests.megatron.shards import layout_of as at
from tests.megatron.shards import needed, shard_of
from tests.tiny import make_model
from tests.world import run_world

needed()
FAMILIES: dict[str, dict[str, Any]] = {
    "llama_biases": dict(family="llama", attention_bias=True, mlp_bias=True),
    "llama3_rope": dict(family="llama", max_position_embeddings=32, rope_parameters=dict(
        rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8)),
    "linear_rope": dict(family="llama", rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
    "mistral": dict(sliding_window=3, num_hidden_layers=3),  # stages of one and of two layers
    "qwen2": dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    "qwen3": {},
    "mixtral": dict(num_local_experts=4, num_hidden_layers=2),
    "qwen3_moe": dict(num_experts=8, moe_intermediate_size=24, num_experts_per_tok=3, num_hidden_layers=2,
                      norm_topk_prob=False),
}
EVERY = [at(), at(tp=2), at(pp=2), at(dp=2), at(cp=2), at(tp=2, pp=2), at(cp=2, tp=2), at(tp=4), at(pp=4)]
SOME = [at(), at(tp=2, pp=2), at(tp=4)]
MIXED = [at(), at(tp=2, pp=2), at(dp=2, ep=2), at(dp=2, tp=2, ep=2), at(dp=4, ep=4)]


def make(folder: Path, name: str, head: str = "causal_lm") -> str:
    options = dict(FAMILIES[name])
    return str(make_model(folder / f"{name}-{head}", options.pop("family", name), head, **options))


def logprobs(rank: int, path: str, kind: str, what: str, layouts: list[Layout], temperature: float) -> list[Any]:
    model, found = plan_model(path, kind), []
    for layout in layouts:
        made = shard_of(model, layout, rank)
        if made is not None:
            found.append(made[0].infer([pack(ROWS[:4]), pack(ROWS[4:])], what, temperature).numpy())
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    path = make(tmp_path, name)
    expected = reference(path, 0.7)
    layouts = EVERY if name == "qwen3" else MIXED if name in ("mixtral", "qwen3_moe") else SOME
    for found in run_world(4, logprobs, path, "causal_lm", "logprobs", layouts, 0.7):
        for result in found:
            assert torch.allclose(torch.from_numpy(result), expected, rtol=0, atol=1e-5), name


def test_scores_equal_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    path = make(tmp_path, "qwen3", "reward_model")
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.stack([
            model.model(torch.tensor([p + r])).last_hidden_state[0, -1] @ model.score.weight[0] for p, r in ROWS])
    for found in run_world(4, logprobs, path, "reward_model", "scores", SOME, 1.0):
        for result in found:
            assert torch.allclose(torch.from_numpy(result), expected, rtol=0, atol=1e-5)


def samples(rank: int, path: str, layouts: list[Layout], sampling: Sampling) -> list[Any]:
    model, found = plan_model(path), []
    for layout in layouts:
        made = shard_of(model, layout, rank)
        if made is not None:
            for limit in (0, 4):
                out = made[0].generate(pack([(p, []) for p, _ in ROWS]), sampling, seed=3, step=5, limit=limit)
                again = made[0].infer([out.batch], "logprobs", sampling.temperature)
                assert torch.allclose(again, out.logprobs, rtol=0, atol=1e-5)
                found.append((out.batch.tokens.tolist(), out.batch.response_lens.tolist()))
    return found


def test_samples_are_those_of_the_torch_backend(tmp_path: Path) -> None:
    from tests.backend_torch.test_forward import _generations

    sampling = Sampling(max_new_tokens=8, temperature=1.3, top_p=0.95, top_k=30, min_new_tokens=2)
    for name, layouts in (("qwen3", [at(), at(tp=2), at(pp=2)]), ("mixtral", [at(dp=2, ep=2)])):
        path = make(tmp_path, name)
        (expected, *_), = run_world(1, _generations, path, [(1, 1, 1)], [(sampling, 0)])
        for rank in run_world(2, samples, path, layouts, sampling):
            assert all(found == expected[:2] for found in rank)


def boxes(rank: int, path: str, layouts: list[Layout]) -> bool:
    """Every box that a rank has is that of the directory, bit by bit, and Megatron's tensors are the same memory."""
    from safetensors.torch import load_file

    from rldsl.plan.boxes import local_slice, slices

    whole, same = load_file(f"{path}/model.safetensors"), True
    for layout in layouts:
        assert degree_product(layout) == 4
        shard, _ = shard_of(plan_model(path), layout, rank)
        tensors = shard.tensors()
        for name, (parameter, pieces) in shard.stage.held.items():
            for p in pieces:
                same &= torch.equal(tensors[name][local_slice(p, p.box, parameter.dim)], whole[name][slices(p.box)])
            tensors[name].fill_(7.0)
        seen = [p for chunk in shard.stage.chunks for p in chunk.model.parameters()]
        same &= all(bool((p == 7.0).all()) for p in seen) and len(seen) > 4
    return same


def test_boxes_are_views(tmp_path: Path) -> None:
    assert run_world(4, boxes, make(tmp_path, "llama_biases"), [at(tp=2, pp=2), at(tp=4), at(pp=4)]) == [True] * 4
