"""Products by oneDNN: the same numbers as MKL's, only where they are wanted, and in captured steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.match import gap
from benchmarks.match import prompts as ragged_prompts
from rldsl.backends.torch.generate.op_trace import trace
from rldsl.backends.torch.kernels import few_row_products, linear_layers, panel_products, products
from rldsl.backends.torch.model import invariant_products
from rldsl.plan.events import Sampling
from rldsl.plan.model import Optimizer
from tests.backend_torch.shards import make_shard, pack, plan_model
from tests.tiny import make_model

pytestmark = pytest.mark.skipif(not products.has_onednn(), reason="this torch has no oneDNN")
ROWS, INPUTS, OUTPUTS = 128, 96, 160  # large enough


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """As on a machine where oneDNN is faster, and without kernels of ours. Shapes of what it has multiplied."""
    for kernel in (few_row_products, panel_products):
        monkeypatch.setattr(kernel, "takes", lambda *_: False)
    found: list[tuple[int, ...]] = []
    plain = products._onednn

    def counted(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found.append((*a.shape, b.shape[0]))
        return plain(a, b, bias)

    monkeypatch.setattr(products, "mkl_lacks_avx512", lambda: True)
    monkeypatch.setattr(products, "_onednn", counted)
    yield found


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)), dtype=dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(ROWS,), (1, ROWS), (4, ROWS // 4)])
def test_a_layer_and_its_gradients(calls: list[tuple[int, ...]], shape: tuple[int, ...], bias: bool) -> None:
    given = [numbers(*shape, INPUTS), numbers(OUTPUTS, INPUTS), numbers(OUTPUTS) if bias else None]
    results = []
    for layer in (linear_layers.linear, F.linear):
        leaves = [None if x is None else x.clone().requires_grad_() for x in given]
        out = layer(*leaves)
        out.backward(numbers(*out.shape))
        results.append([out, *(x.grad for x in leaves if x is not None)])
    for own, theirs in zip(*results, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
    assert calls == [(ROWS, INPUTS, OUTPUTS), (ROWS, OUTPUTS, INPUTS), (OUTPUTS, ROWS, INPUTS)]


class Doubled(torch.autograd.Function):
    """In place, as sums over tp are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


