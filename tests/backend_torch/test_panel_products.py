"""Products of many rows by the kernel against torch in float64, and that they are what layers use."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rldsl.backends.torch.generate.op_trace import trace
from rldsl.backends.torch.kernels import c_compiler, kernel_library, linear_layers, panel_products, products
from rldsl.backends.torch.kernels.few_row_products import few_row_product
from rldsl.backends.torch.kernels.panel_products import add_panel_product, panel_product, takes

pytestmark = [pytest.mark.skipif(not kernel_library.available(), reason="no C compiler"), pytest.mark.numeric]


WAYS = ("by rows", "by columns", "apart")


def matrix(rows: int, size: int, way: str) -> torch.Tensor:
    """[rows, size], by rows or by columns in memory, or with numbers between its rows."""
    if way == "by columns":
        return torch.randn(size, rows).T
    return torch.randn(rows, size + 3)[:, :size] if way == "apart" else torch.randn(rows, size)


@pytest.mark.parametrize("of_rows, way", [*product(WAYS[:1], WAYS), *product(WAYS[1:], WAYS[:1])])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 97, 200])
@pytest.mark.parametrize("size, columns", [(1, 1), (5, 7), (16, 48), (17, 49), (64, 64), (31, 65), (100, 130),
                                           (511, 3), (513, 24), (1030, 70)])
def test_products(rows: int, size: int, columns: int, way: str, of_rows: str) -> None:
    """Blocks of rows and of terms, tiles and panels of which the last ones are smaller; with a bias, and added."""
    x, weight, bias, total = matrix(rows, size, of_rows), matrix(columns, size, way), torch.randn(columns), torch.randn(
        rows, columns)
    exact = x.double() @ weight.double().T
    close = {"rtol": 1e-5, "atol": 1e-6 * size}
    for found, more in ((panel_product(x, weight), 0), (panel_product(x, weight, bias), bias),
                        (add_panel_product(total.clone(), x, weight), total)):
        torch.testing.assert_close(found, (exact + more).float(), **close)


@pytest.mark.parametrize("way", WAYS)
def test_more_panels_than_are_kept_at_a_time(way: str) -> None:
    x, weight = torch.randn(7, 512), matrix(5000, 512, way)
    torch.testing.assert_close(panel_product(x, weight), (x.double() @ weight.double().T).float(), rtol=1e-4, atol=1e-4)


def test_nothing_but_its_own_columns_is_written() -> None:
    """The last vector of a row ends where the next row begins."""
    x, weight = torch.full((9, 20), 1.0), torch.full((50, 20), 1.0)
    assert torch.equal(panel_product(x, weight), torch.full((9, 50), 20.0))


@pytest.mark.parametrize("size, columns", [(48, 100), (1100, 70)])
def test_a_row_has_the_same_bits_in_every_batch(size: int, columns: int) -> None:
    x, weight, bias = torch.randn(300, size), torch.randn(columns, size), torch.randn(columns)
    whole = panel_product(x, weight, bias)
    for rows in (slice(0, 1), slice(5, 8), slice(95, 193), slice(17, 300)):
        assert torch.equal(panel_product(x[rows], weight, bias), whole[rows])
    for some in (slice(0, 1), slice(3, 68)):
        assert torch.equal(panel_product(x, weight[some], bias[some]), whole[:, some])
    assert torch.equal(panel_product(x, weight.T.contiguous().T, bias), whole)
    assert torch.equal(panel_product(x.T.contiguous().T, weight, bias), whole)


def test_the_compiler_tunes_for_a_processor_that_fuses_in_some_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """GCC does not fuse products and sums in loops with one sum for processors such as Zen 3: a row alone would have
    other bits than among others."""
    flags = ("--param=avoid-fma-max-bits=512", *c_compiler.FAST_FLAGS)
    found = c_compiler.load(kernel_library.SOURCE, flags, kernel_library.ARGUMENTS)
    monkeypatch.setattr(kernel_library, "library", lambda: found)
    test_a_row_has_the_same_bits_in_every_batch(48, 100)
    x, weight = torch.randn(4, 40), torch.randn(50, 40)
    whole = few_row_product(x, weight)
    for row in range(4):
        assert torch.equal(few_row_product(x[row : row + 1], weight), whole[row : row + 1])


def test_the_order_of_a_sum_is_that_of_its_products() -> None:
    """A large number first and its opposite last: what is added between is rounded to multiples of its last place."""
    size = 700
    x, weight = torch.ones(2, size), torch.full((3, size), 0.25)
    weight[:, 0], weight[:, -1] = 2.0**24, -(2.0**24)
    assert torch.equal(panel_product(x, weight), torch.zeros(2, 3))


def test_the_bits_are_the_same_on_any_number_of_threads() -> None:
    x, weight = torch.randn(700, 300).T, torch.randn(500, 700)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(panel_product(x, weight))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_infinities_and_nan() -> None:
    x, weight = torch.ones(8, 40), torch.ones(20, 40)
    x[2, 3], weight[5, 7] = torch.inf, torch.nan
    found = panel_product(x, weight)
    assert torch.equal(found.isnan(), torch.zeros(8, 20).index_fill(1, torch.tensor([5]), 1).bool())
    assert found[2, :5].isinf().all() and found[[0, 1, 3]][:, :5].isfinite().all()


def test_what_is_not_taken() -> None:
    x, weight = torch.randn(64, 32), nn.Parameter(torch.randn(48, 32))
    assert takes(x, weight) and takes(x, weight.T.contiguous().T, torch.randn(48))
    assert takes(torch.randn(32, 64).T, weight)
    assert not takes(torch.randn(64, 64)[:, ::2], weight) and not takes(x, torch.randn(96, 64)[::2, ::2])
    assert not takes(torch.empty(0, 32), weight) and not takes(x, torch.empty(0, 32))
    assert not takes(x.double(), weight.double()) and not takes(x, weight, torch.randn(96)[::2])
    assert not takes(x.to("meta"), weight.to("meta")) and not takes(x, weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes(x, weight)


@pytest.mark.parametrize("total", [torch.zeros(64, 47), torch.zeros(64, 48, dtype=torch.float64),
                                   torch.zeros(48, 64).T])
def test_another_total(total: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="does not take 64 rows of 48"):
        add_panel_product(total, torch.randn(64, 32), torch.randn(48, 32))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As on a machine where MKL is no faster, without the kernel for few rows. Names of the functions that were called
    and multiply by panels."""
    monkeypatch.setattr(products.few_row_products, "takes", lambda *_: False)
    monkeypatch.setattr(products, "panels_are_fast", lambda: True)
    monkeypatch.setattr(products, "_onednn", lambda *_: pytest.fail("oneDNN was called"))
    found: list[str] = []

    def count(module: Any, name: str) -> None:
        plain = getattr(module, name)

        def called(*args: Any) -> torch.Tensor:
            found.append(name)
            result: torch.Tensor = plain(*args)
            return result

        monkeypatch.setattr(module, name, called)

    count(panel_products, "panel_product")
    count(panel_products, "add_panel_product")
    count(linear_layers, "_add_gradients")
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(90,), (3, 30), (2,)])
def test_a_layer_and_its_gradients(counted: list[str], shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(40, 56, bias=bias)
    x = torch.randn(*shape, 40, requires_grad=True)
    results = []
    for forward in (linear_layers.linear, nn.functional.linear):
        layer.zero_grad()
        x.grad = None
        out = forward(x, layer.weight, layer.bias)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert counted == ["panel_product"] * 3


@pytest.mark.parametrize("held", [False, True])
def test_gradients_of_several_passes_add_up(counted: list[str], held: bool) -> None:
    weight = nn.Parameter(torch.randn(56, 40))
    buffer = weight.grad = torch.zeros(56, 40) if held else None
    exact = torch.zeros(56, 40)
    for _ in range(3):
        x, grad = torch.randn(90, 40), torch.randn(90, 56)
        linear_layers.linear(x, weight, None).backward(grad)
        exact += grad.T @ x
    assert weight.grad is not None and (buffer is None or weight.grad is buffer)
    torch.testing.assert_close(weight.grad, exact, rtol=1e-4, atol=1e-4)
    assert counted.count("_add_gradients") == (3 if held else 2)


def test_gradients_of_a_head_add_up(counted: list[str]) -> None:
    """Of several tables of logits [rows, words], in the order of memory that the first total has."""
    total: torch.Tensor | None = None
    exact = torch.zeros(500, 24, dtype=torch.float64)
    for _ in range(3):
        table, hidden = torch.randn(30, 500), torch.randn(30, 24)
        total = products.add_product(total, table.T, hidden.T)
        exact += table.double().T @ hidden.double()
    assert total is not None and total.T.is_contiguous()
    torch.testing.assert_close(total, exact.float(), rtol=1e-4, atol=1e-4)
    assert counted == ["panel_product", "add_panel_product", "add_panel_product"]
    given = torch.zeros(500, 24)
    torch.testing.assert_close(products.add_product(given, table.T, hidden.T), (table.T @ hidden), rtol=1e-4, atol=1e-4)
    assert counted[3:] == ["add_panel_product"], "in the other order, too"
    torch.testing.assert_close(products.add_product(torch.zeros(500, 48)[:, ::2], table.T, hidden.T), given,
                               rtol=1e-4, atol=1e-4)
    assert len(counted) == 4, "MKL adds to a total of neither order"


def test_a_machine_where_torch_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "panels_are_fast", lambda: False)
    monkeypatch.setattr(products, "mkl_lacks_avx512", lambda: False)
    monkeypatch.setattr(panel_products, "panel_product", lambda *_: pytest.fail("the kernel was called"))
    x, weight = torch.randn(300, 600), torch.randn(48, 600)
    assert torch.equal(products.product(x, weight), x @ weight.T)


def test_a_trace_repeats_them() -> None:
    x, weight, bias = torch.randn(90, 40), torch.randn(56, 40), torch.randn(56)
    with torch.no_grad():
        (out,), captured = trace(lambda: (panel_product(x, weight, bias).relu(),))
    x.copy_(torch.randn(90, 40))
    assert torch.equal(captured()[0], panel_product(x, weight, bias).relu())


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "library", lambda: SimpleNamespace(panel_products=lambda *_: 1))
    with pytest.raises(MemoryError):
        panel_product(torch.randn(8, 16), torch.randn(4, 16))
