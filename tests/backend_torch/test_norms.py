"""Norms with a gradient of their own give the numbers and gradients of the family's code; others are left alone."""

from __future__ import annotations

import pytest
import torch
from rldsl.backends.torch.kernels.rms_norms import RMSNormFunction, fuse_norms
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

CPU = torch.device("cpu")


def test_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.float64, generator=g, requires_grad=True) for shape in ((2, 3, 6), 6))
    eps = torch.tensor(1e-6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *given: RMSNormFunction.apply(*given, eps), (x, weight))
    assert torch.autograd.gradcheck(lambda x: RMSNormFunction.apply(x, weight.detach(), eps), (x,))


@pytest.mark.parametrize("kind", (LlamaRMSNorm, Qwen3RMSNorm))
def test_a_known_norm_gives_what_it_gave(kind: type[nn.Module]) -> None:
    g = torch.Generator().manual_seed(1)
    plain, fused = kind(16, eps=1e-3), kind(16, eps=1e-3)
    with torch.no_grad():
        fused.weight.copy_(plain.weight.normal_(generator=g))
    before = fused.forward
    fuse_norms(fused, CPU)
    assert fused.forward != before
    x = torch.randn(1, 40, 16, generator=g) * torch.logspace(-3, 2, 40)[:, None]
    grad = torch.randn(1, 40, 16, generator=g)
    found = []
    for norm in (plain, fused):
        leaf = x.clone().requires_grad_()
        out = norm(leaf)
        out.backward(grad)
        found.append((out.detach(), leaf.grad, norm.weight.grad))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-5 * float(a.abs().max()))


def test_half_precision_is_the_familys_own() -> None:
    fused, plain = Qwen3RMSNorm(8), Qwen3RMSNorm(8)
    fuse_norms(fused, CPU)
    x = torch.linspace(-1, 1, 24).view(1, 3, 8).bfloat16()
    assert torch.equal(fused(x), plain(x)) and fused(x).dtype == plain(x).dtype


@pytest.mark.parametrize("norm", (GemmaRMSNorm(8), nn.LayerNorm(8), nn.LayerNorm(8, bias=False)))
def test_other_norms_are_left_alone(norm: nn.Module) -> None:
    fuse_norms(norm, CPU)
    assert "forward" not in vars(norm)
