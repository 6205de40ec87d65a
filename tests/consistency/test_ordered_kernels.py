"""`kernels/ordered_kernels.c` against what an invariant model computes without it: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rldsl.backends.torch.generate.dynamic_size import DynamicSize
from rldsl.backends.torch.generate.kv_cache import DecodeAttention, KVCache
from rldsl.backends.torch.generate.op_trace import trace
from rldsl.backends.torch.kernels import c_compiler, ordered_kernels
from rldsl.backends.torch.model import fused_layers, invariant, invariant_attention, invariant_probe
from rldsl.backends.torch.model.attention import Scores
from rldsl.models import rotary

HEADS, KV_HEADS, SEQUENCES, WIDTH = 6, 2, 5, 140
POSITIONS = (0, 3, 63, 64, 139)  # of the new tokens
Inputs = tuple[torch.Tensor, ...]
compiled = pytest.mark.skipif(not ordered_kernels.available(), reason="no C compiler")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def anew() -> Iterator[None]:
    """Nothing has been compiled or tried."""
    found = ordered_kernels._library, ordered_kernels.vector_width, invariant_probe._decodes_alike
    for function in found:
        function.cache_clear()
    yield
    for function in found:
        function.cache_clear()


def inputs(size: int, heads: int = HEADS, kv_heads: int = KV_HEADS) -> Inputs:
    """q, k, v of the new tokens, keys and values of a cache."""
    q, k, v = (torch.randn(SEQUENCES, n, size).transpose(0, 1) for n in (heads, kv_heads, kv_heads))
    return q, k, v, *(torch.randn(SEQUENCES, kv_heads, WIDTH, size).transpose(1, 2) for _ in range(2))


def expected(given: Inputs, positions: torch.Tensor, kv_len: int, window: int | None) -> torch.Tensor:
    q, k, v, *held = given
    at = torch.arange(len(positions)), positions
    keys, values = (x.index_put(at, new.transpose(0, 1))[:, :kv_len].transpose(1, 2)
                    for x, new in zip(held, (k, v), strict=True))
    seen = Scores(0.3, window).visible(positions[:, None], torch.arange(kv_len))[:, None, None]
    queries = q.transpose(0, 1).unflatten(1, (len(k), -1))
    return invariant_attention.attend(queries, keys, values, seen, scale=0.3).flatten(1, 2)


@pytest.fixture
def matches() -> None:
    if not ordered_kernels.vector_width() or not invariant_probe.ordered_heads(64):
        pytest.skip("this machine's products have another order")


@pytest.mark.usefixtures("matches")
@pytest.mark.parametrize("size", [*ordered_kernels.HEAD_SIZES])
@pytest.mark.parametrize("window", [None, 7, 70])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention(size: int, window: int | None, threads: int) -> None:
    given, positions = inputs(size), torch.tensor(POSITIONS)
    q, k, v, *held = (x.clone() for x in given)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = ordered_kernels.decode_attention(q, k, v, held[0], held[1], positions, WIDTH, 0.3, window)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected(given, positions, WIDTH, window))
    at = torch.arange(SEQUENCES), positions
    for x, old, new in zip(held, given[3:], (k, v), strict=True):  # the new token is in the cache, the rest untouched
        assert torch.equal(x, old.index_put(at, new.transpose(0, 1)))


@pytest.mark.usefixtures("matches")
@pytest.mark.parametrize("new, held", [(1e30, -1e30), (1e30, 1e30), (torch.nan, 1.0), (1.0, torch.nan), (torch.inf, 1.0),
                                       (1.0, -torch.inf)])
def test_scores_that_overflow(new: float, held: float) -> None:
    q, k, v, keys, values = inputs(16)
    q, keys = torch.full_like(q, new), torch.full_like(keys, held)
    given, positions = (q, torch.full_like(k, held), v, keys, values), torch.tensor(POSITIONS)
    want = expected(given, positions, WIDTH, None)
    found = ordered_kernels.decode_attention(*given, positions, WIDTH, 0.3, None)
    assert torch.equal(found.isnan(), want.isnan()) and torch.equal(found.nan_to_num(), want.nan_to_num())


@pytest.mark.usefixtures("matches")
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (7, 1), (4, 4), (10, 2)])
def test_any_number_of_heads(heads: int, kv_heads: int) -> None:
    given, positions = inputs(64, heads, kv_heads), torch.tensor(POSITIONS)
    want = expected(given, positions, WIDTH, None)
    q, k, v, keys, values = given
    assert torch.equal(ordered_kernels.decode_attention(q, k, v, keys, values, positions, WIDTH, 0.3, None), want)


@pytest.mark.usefixtures("matches")
@pytest.mark.parametrize("window", [None, 5])
def test_sequences_alone_and_lengths_that_are_read(window: int | None) -> None:
    """A sequence has the same numbers whatever others there are and however much of the cache is read."""
    given, positions = inputs(64), torch.tensor(POSITIONS)
    q, k, v, keys, values = given
    want = ordered_kernels.decode_attention(q, k, v, keys, values, positions, WIDTH, 0.3, window)
    for i, last in enumerate(POSITIONS):
        for kv_len in {last + 1, min(last + 20, WIDTH), WIDTH}:
            one = slice(i, i + 1)
            found = ordered_kernels.decode_attention(q[:, one], k[:, one], v[:, one], keys[one], values[one],
                                                     positions[one], kv_len, 0.3, window)
            assert torch.equal(found, want[one])


@pytest.mark.usefixtures("matches")
@pytest.mark.parametrize("window", [None, 5])
def test_positions_behind_what_is_read(window: int | None) -> None:
    """Those of sequences that have finished, whose numbers are dropped: nothing outside of the tensors is read."""
    given, positions = inputs(64), torch.tensor([10, 139, 120, 31, 39])
    want = expected(given, positions, 32, window)
    q, k, v, keys, values = given
    assert torch.equal(ordered_kernels.decode_attention(q, k, v, keys, values, positions, 32, 0.3, window), want)


@pytest.mark.usefixtures("matches")
@pytest.mark.parametrize("scores", [Scores(0.3), Scores(0.3, window=5), Scores(0.3, softcap=2.0)], ids=str)
def test_a_step_with_and_without(scores: Scores) -> None:
    q, k, v = (torch.randn(n, 4, 64) for n in (HEADS, KV_HEADS, KV_HEADS))
    found = []
    for sizes in ((), (64,)):
        cache = KVCache(7, 24, torch.device("cpu"))
        for i, x in enumerate(cache.layer(0, k, v)):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(i)))
        attention = DecodeAttention(cache, 2, torch.tensor([4, 0, 11, 17]), DynamicSize(20), ordered_heads=sizes)
        with invariant.Invariant():
            found.append((attention.attend(0, q, k, v, scores), *cache.layers[0]))
    assert all(map(torch.equal, *found))


@compiled
def test_a_captured_step_runs_them_again() -> None:
    x, cos, sin = torch.randn(3, 16), *torch.randn(2, 1, 3, 16)
    keys, values = (torch.zeros(3, 1, 4, 16).transpose(1, 2) for _ in range(2))
    positions = torch.tensor([0, 1, 2])

    def step() -> tuple[torch.Tensor, ...]:
        n = ordered_kernels.rotary(x[None, None], cos, sin)[0]
        return (ordered_kernels.decode_attention(n, n, n, keys, values, positions, 4, 0.3, None),)

    with torch.inference_mode():
        _, captured = trace(step)
        x.normal_()
        want = [y.clone() for y in step()]
        keys.zero_()
        assert all(map(torch.equal, captured(), want)) and bool(keys.any())


@compiled
@pytest.mark.parametrize("half", [1, 4, 8, 13, 32])
def test_rotary(half: int) -> None:
    x = torch.randn(1, 6, 5, 2 * half).transpose(1, 2)
    cos, sin = torch.randn(2, 1, 6, 2 * half)
    found = ordered_kernels.rotary(x, cos, sin)
    assert torch.equal(found, rotary.rotated_halves(x, cos, sin)) and found.transpose(1, 2).is_contiguous()


@compiled
def test_what_the_kernels_do_not_take() -> None:
    q, cos = torch.randn(2, 3, 16), torch.randn(1, 3, 16)
    assert ordered_kernels.attends(q, q, q) and not ordered_kernels.attends(q, q, q[..., :8])
    assert not ordered_kernels.attends(*[torch.randn(2, 3, 20)] * 3)
    assert not ordered_kernels.attends(*[q.bfloat16()] * 3) and not ordered_kernels.attends(*[q.to("meta")] * 3)
    assert ordered_kernels.rotates(q[None], cos, cos)
    assert not ordered_kernels.rotates(q[None], cos, cos[:, :2]) and not ordered_kernels.rotates(q[None], cos[0], cos)
    assert not ordered_kernels.rotates(q[None].bfloat16(), cos, cos)
    assert not ordered_kernels.rotates(q.expand(2, 2, 3, 16), cos, cos)
    assert not ordered_kernels.rotates(q[None, ..., :15], cos[..., :15], cos[..., :15])


@pytest.mark.usefixtures("anew")
def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLDSL_CACHE", str(tmp_path))
    monkeypatch.setattr(c_compiler, "COMPILER", "no-such-compiler")
    assert not ordered_kernels.available() and not ordered_kernels.vector_width() and not invariant_probe.ordered_heads(64)
    q, cos = torch.randn(2, 3, 16), torch.randn(1, 3, 16)
    assert not ordered_kernels.attends(q, q, q) and not ordered_kernels.rotates(q[None], cos, cos)


@pytest.mark.usefixtures("anew", "matches")
@pytest.mark.parametrize("broken", ["products", "sums", "kernel"])
def test_kernels_with_other_bits_are_not_used(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*invariant_probe.ordered_heads(64)] == [64]
    invariant_probe._decodes_alike.cache_clear()
    batched, decode, width = invariant_attention._batched, ordered_kernels.decode_attention, ordered_kernels.vector_width()
    if broken == "products":  # of torch, in another order
        monkeypatch.setattr(invariant_attention, "_batched", lambda x, right: batched(x.flip(2), right.flip(1)))
    elif broken == "sums":
        monkeypatch.setattr(ordered_kernels, "vector_width", lambda: 4 if width == 8 else 8)
    else:
        monkeypatch.setattr(ordered_kernels, "decode_attention", lambda *given: decode(*given) * (1 + 2**-23))
    assert not invariant_probe.ordered_heads(64)


def test_heads_without_a_kernel() -> None:
    assert not invariant_probe.ordered_heads(0) and not invariant_probe.ordered_heads(20)
    assert not invariant_probe.ordered_heads(256)


def rotation(rotate: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A forward that calls it by the name that transformers has for it."""
    names = {rotary.ROTARY: lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin))}
    exec(f"def forward(q, k, cos, sin): return {rotary.ROTARY}(q, k, cos, sin)", names)
    return names["forward"]


def test_families_that_round_otherwise_keep_their_rotary_embeddings() -> None:
    def rounded_once(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotary.rotated_halves(x.double(), cos.double(), sin.double()).float()

    same, other = rotation(rotary.rotated_halves), rotation(rounded_once)
    assert rotary.forward_rotates_halves(same, True) and rotary.forward_rotates_halves(other)
    assert not rotary.forward_rotates_halves(other, True)
    projections = {name: nn.Linear(2, 2) for name in fused_layers.PROJECTIONS}
    for forward, fused in ((same, ["0"]), (other, [])):
        kind = type("Attention", (nn.Module,), {"forward": forward})
        module = kind()
        module._modules = {**projections}
        assert fused_layers.fuse_ordered_layers(nn.Sequential(module)) == fused
