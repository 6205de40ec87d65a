"""The kernels of decoder layers in Triton's interpreter, against torch's operations, in a process of its own: what
Triton defines is interpreted or compiled from the moment that it is imported.

    TRITON_INTERPRET=1 python -m tests.cuda_paths.layer_kernels_check      # one line of JSON
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from rldsl.backends.torch.kernels.layer_kernels import GatedProductFunction, RotaryFunction, normalized

DTYPES = (torch.float32, torch.bfloat16)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def gap(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, expected, strict=True))


def rotary() -> Iterator[tuple[str, float]]:
    """Heads that do not fill a block, sizes that are no power of two, a view as projections give it."""
    for dtype in DTYPES:
        for heads, tokens, size in ((5, 3, 8), (1, 1, 24), (4, 7, 20)):
            cos, sin = drawn(tokens, size, seed=1), drawn(tokens, size, seed=2)
            grad = drawn(tokens, heads, size, seed=3).to(dtype).transpose(0, 1)
            both = []
            for function in (lambda x: RotaryFunction.apply(x, cos, sin, dtype),
                             lambda x: plain_rotary(x, cos, sin).to(dtype)):
                x = drawn(tokens, heads, size, seed=0).to(dtype).transpose(0, 1).requires_grad_()
                out = function(x)
                both.append([out.detach(), *torch.autograd.grad(out, x, grad)])
            yield f"rotary {dtype} {heads} {size}", gap(*both)


def gated() -> Iterator[tuple[str, float]]:
    for dtype in DTYPES:
        for count in (1, 1024, 3000):
            grad, both = drawn(count, seed=2).to(dtype), []
            for function in (GatedProductFunction.apply, lambda a, b: F.silu(a) * b):
                a, b = ((drawn(count, seed=seed) * 4).to(dtype).requires_grad_() for seed in (0, 1))
                out = function(a, b)
                both.append([out.detach(), *torch.autograd.grad(out, (a, b), grad)])
            yield f"gated {dtype} {count}", gap(*both)


def norms() -> Iterator[tuple[str, float]]:
    for size, stored in ((8, torch.bfloat16), (20, torch.float32), (130, torch.float32)):
        x, weight = drawn(2, 3, size, seed=0) * 3, drawn(size, seed=1).to(stored)
        found = normalized(x, weight, 1e-5, torch.bfloat16)
        right = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.bfloat16().float()
        yield f"norm {stored} {size}", gap([found], [right.bfloat16()])


if __name__ == "__main__":
    print(json.dumps(dict([*rotary(), *gated(), *norms()])))
