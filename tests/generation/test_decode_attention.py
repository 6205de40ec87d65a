"""Attention of a decode step by products of batches against torch's fused kernel, and the cache in both orders."""

from __future__ import annotations

import pytest
import torch

from rldsl.backends.torch.generate.dynamic_size import DynamicSize
from rldsl.backends.torch.generate.kv_cache import DecodeAttention, KVCache
from rldsl.backends.torch.model.attention import Scores

SLOTS, WIDTH, FIRST = 7, 24, 2


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(heads_first: bool, kv_heads: int, size: int) -> KVCache:
    cache = KVCache(SLOTS, WIDTH, torch.device("cpu"))
    cache.heads_first = heads_first  # False: as on a GPU
    for i, x in enumerate(cache.layer(0, *numbers(2, kv_heads, 1, size))):
        x.copy_(numbers(*x.shape, seed=i))
    return cache


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("scores", [Scores(0.3), Scores(0.3, window=5), Scores(0.3, chunk=4), Scores(0.3, softcap=2.0),
                                    Scores(0.3, sinks=torch.linspace(-1, 1, 6))], ids=str)
def test_every_way_gives_the_same(heads: int, kv_heads: int, scores: Scores) -> None:
    if scores.sinks is not None:
        scores = Scores(0.3, sinks=scores.sinks[:heads])
    positions = torch.tensor([4, 0, 11, 17])
    q, k, v = numbers(heads, 4, 8), *numbers(2, kv_heads, 4, 8, seed=3)
    found = []
    for heads_first, by_products in ((False, False), (True, False), (True, True), (False, True)):
        cache = filled(heads_first, kv_heads, 8)
        found.append(DecodeAttention(cache, FIRST, positions, DynamicSize(20), by_products).attend(0, q, k, v, scores))
        for cached, x in zip(cache.layers[0], (k, v), strict=True):  # the new token is in the cache, the rest untouched
            assert torch.equal(cached[torch.arange(FIRST, FIRST + 4), positions], x.transpose(0, 1))
            before = filled(heads_first, kv_heads, 8).layers[0][x is v]
            assert int((cached != before).any(-1).any(-1).sum()) == 4
    assert found[0].shape == (4, heads, 8)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)


def test_what_is_behind_a_position_is_not_read() -> None:
    q, k, v = numbers(4, 2, 8), *numbers(2, 2, 2, 8, seed=3)
    found = []
    for behind in (0.0, 1e30):
        cache = filled(True, 2, 8)
        for x in cache.layers[0]:
            x[:, 12:] = behind
        attention = DecodeAttention(cache, 0, torch.tensor([11, 3]), DynamicSize(20), True)
        found.append(attention.attend(0, q, k, v, Scores(0.3)))
    assert torch.equal(*found) and bool(found[0].isfinite().all())


@pytest.mark.parametrize("heads_first", [False, True])
def test_places(heads_first: bool) -> None:
    cache = filled(heads_first, 2, 8)
    keys = cache.layers[0][0]
    assert keys.shape == (SLOTS, WIDTH, 2, 8) and keys.is_contiguous() != heads_first
    places = cache.places(torch.tensor([6, 0, 6]), torch.tensor([23, 1, 0]))
    cache.put(keys, places, new := numbers(3, 2, 8, seed=9))
    assert torch.equal(cache.take(keys, places), new) and torch.equal(keys[6, 23], new[0])
    cache.copy_slots([6], [3], WIDTH)
    assert torch.equal(keys[3], keys[6])
    host = cache.offload(6, 4)
    cache.onload(1, 4, host)
    assert torch.equal(keys[1, :4], keys[6, :4])
