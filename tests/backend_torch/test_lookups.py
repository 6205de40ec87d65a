"""Kernels that repeat operators of torch in a trace: the same bits, for the tensors that they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rldsl.backends.torch.generate.op_trace import trace
from rldsl.backends.torch.kernels import kernel_library
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
