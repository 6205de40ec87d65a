"""Gradients of weights by the kernel against torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rldsl.backends.torch.kernels import kernel_library, outer_products, products

pytestmark = [pytest.mark.skipif(not kernel_library.available(), reason="no C compiler"), pytest.mark.numeric]


@pytest.mark.parametrize("terms", [1, 255, 257, 600])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 11, 64])
@pytest.mark.parametrize("columns", [16, 48, 64, 144])
def test_sums(terms: int, rows: int, columns: int) -> None:
    """Runs of terms, tiles of rows and of vectors, of which the last ones are smaller."""
    grad, x, total = torch.randn(terms, rows), torch.randn(terms, columns), torch.randn(rows, columns)
    expected = (total.double() + grad.double().T @ x.double()).float()
    found = outer_products.add(total, grad, x)
    assert found is total
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_nothing_to_add() -> None:
    total = torch.randn(4, 16)
    before = total.clone()
    assert torch.equal(outer_products.add(total, torch.empty(0, 4), torch.empty(0, 16)), before)


def test_what_is_not_taken() -> None:
    grad, x = torch.randn(8, 4), nn.Parameter(torch.randn(8, 16))
    assert outer_products.takes(grad, x)
    assert not outer_products.takes(grad, torch.randn(8, 20)) and not outer_products.takes(grad, torch.empty(8, 0))
    assert not outer_products.takes(torch.empty(8, outer_products.MAX_ROWS + 1), x)
    assert not outer_products.takes(torch.randn(4, 8).T, x) and not outer_products.takes(grad, torch.randn(16, 8).T)
    assert not outer_products.takes(grad.double(), x.double()) and not outer_products.takes(grad.to("meta"), x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not outer_products.takes(grad, x)


@pytest.mark.parametrize("total", [torch.zeros(4, 17), torch.zeros(4, 16, dtype=torch.float64), torch.zeros(16, 4).T,
                                   torch.zeros(3, 16)])
def test_another_total(total: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="does not take"):
        outer_products.add(total, torch.randn(8, 4), torch.randn(8, 16))


@pytest.mark.parametrize("inputs, bias", [(32, True), (32, False), (20, True)])
def test_a_small_layer(inputs: int, bias: bool) -> None:
    """Its forward pass is torch's; gradients are those of torch, with the kernel and, with 20 inputs, without."""
    layer = nn.Linear(inputs, 24, bias=bias)
    x = torch.randn(2, 7, inputs, requires_grad=True)
    grads = []
    for forward in (products.linear, nn.functional.linear):
        layer.zero_grad()
        x.grad = None
        out = forward(x, layer.weight, layer.bias)
        out.square().sum().backward()
        grads.append([x.grad, *(p.grad for p in layer.parameters())])
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