@pytest.mark.parametrize("shape", [(ROWS,), (1, ROWS), (4, ROWS // 4)])
def test_the_result_may_be_overwritten(calls: list[tuple[int, ...]], shape: tuple[int, ...]) -> None:
    results = []
    for layer in (linear_layers.linear, F.linear):
        x, weight = numbers(*shape, INPUTS).requires_grad_(), numbers(OUTPUTS, INPUTS).requires_grad_()
        out = Doubled.apply(layer(x, weight, None))
        out.backward(numbers(*out.shape))
        results.append((out, x.grad, weight.grad))
    for own, theirs in zip(*results, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
    assert len(calls) == 3


def test_a_frozen_weight_has_no_gradient(calls: list[tuple[int, ...]]) -> None:
    x, weight = numbers(ROWS, INPUTS).requires_grad_(), numbers(OUTPUTS, INPUTS)
    linear_layers.linear(x, weight, None).sum().backward()
    assert x.grad is not None and weight.grad is None and len(calls) == 2


@pytest.mark.parametrize("rows", [OUTPUTS, 8 * ROWS])
def test_products_are_added(calls: list[tuple[int, ...]], rows: int) -> None:
    total, a, b = numbers(rows, INPUTS), numbers(rows, OUTPUTS), numbers(INPUTS, OUTPUTS)
    expected = total + a @ b.T
    torch.testing.assert_close(products.add_product(total, a, b), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(products.product(a.T.contiguous().T, b), a @ b.T, rtol=1e-4, atol=1e-4)
    assert len(calls) == 2


def test_what_stays_with_torch(calls: list[tuple[int, ...]]) -> None:
    few = numbers(4, INPUTS), numbers(OUTPUTS, INPUTS)
    assert torch.equal(products.product(*few), few[0] @ few[1].T)
    narrow = numbers(1 << 15, INPUTS).T, numbers(2, 1 << 15)  # a long sum for each of few numbers
    assert torch.equal(products.product(*narrow), narrow[0] @ narrow[1].T)
    for dtype in (torch.float64, torch.bfloat16):
        large = numbers(ROWS, INPUTS, dtype=dtype), numbers(OUTPUTS, INPUTS, dtype=dtype)
        assert torch.equal(linear_layers.linear(*large, None), F.linear(*large))
    large = numbers(ROWS, INPUTS), numbers(OUTPUTS, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_layers.linear(*large, None).dtype == torch.bfloat16
    with FakeTensorMode():
        assert linear_layers.linear(torch.empty(ROWS, INPUTS), torch.empty(OUTPUTS, INPUTS), None).shape == (ROWS, OUTPUTS)
    assert linear_layers.linear(numbers(INPUTS), large[1], None).shape == (OUTPUTS,)
    assert not calls


@pytest.mark.parametrize("panels", [False, True])
def test_gradients_of_several_passes_add_up(panels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tensor that the weight has, or in a new one; hooks see the gradient; where the weight is computed from
    another, its gradient goes there."""
    monkeypatch.setattr(products, "panels_are_fast", lambda: panels)
    xs, grads = [numbers(ROWS, INPUTS) for _ in range(3)], [numbers(ROWS, OUTPUTS) for _ in range(3)]
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-3)
    expected = sum((g.T @ x for x, g in zip(xs, grads, strict=True)), start=torch.zeros(OUTPUTS, INPUTS))
    fresh, given, hooked, watched = (torch.nn.Parameter(numbers(OUTPUTS, INPUTS)) for _ in range(4))
    buffer, seen = torch.zeros(OUTPUTS, INPUTS), list[torch.Tensor]()
    given.grad = buffer
    hooked.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.clone()) if w.grad is not None else None)
    watched.grad = torch.zeros(OUTPUTS, INPUTS)
    watched.register_hook(lambda grad: seen.append(grad.clone()))
    for weight in (fresh, given, hooked, watched):
        for x, grad in zip(xs, grads, strict=True):
            linear_layers.linear(x, weight, None).backward(grad)
        assert weight.grad is not None
        close(weight.grad, expected)
    assert given.grad is buffer and len(seen) == 6
    close(seen[0], grads[0].T @ xs[0])
    close(seen[5], grads[2].T @ xs[2])
    half = torch.nn.Parameter(numbers(OUTPUTS, INPUTS))
    half.grad = torch.zeros(OUTPUTS, INPUTS)
    linear_layers.linear(xs[0], half * 0.5, None).backward(grads[0])
    close(half.grad, 0.5 * (grads[0].T @ xs[0]))


@pytest.mark.parametrize(("vendor", "capability", "mkl", "onednn", "panels"), [
    ("AuthenticAMD", "AVX512", True, True, True), ("GenuineIntel", "AVX512", True, False, False),
    ("AuthenticAMD", "AVX2", True, False, True), ("AuthenticAMD", "AVX512", False, False, True),
    ("GenuineIntel", "AVX2", True, False, False), ("AuthenticAMD", "DEFAULT", True, False, False),
    ("", "AVX512", True, False, False)])
def test_machines(monkeypatch: pytest.MonkeyPatch, vendor: str, capability: str, mkl: bool, onednn: bool,
                  panels: bool) -> None:
    text = f"processor\t: 0\nvendor_id\t: {vendor}\n" if vendor else "processor\t: 0\n"
    monkeypatch.setattr(products, "Path", lambda _: SimpleNamespace(read_text=lambda: text))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    assert products.mkl_lacks_avx512.__wrapped__() is onednn
    assert products.panels_are_fast.__wrapped__() is panels


def test_a_trace_repeats_them(calls: list[tuple[int, ...]]) -> None:
    x, weight = numbers(ROWS, INPUTS), numbers(OUTPUTS, INPUTS)
    with torch.no_grad():
        (out,), captured = trace(lambda: (linear_layers.linear(x, weight, None).relu(),))
    x.copy_(numbers(ROWS, INPUTS).flip(0))
    weight.mul_(0.5)
    with torch.no_grad():
        assert torch.equal(captured()[0], linear_layers.linear(x, weight, None).relu()) and out.shape == (ROWS, OUTPUTS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("wide"), hidden_size=128, intermediate_size=320, num_hidden_layers=2,
                          head_dim=32, vocab_size=512, scale=0.05))


def test_a_model_generates_and_trains_with_them(calls: list[tuple[int, ...]], path: str,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs of training are those of generation; gradients are those without oneDNN; a second call, from captured
    steps, gives the same bit for bit."""
    shard: Any = make_shard(plan_model(path, optimizer=Optimizer(lr=1e-3)), 0)
    given, sampling = ragged_prompts(46, 64, 12, torch.device("cpu")), Sampling(max_new_tokens=12)
    assert gap(shard, given, sampling).most <= 1e-5
    assert {(64, 128, 512), (64, 128, 320), (64, 320, 128)} <= {*calls}
    first, again = (shard.generate(given, sampling, seed=1, step=0, max_num_seqs=0) for _ in range(2))
    assert torch.equal(first.batch.tokens, again.batch.tokens) and torch.equal(first.logprobs, again.logprobs)

    grads = []
    for own in (True, False):
        if not own:
            monkeypatch.setattr(products, "mkl_lacks_avx512", lambda: False)
        calls.clear()
        # AdamW would clear the gradients
        fresh: Any = make_shard(plan_model(path, optimizer=Optimizer(kind="sgd", lr=1e-3)), 0)
        fresh.train([(first.batch,)], [("logprobs", "entropy")], 0.9,
                    lambda _, out: (out[0]["logprobs"] + 0.1 * out[0]["entropy"]).mean())
        grads.append(fresh.trainer.grad_buffer.clone())
        assert bool(calls) == own
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("faster", [True, False])
def test_an_invariant_model_has_one_library(calls: list[tuple[int, ...]], path: str, faster: bool,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of every size, or none: a row must have the same numbers in every batch."""
    monkeypatch.setattr(invariant_products, "mkl_lacks_avx512", lambda: faster)
    model = replace(plan_model(path, optimizer=Optimizer(lr=1e-3)), invariant=True)
    shard: Any = make_shard(model, 0)
    given = pack([([2 + i % 40] * 8, []) for i in range(64)])
    assert gap(shard, given, Sampling(max_new_tokens=4)).most == 0
    made = shard.generate(given, Sampling(max_new_tokens=4), seed=1, step=0, max_num_seqs=0)
    shard.train([(made.batch,)], [("logprobs",)], 1.0, lambda _, out: out[0]["logprobs"].mean())
    sizes = [math.prod(shape) for shape in calls]
    assert (min(sizes) < products.MIN_MULTIPLICATIONS) if faster else not sizes
    assert not any(isinstance(module, linear_layers.CpuLinear) for chunk in shard.stage.chunks
                   for module in chunk.body.modules())
