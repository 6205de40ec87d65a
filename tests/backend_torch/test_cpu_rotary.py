"""Rotary embeddings on CPUs against those of transformers: values, gradients, and which families get them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rldsl.backends.torch.kernels.cpu_rotary import CpuRotary, takes
from rldsl.backends.torch.model import fused_layers
from rldsl.plan.model import Optimizer
from tests.backend_torch.shards import make_shard, pack, plan_model
from tests.tiny import make_model


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("heads", "tokens", "size"), [(3, 5, 8), (1, 1, 2), (2, 33, 64)])
def test_values_and_gradients_are_those_of_transformers(heads: int, tokens: int, size: int) -> None:
    cos, sin = numbers(2, 1, tokens, size, seed=1)
    results = []
    for own in (True, False):
        q = numbers(1, tokens, heads, size, seed=2).requires_grad_()
        x = q.transpose(1, 2)
        out = CpuRotary.apply(x, cos, sin) if own else apply_rotary_pos_emb(x, x, cos, sin)[0]
        out.backward(numbers(*out.shape, seed=3))
        results.append((out, q.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert results[0][0].transpose(1, 2).is_contiguous()  # as attention wants it


def test_the_gradient_is_exact() -> None:
    x, angles = numbers(1, 2, 3, 4, dtype=torch.float64), numbers(1, 3, 4, seed=1, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: CpuRotary.apply(x, angles.cos(), angles.sin()), x.requires_grad_())


def test_what_it_does_not_take() -> None:
    q, cos = numbers(1, 2, 3, 4), numbers(1, 3, 4)
    assert takes(q, q, cos, cos)
    assert not takes(q.bfloat16(), q, cos, cos) and not takes(q, q, cos.double(), cos)
    assert not takes(q, q, cos[..., :2], cos[..., :2])            # a part of a head is rotated
    assert not takes(q.expand(2, -1, -1, -1), q, cos, cos) and not takes(q, q, cos[None], cos[None])
    assert not takes(q, q, cos.clone().requires_grad_(), cos)
    called: list[int] = []

    def plain(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        called.append(1)
        return q, q

    fused_layers.cpu_rotary(plain, q, q, cos, cos, unsqueeze_dim=2)
    fused_layers.cpu_rotary(plain, q.bfloat16(), q, cos, cos)
    assert len(called) == 2


@pytest.mark.parametrize(("family", "has"), [("qwen3", True), ("llama", True), ("gpt2", False), ("phi", True)])
def test_families_train_alike(tmp_path: Path, family: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi cuts out the part of a head that is rotated; GPT-2 rotates nothing."""
    path = str(make_model(tmp_path, family))
    rows = pack([([3, 4, 5], [6, 7]), ([8], [9, 10, 11])])
    used: list[int] = []
    monkeypatch.setattr(CpuRotary, "apply", _counting(CpuRotary.apply, used))
    grads = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(fused_layers, "_fuse_rotary", lambda *_: [])
        used.clear()
        # AdamW would clear the gradients
        shard: Any = make_shard(plan_model(path, optimizer=Optimizer(kind="sgd", lr=1e-3)), 0)
        shard.train([(rows,)], [("logprobs",)], 1.0, lambda _, out: out[0]["logprobs"].sum())
        grads.append(shard.trainer.grad_buffer.clone())
        assert bool(used) == (has and fused)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_an_invariant_model_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(CpuRotary, "apply", _counting(CpuRotary.apply, used))
    shard = make_shard(replace(plan_model(str(make_model(tmp_path, "llama"))), invariant=True), 0)
    shard.infer([pack([([3, 4], [5])])], "logprobs", 1.0)
    assert not used


def _counting(plain: Any, used: list[int]) -> Any:
    def apply(*args: Any) -> Any:
        used.append(1)
        return plain(*args)

    return apply
