"""Rows of experts on a GPU: the same rows and gradients as by indexing, without adding by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rldsl.backends.torch.kernels import row_gathers
from rldsl.backends.torch.kernels.row_gathers import RepeatAndReorder, Reorder, inverse_of
from rldsl.backends.torch.model import experts
from rldsl.backends.torch.model.experts import parallelize_experts
from rldsl.runtime.backend import Axis

ONE = Axis((0,), 0, None)


class Added(TorchDispatchMode):
    """Names of operations that add by index."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if "index_put" in name or name.startswith(("index_add", "scatter_add")) and args[0].is_floating_point():
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def gradient(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    x = x.clone().requires_grad_()
    with Added() as added:
        out = function(x)
        (out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, added.found


@pytest.mark.parametrize("times", [1, 2, 5])
def test_repeated_rows(times: int) -> None:
    x, order = torch.randn(7, 3), torch.randperm(7 * times)
    out, grad, added = gradient(x, lambda x: RepeatAndReorder.apply(x, times, order, inverse_of(order)))
    right, right_grad, adds = gradient(x, lambda x: x[order // times])
    assert torch.equal(out, right) and torch.allclose(grad, right_grad, atol=1e-6)
    assert not added and adds  # the way to look is right


@pytest.mark.parametrize("shape", [(6,), (6, 4), (0, 4)])
def test_rows_in_another_order(shape: tuple[int, ...]) -> None:
    x, order = torch.randn(*shape), torch.randperm(shape[0])
    out, grad, added = gradient(x, lambda x: Reorder.apply(x, order, inverse_of(order)))
    right, right_grad, _ = gradient(x, lambda x: x[order])
    assert torch.equal(out, right) and torch.equal(grad, right_grad) and not added


class Experts:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.gate_up_proj, self.down_proj = (torch.randn(*n).requires_grad_() for n in ((4, 12, 8), (4, 8, 6)))

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    forward: Callable[..., torch.Tensor]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_layer_of_experts(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the functions do not look at the device: equal to a loop over tokens, in both directions."""
    if on_gpu:
        monkeypatch.setattr(experts, "reorder", lambda *x: Reorder.apply(*x))
        monkeypatch.setattr(experts, "repeat_and_reorder", lambda *x: RepeatAndReorder.apply(*x))
    module = Experts()
    parallelize_experts(module, 4, ONE, ONE)
    chosen = torch.tensor([[0, 3], [3, 1], [2, 0], [1, 0], [0, 1]])
    weights = torch.rand(5, 2)

    def by_token(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([sum((module._apply_gate(module.gate_up_proj[e] @ x[t]) @ module.down_proj[e].T) * w
                                for e, w in zip(chosen[t].tolist(), weights[t], strict=True)) for t in range(5)])

    found, right = (gradient(torch.randn(5, 8, generator=torch.Generator().manual_seed(1)), f) for f in
                    (lambda x: module.forward(x, chosen, weights), by_token))
    assert torch.allclose(found[0], right[0], atol=1e-4) and torch.allclose(found[1], right[1], atol=1e-4)
    assert bool(found[2]) != on_gpu


def test_a_cpu_indexes() -> None:
    x, order = torch.randn(4, 2), torch.randperm(8)
    _, _, added = gradient(x, lambda x: row_gathers.repeat_and_reorder(x, 2, order, inverse_of(order)))
    assert added
