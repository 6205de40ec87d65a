"""Products of few rows and samples from them against torch, and runs of kernels against single ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rldsl.backends.torch.generate.op_trace import trace
from rldsl.backends.torch.generate.sampling import choose
from rldsl.backends.torch.kernels import cpu_kernels, cpu_sampling, few_row_products, kernel_library
from rldsl.backends.torch.kernels.few_row_products import few_row_product, takes
from rldsl.backends.torch.kernels.kernel_library import KernelCall, KernelRun, joined
from rldsl.plan.events import Sampling

pytestmark = [pytest.mark.skipif(not kernel_library.available(), reason="no C compiler"), pytest.mark.numeric]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 48, 63, 64, 65, 72, 130])
@pytest.mark.parametrize("size, columns", [(1, 1), (5, 7), (16, 48), (17, 49), (64, 97), (100, 130)])
def test_products(rows: int, size: int, columns: int) -> None:
    """Rows with others between them, blocks and tiles of which the last ones are smaller, with and without a bias."""
    x, weight, bias = torch.randn(rows, size + 3)[:, :size], torch.randn(columns, size), torch.randn(columns)
    for b in (None, bias):
        expected = nn.functional.linear(x.double(), weight.double(), None if b is None else b.double()).float()
        torch.testing.assert_close(few_row_product(x, weight, b), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 65])
@pytest.mark.parametrize("size, columns", [(1023, 9), (1024, 53), (1031, 55)])
def test_products_of_long_rows(rows: int, size: int, columns: int) -> None:
    """In tiles of other sizes."""
    x, weight = torch.randn(rows, size), torch.randn(columns, size) / size**0.5
    torch.testing.assert_close(few_row_product(x, weight), (x.double() @ weight.double().T).float(), rtol=1e-5,
                               atol=1e-5)


def test_a_row_is_the_same_among_others() -> None:
    """Whatever rows are with it: up to four, and more. Sums have one order in each kind of tile."""
    for size in (40, 1040):
        x, weight = torch.randn(64, size), torch.randn(50, size)
        for counts in ((1, 2, 3, 4), (5, 8, 16, 30, 48, 64)):
            whole = few_row_product(x[: counts[-1]], weight)
            for rows in counts:
                assert torch.equal(few_row_product(x[:rows], weight), whole[:rows])
        for rows in (1, 2, 3, 4):  # whatever columns are with one, too
            assert torch.equal(few_row_product(x[:rows], weight[3:24].contiguous()),
                               few_row_product(x[:rows], weight)[:, 3:24])


def test_what_is_not_taken() -> None:
    x, weight = torch.randn(8, 16), nn.Parameter(torch.randn(4, 16))
    assert takes(x, weight) and takes(x, weight, torch.ones(4)) and takes(torch.randn(8, 32)[:, 3:19], weight)
    assert takes(x[:1], weight) and not takes(x[:0], weight)
    assert not takes(torch.empty(few_row_products.MAX_ELEMENTS // 16 + 1, 16), weight)
    assert not takes(torch.randn(16, 8).T, weight) and not takes(x, torch.randn(16, 4).T)
    assert not takes(x.double(), weight) and not takes(x.to("meta"), weight)
    assert not takes(torch.empty(8, 0), torch.empty(4, 0)) and not takes(x, weight, torch.ones(8)[::2])
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes(x, weight)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 16, 50, 64, 70])
@pytest.mark.parametrize("columns", [1, 5, 47, 48, 300, 9000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_samples(rows: int, columns: int, temperature: float) -> None:
    """As from a table: with logits that are kept, and with those of 9000 columns, which are multiplied again."""
    hidden, head = torch.randn(rows, 24), torch.randn(columns, 24) * 0.3
    draws = torch.rand(rows, dtype=torch.float64)
    tokens, logprobs = cpu_sampling.sample(hidden, head, draws, temperature)
    expected = choose(hidden @ head.T, Sampling(temperature=temperature), draws, None, torch.tensor([0]))
    same = tokens == expected[0]
    assert int((~same).sum()) <= 1  # a draw at the border between two tokens
    torch.testing.assert_close(logprobs[same], expected[1][same], rtol=1e-4, atol=1e-5)


def test_how_often_a_token_is_drawn() -> None:
    hidden, head = torch.randn(1, 8), torch.randn(100, 8)
    draws = (torch.arange(500, dtype=torch.float64) + 0.5) / 500
    tokens, _ = cpu_sampling.sample(hidden.expand(500, 8).contiguous(), head, draws, 1.0)
    counts = torch.bincount(tokens, minlength=100)
    assert bool((tokens.diff() >= 0).all())
    assert bool(((counts - 500 * (hidden @ head.T)[0].softmax(0)).abs() <= 1.01).all())


def test_the_ends_of_the_distribution_and_numbers_that_are_none() -> None:
    head = torch.full((200, 1), -torch.inf)  # groups of columns in which no token has weight
    head[60], head[61] = 0.0, 1.0
    hidden = torch.ones(6, 1)
    hidden[3] = torch.nan
    draws = torch.tensor([1e-300, 1 - 2.0**-53, 0.5, 0.5, 0.26, 0.27], dtype=torch.float64)
    tokens, logprobs = cpu_sampling.sample(hidden, head, draws, 1.0)
    assert tokens.tolist()[:3] + tokens.tolist()[4:] == [60, 61, 61, 60, 61] and 0 <= int(tokens[3]) < 200
    assert bool(logprobs[3].isnan()) and bool(logprobs[[0, 1, 2, 4, 5]].isfinite().all())


def layer(x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Kernels alone, with a sum."""
    n = cpu_kernels.rms_norm(x, norm, 1e-6)
    return x + few_row_product(cpu_kernels.gated_product(n, x), weight)


