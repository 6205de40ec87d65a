"""Kernels that look up or write what integers name: the bits of torch's operators, for the tensors that they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rldsl.backends.torch.generate.kv_cache import KVCache
from rldsl.backends.torch.generate.op_trace import trace
from rldsl.backends.torch.kernels import cpu_kernels, kernel_library
from rldsl.backends.torch.kernels.cpu_lookups import CALLS
from rldsl.backends.torch.kernels.kernel_library import KernelRun

pytestmark = pytest.mark.skipif(not kernel_library.available(), reason="no C compiler")
ADD, EMBEDDING, GATHER = CALLS
FLOATS, INTEGERS = torch.randn(4, 6), torch.randint(-(1 << 62), 1 << 62, (4, 6))
TABLE, IDS = torch.randn(9, 5), torch.tensor([[8, 0, 3], [3, 3, 1]])
DRAWS, COLUMN = torch.rand(4, 6, dtype=torch.float64), torch.tensor([[5], [0], [2], [2]])


@pytest.mark.parametrize("operator, args", [
    (ADD, (FLOATS, FLOATS)), (ADD, (INTEGERS, INTEGERS)), (ADD, (IDS[0], IDS[1])),
    (EMBEDDING, (TABLE, IDS)), (EMBEDDING, (TABLE, IDS[0], 3)), (EMBEDDING, (TABLE, IDS[:, :0])),
    (GATHER, (DRAWS, 1, COLUMN)), (GATHER, (DRAWS, -1, COLUMN))])
def test_the_bits_of_torch(operator: Any, args: tuple[Any, ...]) -> None:
    expected = operator(*args)
    found = torch.empty_like(expected)
    call = CALLS[operator](found, args)
    assert call is not None
    call()
    assert torch.equal(found, expected)
    found.zero_()
    KernelRun([call, call])()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("operator, args", [
    (ADD, (FLOATS, FLOATS[:1])), (ADD, (FLOATS, 2.0)), (ADD, (FLOATS.T, FLOATS.T)), (ADD, (DRAWS, DRAWS)),
    (ADD, (INTEGERS, 1)), (ADD, (INTEGERS, FLOATS)), (ADD, (INTEGERS.int(), INTEGERS.int())),
    (ADD, (INTEGERS.T, INTEGERS.T)), (ADD, (INTEGERS, INTEGERS[:, :1])),
    (EMBEDDING, (TABLE.double(), IDS)), (EMBEDDING, (TABLE.T, IDS.clamp(max=4))), (EMBEDDING, (TABLE, IDS.int())),
    (EMBEDDING, (TABLE, IDS.T)), (EMBEDDING, (TABLE.bfloat16(), IDS)),
    (GATHER, (FLOATS, 1, COLUMN)), (GATHER, (DRAWS, 0, COLUMN.clamp(max=3))), (GATHER, (DRAWS, 1, COLUMN[:2])),
    (GATHER, (DRAWS, 1, COLUMN.expand(4, 2))), (GATHER, (DRAWS.T, 1, COLUMN.clamp(max=3))),
    (GATHER, (DRAWS[0], 0, COLUMN[0]))])
def test_what_is_left_to_torch(operator: Any, args: tuple[Any, ...]) -> None:
    assert CALLS[operator](operator(*args), args) is None


@pytest.mark.parametrize("operator, args, index", [
    (EMBEDDING, (TABLE, IDS), 1), (GATHER, (DRAWS, 1, COLUMN), 2)])
@pytest.mark.parametrize("wrong", [-1, 9, 1 << 40])
def test_an_index_out_of_range(operator: Any, args: tuple[Any, ...], index: int, wrong: int) -> None:
    given, out = [*args], operator(*args)
    given[index] = args[index].clone()
    call = CALLS[operator](out, given)
    assert call is not None
    given[index].view(-1)[2] = wrong
    with pytest.raises(IndexError, match="out of range"):
        call()
    with pytest.raises(IndexError, match="out of range"):
        KernelRun([call])()


def test_in_a_trace() -> None:
    """All of them are one call, which reads what its tensors hold then."""
    first, second, count = IDS[0].clone(), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2])

    def step() -> tuple[torch.Tensor, ...]:
        ids = first + second
        return torch.nn.functional.embedding(ids % 9, TABLE), DRAWS[:3].gather(1, count[:, None])[:, 0]

    with torch.inference_mode():
        _, traced = trace(step)
        second += 2
        count.zero_()
        assert all(map(torch.equal, traced(), step()))
    with torch.inference_mode():
        _, traced = trace(lambda: (torch.nn.functional.embedding(first, TABLE), first + second))
    assert [type(x) for x in traced.ops] == [KernelRun]


@pytest.mark.parametrize("size", [1, 5, 8, 16, 24, 64])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("order", ["heads", "tokens"])
def test_tokens_of_prompts(size: int, repeats: bool, order: str) -> None:
    heads, tokens, slots, width = 3, 40, 6, 12
    x = torch.randn(heads, tokens, size) if order == "heads" else torch.randn(tokens, heads, size).transpose(0, 1)
    places = torch.randperm(slots * width)[: 60 if repeats else tokens]
    source = torch.randint(tokens, (60,)) if repeats else None
    found, expected = (KVCache(slots, width, torch.device("cpu")) for _ in range(2))
    (mine, _), (theirs, _) = found.layer(0, x, x), expected.layer(0, x, x)
    at = places // width, places % width
    assert cpu_kernels.writes(mine, x)
    cpu_kernels.write_tokens(mine, x, *at, source)
    expected.write(0, x, x, at, source)
    assert torch.equal(mine, theirs) and mine.count_nonzero() == len(places) * heads * size


@pytest.mark.parametrize("wrong", [-1, 1 << 40])
@pytest.mark.parametrize("which", range(3))
def test_places_that_there_are_not(which: int, wrong: int) -> None:
    x = torch.randn(2, 5, 8)
    cache, _ = KVCache(4, 6, torch.device("cpu")).layer(0, x, x)
    places = [torch.tensor([0, 1, 3]), torch.tensor([0, 1, 5]), torch.tensor([4, 0, 1])]
    places[which][2] = wrong
    with pytest.raises(IndexError, match="out of range"):
        cpu_kernels.write_tokens(cache, x, *places)
    assert not cache.any()  # nothing is written before


@pytest.mark.parametrize("x, slots, columns, source", [
    (torch.randn(3, 5, 8), IDS[0], IDS[0], None), (torch.randn(2, 5, 4), IDS[0], IDS[0], None),
    (torch.randn(2, 5, 8), IDS[0], IDS[0, :2], None), (torch.randn(2, 5, 8), IDS[0].int(), IDS[0], None),
    (torch.randn(2, 5, 8), IDS[0], IDS[:, 0], None), (torch.randn(2, 5, 8), IDS[0], IDS[0], IDS[0, :1])])
def test_tokens_of_other_shapes(x: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor,
                                source: torch.Tensor | None) -> None:
    like = torch.randn(2, 5, 8)
    cache, _ = KVCache(9, 9, torch.device("cpu")).layer(0, like, like)
    with pytest.raises(ValueError, match="do not go to a cache"):
        cpu_kernels.write_tokens(cache, x, slots, columns, source)


@pytest.mark.parametrize("cache, x", [
    (torch.zeros(4, 6, 2, 8), torch.randn(2, 5, 8)),  # heads inside tokens, as on a GPU
    (torch.zeros(4, 2, 6, 8).transpose(1, 2), torch.randn(2, 5, 16)[..., ::2]),
    (torch.zeros(4, 2, 6, 8).double().transpose(1, 2), torch.randn(2, 5, 8).double()),
    (torch.zeros(4, 2, 6, 8).transpose(1, 2), torch.randn(2, 5, 8, device="meta"))])
def test_caches_that_are_left_to_torch(cache: torch.Tensor, x: torch.Tensor) -> None:
    assert cpu_kernels.writes(torch.zeros(4, 2, 6, 8).transpose(1, 2), torch.randn(2, 5, 8))
    assert not cpu_kernels.writes(cache, x)
