"""bfloat16: a home, which holds float32, and every other copy compute the same numbers, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rldsl.plan.events import Sampling
from rldsl.plan.model import Optimizer
from tests.backend_torch.shards import pack, plan_model, ragged
from tests.backend_torch.test_forward import _partial
from tests.samples import thorough_between
from tests.tiny import make_model
from tests.world import run_world

ROWS = [(p, r) for p, r in ragged(12, 46, seed=3) if r]
PROMPTS = [(p, []) for p, _ in ROWS]
SAMPLING = Sampling(max_new_tokens=6)
LAYOUTS = [(1, 1, 1), (1, 1, 2), (1, 2, 1)]
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[],
               decoder_sparse_step=1)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {}, "llama": {"attention_bias": True}, "gpt2": {}, "gemma": {"head_dim": 8}, "olmo2": {},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4},
    "qwen3_moe": {"head_dim": 8, **MIXTURE}}


def _numbers(shard: Any) -> list[torch.Tensor]:
    made = shard.generate(pack(PROMPTS), SAMPLING, seed=1, step=0, max_num_seqs=0)
    return [shard.infer([pack(ROWS)], "logprobs", 1.0), shard.infer([pack(ROWS)], "entropy", 0.7), made.batch.tokens,
            made.logprobs]


def _copies(rank: int, path: str, layouts: list[tuple[int, int, int]]) -> list[tuple[list[bool], bool, bool]]:
    """(which numbers are equal, whether training sees the same log-probs, whether rounding matters)."""
    found = []
    for layout in layouts:
        model = plan_model(path, "causal_lm", Optimizer(lr=1e-3), dtype="bfloat16")
        home = _partial(model, rank, *layout, trainable=True)
        copy = _partial(replace(model, train_layout="", optimizer=None), rank, *layout)
        if home is None:
            continue
        for name, tensor in home.state_dict().items():
            drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
            tensor.mul_(1 + 0.05 * drawn).add_(0.01 * drawn)  # norms and biases too are no bfloat16 numbers
            copy.state_dict()[name].copy_(tensor)
        rounds = all(copy.state_dict()[n].dtype == torch.bfloat16 and not torch.equal(t, copy.state_dict()[n].float())
                     for n, t in home.state_dict().items() if t.numel() > 1)
        mine, theirs = _numbers(home), _numbers(copy)
        seen: list[torch.Tensor] = []
        home.train([(pack(ROWS),)], [("logprobs",)], 1.0,
                   lambda i, f: seen.append(f[0]["logprobs"].detach()) or f[0]["logprobs"].sum())
        fresh = all(torch.equal(x, mine[0]) for x in seen)
        found.append(([torch.equal(a, b) for a, b in zip(mine, theirs)], fresh, rounds))
    return found


@pytest.mark.parametrize("family", thorough_between(FAMILIES))
def test_a_copy_computes_what_its_home_does(tmp_path, family):
    path = make_model(tmp_path / "m", family, **FAMILIES[family])
    layouts = LAYOUTS[:1] if family in ("gpt2", "qwen3_moe") else LAYOUTS
    for found in run_world(2 if len(layouts) > 1 else 1, _copies, str(path), layouts, timeout=60):
        for equal, fresh, rounds in found:
            assert equal == [True] * 4 and fresh and rounds


def _contexts(rank: int, path: str, recompute: str) -> tuple[set[bool], set[bool], int]:
    """Whether autocast was on: in forward passes of a layer's norm, in the backward pass; and forward passes."""
    model = plan_model(path, "causal_lm", Optimizer(lr=1e-3), dtype="bfloat16")
    home = _partial(model, rank, 1, 1, 1, trainable=True)
    forward: list[bool] = []
    backward: list[bool] = []
    norm = next(m for name, m in home.stage.chunks[0].body.named_modules() if name.endswith("layers.0.input_layernorm"))
    norm.register_forward_pre_hook(lambda *_: forward.append(torch.is_autocast_enabled("cpu")))
    norm.register_forward_hook(lambda *args: args[-1].requires_grad and args[-1].register_hook(
        lambda _: backward.append(torch.is_autocast_enabled("cpu"))) and None)
    home.train([(pack(ROWS),)], [("logprobs",)], 1.0, lambda i, f: f[0]["logprobs"].sum(), recompute=recompute)
    return set(forward), set(backward), len(forward)


@pytest.mark.parametrize(("recompute", "passes"), [("none", 1), ("full", 2)])
def test_backward_leaves_autocast(tmp_path, recompute, passes):
    """Inside it, a product in the backward of a function of our own would be rounded to bfloat16."""
    path = make_model(tmp_path / "m", "qwen3", num_hidden_layers=2)
    [found] = run_world(1, _contexts, str(path), recompute, timeout=60)
    assert found == ({True}, {False}, passes)
