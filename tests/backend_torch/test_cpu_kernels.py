"""`kernels/cpu_kernels.c` against torch's operators, with sizes that are and are not multiples of a vector."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rldsl.backends.torch.generate.op_trace import trace
from rldsl.backends.torch.generate.sampling import choose
from rldsl.backends.torch.kernels import c_compiler, cpu_kernels, cpu_sampling, kernel_library
from rldsl.backends.torch.kernels.cpu_rotary import CpuRotary
from rldsl.backends.torch.kernels.products import wide_product
from rldsl.backends.torch.kernels.rms_norms import CompiledRMSNorm, RMSNormFunction
from rldsl.backends.torch.model.attention import Scores, decode_attention
from rldsl.backends.torch.model.fused_layers import CpuGatedProduct
from rldsl.plan.events import Sampling

EPS = 1e-6
compiled = pytest.mark.skipif(not kernel_library.available(), reason="no C compiler")
Close = Callable[[Any, Any], None]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@compiled
@pytest.mark.parametrize("size", [1, 7, 16, 33, 96, 640])
def test_norms(size: int) -> None:
    x, weight = (torch.randn(5, 13, size) * 3).requires_grad_(), torch.rand(size).requires_grad_()
    expected = RMSNormFunction.apply(x, weight, torch.tensor(EPS))
    found = CompiledRMSNorm.apply(x, weight, EPS)
    close(found, expected)
    assert torch.equal(cpu_kernels.rms_norm(x.detach(), weight.detach(), EPS), found)
    above = torch.randn_like(x)
    for a, b in zip(torch.autograd.grad(found, (x, weight), above), torch.autograd.grad(expected, (x, weight), above),
                    strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@compiled
def test_norms_of_many_rows_with_one_gradient() -> None:
    x, weight = torch.randn(1000, 16), torch.rand(16).requires_grad_()
    (found,) = torch.autograd.grad(CompiledRMSNorm.apply(x, weight, EPS).square().sum(), weight)
    (expected,) = torch.autograd.grad(F.rms_norm(x, (16,), weight, EPS).square().sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@compiled
@pytest.mark.parametrize("half", [1, 4, 8, 16, 24, 32, 64])
def test_rotary(half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 6, 5, 2 * half).transpose(1, 2).requires_grad_()
    cos, sin = torch.randn(2, 1, 6, 2 * half)
    found = CpuRotary.apply(x, cos, sin)
    above = torch.randn_like(found)
    grad = torch.autograd.grad(found, x, above)[0]
    assert torch.equal(cpu_kernels.rotary(x.detach(), cos, sin), found)
    monkeypatch.setattr(cpu_kernels, "takes", lambda *_: False)
    expected = CpuRotary.apply(x, cos, sin)
    close(found, expected)
    close(grad, torch.autograd.grad(expected, x, above)[0])


@compiled
@pytest.mark.parametrize("count", [1, 15, 16, 100])
def test_gates(count: int) -> None:
    gate, up = torch.linspace(-120, 120, count), torch.randn(count)
    gate[-1], up[-1] = -0.5, 2.0
    gate.requires_grad_(), up.requires_grad_()
    found, expected = CpuGatedProduct.apply(gate, up), F.silu(gate) * up
    close(found, expected)
    assert torch.equal(cpu_kernels.gated_product(gate.detach(), up.detach()), found)
    above = torch.randn(count)
    for a, b in zip(torch.autograd.grad(found, (gate, up), above), torch.autograd.grad(expected, (gate, up), above),
                    strict=True):
        close(a, b)


@compiled
@pytest.mark.parametrize("columns", [1, 17, 256, 1000])
def test_sums_and_probabilities(columns: int) -> None:
    x = torch.randn(4, columns) * 20
    peak = x.amax(-1)
    sums = cpu_kernels.exp_sums(x, peak)
    close(sums, (x.double() - peak[:, None]).exp().sum(-1).float())
    normalizer, factor = peak + sums.log(), torch.randn(4)
    expected = (x - normalizer[:, None]).exp() * factor[:, None]
    close(cpu_kernels.scaled_probabilities(x, normalizer, factor), expected)


@compiled
@pytest.mark.parametrize("columns", [1, 17, 256, 1000])
@pytest.mark.parametrize("keep", [False, True])
def test_sums_of_a_softmax(columns: int, keep: bool) -> None:
    x = torch.randn(5, columns) * 20
    x[1, 0], x[2, -1] = -torch.inf, torch.nan
    table = x.clone()
    peak, sums = cpu_kernels.softmax_sums(table, keep)
    rows = [0, 1, 3, 4] if columns > 1 else [0, 3, 4]  # a row of -inf alone has no softmax
    weights = (x.double() - x.amax(-1, keepdim=True)).exp().float()
    assert torch.equal(peak[rows], x.amax(-1)[rows]) and sums[2].isnan()
    close(sums[rows], weights.sum(-1)[rows])
    close(table[rows], weights[rows] if keep else x[rows])


@compiled
@pytest.mark.parametrize("columns", [1, 5, 256, 257, 3000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_samples(columns: int, temperature: float) -> None:
    hidden, head = torch.randn(50, 16), torch.randn(columns, 16) * 0.5
    draws = torch.rand(50, dtype=torch.float64)
    tokens, logprobs = cpu_sampling.sample(hidden, head, draws, temperature)
    expected = choose(hidden @ head.T, Sampling(temperature=temperature), draws, None, torch.tensor([0]))
    assert torch.equal(tokens, expected[0])
    close(logprobs, expected[1])


@compiled
def test_the_ends_of_the_distribution_and_numbers_that_are_none() -> None:
    head = torch.tensor([[-torch.inf], [0.0], [1.0], [-torch.inf]])
    hidden = torch.ones(4, 1)
    hidden[3] = torch.nan
    draws = torch.tensor([1e-300, 1 - 2.0**-53, 0.5, 0.5], dtype=torch.float64)
    logits = hidden @ head.T
    assert bool(logits[3].isnan().all())
    tokens, logprobs = cpu_sampling.sample(hidden, head, draws, 1.0)
    assert tokens[:3].tolist() == [1, 2, 2] and 0 <= int(tokens[3]) < 4
    assert bool(logprobs[3].isnan()) and bool(logprobs[:3].isfinite().all())


@compiled
@pytest.mark.parametrize("size", cpu_kernels.HEAD_SIZES)
@pytest.mark.parametrize("window", [None, 7])
def test_decode_attention(size: int, window: int | None) -> None:
    heads, kv_heads, sequences, width = 6, 2, 5, 40
    q, k, v = (torch.randn(sequences, n, size).transpose(0, 1) for n in (heads, kv_heads, kv_heads))
    keys, values = (torch.randn(sequences + 2, kv_heads, width, size).transpose(1, 2) for _ in range(2))
    positions = torch.tensor([0, 3, 15, 16, 39])
    want_keys, want_values = keys.clone(), values.clone()
    at = torch.arange(2, 2 + sequences)
    want_keys[at, positions], want_values[at, positions] = k.transpose(0, 1), v.transpose(0, 1)
    found = cpu_kernels.decode_attention(q, k, v, keys[2:], values[2:], positions, 0.3, window)
    assert torch.equal(keys, want_keys) and torch.equal(values, want_values)
    scores = Scores(0.3, window)
    mask = scores.visible(positions[:, None], torch.arange(width))[:, None, None]
    close(found, decode_attention(q, want_keys[2:].transpose(1, 2), want_values[2:].transpose(1, 2), mask, scores))


@compiled
def test_what_the_kernels_do_not_take() -> None:
    x = torch.randn(4, 6)
    assert cpu_kernels.takes(x) and not cpu_kernels.takes(x.T) and not cpu_kernels.takes(x.double())
    assert not cpu_kernels.takes(x.to("meta")) and not cpu_kernels.takes(x.bfloat16())
    q = torch.randn(2, 3, 16)
    assert cpu_kernels.attends(q, q, q) and not cpu_kernels.attends(q, q, q[..., :8])
    assert not cpu_kernels.attends(*[torch.randn(2, 3, 24)] * 3)


@compiled
def test_a_captured_step_runs_them_again() -> None:
    x, weight = torch.randn(3, 16), torch.rand(16)
    keys, values = (torch.zeros(3, 1, 4, 16).transpose(1, 2) for _ in range(2))
    positions, draws = torch.tensor([0, 1, 2]), torch.rand(3, dtype=torch.float64)

    def step() -> tuple[torch.Tensor, ...]:
        n = cpu_kernels.rms_norm(x, weight, EPS)
        n = cpu_kernels.gated_product(n, x)
        n = cpu_kernels.rotary(n[None, None], x[None], x[None])
        out = cpu_kernels.decode_attention(n[0], n[0], n[0], keys, values, positions, 0.3, None)
        return cpu_sampling.sample(out[:, 0], weight[:, None] * weight, draws, 1.0) + (out,)

    with torch.no_grad():
        _, captured = trace(step)
        x.normal_(), draws.uniform_()
        expected = [y.clone() for y in step()]
        keys.zero_()
        assert all(map(torch.equal, captured(), expected)) and bool(keys.any())


@pytest.fixture
def anew() -> Iterator[None]:
    """Nothing has been compiled."""
    kernel_library.library.cache_clear()
    yield
    kernel_library.library.cache_clear()


@pytest.mark.usefixtures("anew")
def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLDSL_CACHE", str(tmp_path))
    monkeypatch.setattr(c_compiler, "COMPILER", "no-such-compiler")
    assert not kernel_library.available() and not cpu_kernels.takes(torch.ones(2))


@pytest.mark.usefixtures("anew")
def test_without_a_cache_folder_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLDSL_CACHE", "off")
    assert not kernel_library.available()


@compiled
@pytest.mark.usefixtures("anew")
def test_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLDSL_CACHE", str(tmp_path))
    assert kernel_library.available()
    (made,) = (tmp_path / "kernels").iterdir()
    assert made.suffix == ".so"
    before = made.stat().st_mtime_ns
    kernel_library.library.cache_clear()
    assert kernel_library.available() and made.stat().st_mtime_ns == before
    damaged = tmp_path / "other/kernels" / made.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"damaged")
    damaged.chmod(0o600)
    monkeypatch.setenv("RLDSL_CACHE", str(tmp_path / "other"))
    kernel_library.library.cache_clear()
    assert not kernel_library.available()  # and torch's operators run


@pytest.mark.thorough
@compiled
@pytest.mark.usefixtures("anew")
def test_a_library_that_others_may_write_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLDSL_CACHE", str(tmp_path))
    made = c_compiler.compiled(kernel_library.SOURCE, c_compiler.FAST_FLAGS)
    assert made is not None
    made.write_bytes(b"planted")
    made.chmod(0o666)
    assert kernel_library.available() and made.read_bytes()[:4] == b"\x7fELF" and made.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("anew")
def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*command: str) -> bytes:
        if "-o" in command:
            raise subprocess.CalledProcessError(1, command)
        return b"cc"

    monkeypatch.setenv("RLDSL_CACHE", str(tmp_path))
    monkeypatch.setattr(c_compiler, "_run", fail)
    assert not kernel_library.available() and not [*(tmp_path / "kernels").iterdir()]


@pytest.mark.parametrize("rows, columns", [(257, 8193), (64, 32768), (1, 8192), (300, 100)])
def test_products_with_many_columns(rows: int, columns: int) -> None:
    """Tile by tile, whose last ones are smaller, or at once."""
    a, b = torch.randn(rows, 24), torch.randn(columns, 24)
    found = wide_product(a, b)
    assert found.is_contiguous() and found.shape == (rows, columns)
    a64, b64 = a.double(), b.double()
    rounding = 25 * 2.0**-24 * (a64.abs() @ b64.abs().T)  # of 24 products and their sums, in any order
    assert bool(((found.double() - a64 @ b64.T).abs() <= rounding).all())
    assert torch.equal(wide_product(a, b), found)
    assert wide_product(a.bfloat16(), b.bfloat16()).dtype == torch.bfloat16