def test_a_run_of_kernels_is_one_call() -> None:
    """Which gives the numbers of the single ones, on what tensors then hold and wherever their memory then is."""
    x, weight, norm = torch.randn(8, 16), torch.randn(16, 16), torch.rand(16)

    def step() -> tuple[torch.Tensor, ...]:
        return (layer(layer(x, weight, norm), weight, norm),)

    with torch.no_grad():
        _, captured = trace(step)
        (run,) = captured.ops
        assert isinstance(run, KernelRun) and [c.kernel for c in run.calls] == \
            ["rms_norm", "gated_product", "few_row_product", "add"] * 2
        x.normal_()
        assert torch.equal(captured()[0], step()[0])
        weight.data = torch.randn(16, 16)  # what the trace has not made may move at any time
        assert torch.equal(captured()[0], step()[0])
        places = [x.data_ptr() for x in run.tensors]
        captured.release_memory()
        assert not captured.has_memory
        weight.data = torch.randn(16, 16)
        between = [torch.zeros(8, 16) for _ in run.tensors]  # where its memory was
        captured.allocate_memory()
        assert torch.equal(captured()[0], step()[0]) and [x.data_ptr() for x in run.tensors] != places
        assert not any(x.any() for x in between)
        assert {*map(id, run.watched)} == {id(x), id(norm), id(weight)}


def test_whole_numbers_where_the_kernel_has_fractions() -> None:
    """An argument is what the kernel's type says, in a run as in a single call."""
    x, weight = torch.randn(8, 16), torch.rand(16)
    alone, in_run = torch.empty(8, 16), torch.empty(8, 16)
    calls = [KernelCall("rms_norm", (x, weight, 8, 16, 1, out, None)) for out in (alone, in_run)]
    calls[0]()
    KernelRun([calls[1], calls[1]])()
    assert torch.equal(alone, in_run)


def test_what_stands_between_runs() -> None:
    x, out = torch.randn(8, 16), torch.empty(8, 16)
    call, other = KernelCall("add", (x, x, out.numel(), out)), lambda: None
    steps = joined([call, call, other, call, other, call, call, call])
    assert [type(s) for s in steps] == [KernelRun, type(other), KernelCall, type(other), KernelRun]
    assert joined([]) == []
    alone = KernelCall("exp_sums", (x, x[:, 0].contiguous(), 8, 16, out))  # a kernel that runs do not have
    assert joined([alone, alone]) == [alone, alone]


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    failing = SimpleNamespace(few_row_product=lambda *_: 1, run_calls=lambda *_: 1)
    monkeypatch.setattr(kernel_library, "library", lambda: failing)
    call = few_row_products.product_call(torch.empty(8, 4), x, weight, None)
    for run in (call, KernelRun([call, call])):
        with pytest.raises(MemoryError):
            run()
