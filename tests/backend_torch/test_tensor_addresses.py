"""A compiled kernel gives the same bits wherever its tensors lie: at any alignment, and with results right before or
behind what it reads. Allocators put small tensors next to one another, in another order in every run; a compiler makes
two versions of a loop, and takes the slower one, with other fused products, where results might overlap what is read.
A run would differ in its last bits from the same run again.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.backends.torch.kernels import c_compiler, kernel_library

compiled = pytest.mark.skipif(not kernel_library.available(), reason="no C compiler")
SIZES = [3, 8, 16, 24, 33]  # less than a vector, a vector, and more, with and without a rest
ROWS = 5
UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class Read:
    """A tensor that a kernel reads."""

    values: torch.Tensor


@dataclass(frozen=True)
class Written:
    """A tensor that a kernel fills in, or adds to."""

    values: torch.Tensor


def read(*shape: int) -> Read:
    return Read(torch.randn(shape))


def written(*shape: int) -> Written:
    return Written(torch.zeros(shape))


def integers(limit: int) -> Read:
    return Read(torch.randint(limit, (ROWS,)))


def call(name: str, size: int) -> list[Any]:
    """Arguments of a kernel."""
    n, whole = ROWS, (size + 15) // 16 * 16
    heads = ROWS * size, size  # distances of heads and of tokens
    draws, tokens = Read(torch.rand(n, dtype=torch.float64)), Written(torch.zeros(n, dtype=torch.int64))
    memory = partial(kernel_library.library().head_memory, n, size)
    of_attention = [Read(torch.tensor([[0, n, 0, 0]])), Read(torch.tensor([0, 1])), 1, 2, 1, size, size, 0.5, 3]
    queries, keys = [read(2, n, size), *heads], [read(1, n, size), *heads]
    return {
        "rms_norm": lambda: [read(n, size), read(size), n, size, 1e-6, written(n, size), written(n)],
        "rms_norm_backward": lambda: [read(n, size), read(n, size), read(n), read(size), n, size, written(n, size),
                                      written(size)],
        "rotary": lambda: [read(2, n, 2 * size), 2 * n * size, 2 * size, read(n, 2 * size), read(n, 2 * size), 2, n,
                           size, 1, written(n, 2, 2 * size)],
        "rotary_angles": lambda: [integers(1000), read(size), n, size, 0.7, written(n, 2 * size), written(n, 2 * size)],
        "add_integers": lambda: [integers(9), integers(9), n, Written(torch.zeros(n, dtype=torch.int64))],
        "select_rows": lambda: [read(9, size), 9, size, integers(9), n, written(n, size)],
        "select_columns": lambda: [Read(torch.rand(n, size, dtype=torch.float64)), size, integers(size), n,
                                   Written(torch.zeros(n, dtype=torch.float64))],
        "write_tokens": lambda: [read(2, n, size), *heads, n, integers(n), integers(n), integers(4), n, 2, size,
                                 written(n, 2, 4, size), n, 4],
        "gated_product": lambda: [read(size), read(size), size, written(size)],
        "gated_product_backward": lambda: [*(read(size) for _ in range(3)), size, written(size), written(size)],
        "exp_sums": lambda: [read(n, size), Read(torch.full((n,), 4.0)), n, size, written(n)],
        "softmax_sums": lambda: [Written(torch.randn(n, size)), n, size, 1, written(n), written(n)],
        "scaled_probabilities": lambda: [Written(torch.randn(n, size)), read(n), read(n), n, size],
        "sample": lambda: [read(n, size), draws, n, size, 0.7, tokens, written(n)],
        "decode_attention": lambda: [read(2, n, whole), n * whole, whole, read(n, whole), n * whole, whole,
                                     read(n, whole), n * whole, whole, Written(torch.randn(n, 4, whole)),
                                     Written(torch.randn(n, 4, whole)), 4 * whole, Read(torch.full((n,), 3)), n, 2, 1,
                                     4, whole, 0.5, UNBOUNDED, written(n, 2, whole)],
        "few_row_product": lambda: [read(n, size), size, read(7, size), read(7), n, 7, size, written(n, 7)],
        "few_row_sample": lambda: [read(n, size), size, read(40, size), draws, n, 40, size, 0.7, tokens, written(n)],
        "panel_products": lambda: [read(size, n), 1, n, read(7, size), 1, size, read(7), n, 7, size, 0, written(n, 7)],
        "head_statistics": lambda: [read(n, size), read(9, size), integers(9), n, 9, size, 0.7,
                                    *(written(n) for _ in range(3)), written(n, 9), written(memory(0))],
        "head_gradients": lambda: [read(n, size), read(9, size), integers(9), read(n), read(n), None, n, 9, size, 0.7,
                                   written(n, size), Written(torch.randn(9, size)), written(memory(1))],
        "add_transposed": lambda: [read(size, n), n, size, Written(torch.randn(n, size))],
        "add": lambda: [read(size), read(size), size, written(size)],
        "adamw": lambda: [Written(torch.randn(size)), Written(torch.randn(size)), Written(torch.randn(size)),
                          Written(torch.rand(size)), size,
                          Read(torch.tensor([0.5, 0.9, 0.1, 0.99, 0.01, 0.3, 1e-3, 1e-2]))],
        "append_sampled": lambda: [
            integers(9), read(n), 0, n, integers(n), *(Written(integers(9).values) for _ in range(2)), written(n),
            *(Written(torch.ones(n, dtype=torch.uint8)) for _ in range(2)), integers(9), 3, 11,
            Written(torch.zeros(n, 11, dtype=torch.int64)), written(n, 11), Written(torch.zeros(n, dtype=torch.int64)),
            Written(torch.zeros(n, dtype=torch.uint8))],
        "attention": lambda: [*queries, *keys, *keys, *of_attention, written(n, 2, size), written(n, 2)],
        "attention_backward": lambda: [*queries, *keys, *keys, *queries, *of_attention, read(n, 2), written(n, 2, size),
                                       written(n, 1, size), written(n, 1, size)],
    }[name]()


def results(name: str, arguments: Sequence[Any], order: Sequence[int], first: int, gap: int) -> list[bytes]:
    """What a kernel writes with its tensors one behind the other in memory, in this order. first, gap: numbers of
    float32 before the first and between two."""
    tensors = [a.values for a in arguments if isinstance(a, Read | Written)]
    needed = sum(t.numel() * t.itemsize + 4 * gap + 8 for t in tensors) + 4 * first
    memory = torch.zeros(needed, dtype=torch.uint8)
    placed: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    at = 4 * first
    for i in order:
        at += -at % tensors[i].itemsize
        size = tensors[i].numel() * tensors[i].itemsize
        placed[i] = memory[at : at + size].view(tensors[i].dtype).view(tensors[i].shape)
        placed[i].copy_(tensors[i])
        at += size + 4 * gap
    pointers = (t.data_ptr() for t in placed)
    outcome = getattr(kernel_library.library(), name)(
        *(next(pointers) if isinstance(a, Read | Written) else a for a in arguments))
    assert not outcome or name == "append_sampled"  # which counts
    kinds = (a for a in arguments if isinstance(a, Read | Written))
    return [t.numpy().tobytes() for t, kind in zip(placed, kinds, strict=True) if isinstance(kind, Written)]


def orders(count: int) -> Iterator[tuple[int, ...]]:
    """All orders of a few tensors; of more, rotations of the first order and of its reverse."""
    if count <= 4:
        yield from itertools.permutations(range(count))
    for start in range(count):
        yield tuple((start + i) % count for i in range(count))
        yield tuple((start - i) % count for i in range(count))


# these read no tensor themselves
OF_OTHERS = {"run_calls", "head_memory", "linear_layers_backward"}


@compiled
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", sorted(set(kernel_library.ARGUMENTS) - OF_OTHERS))
def test_bits_are_the_same_at_all_addresses(name: str, size: int) -> None:
    torch.manual_seed(size)
    arguments = call(name, size)
    count = sum(isinstance(a, Read | Written) for a in arguments)
    expected = results(name, arguments, range(count), 0, 64)
    assert any(any(part) for part in expected)
    for order in orders(count):
        for first, gap in ((0, 0), (1, 0), (3, 1), (8, 7)):
            assert results(name, arguments, order, first, gap) == expected, (order, first, gap)


@compiled
def test_the_compiler_makes_no_loop_twice(tmp_path: Path) -> None:
    """The memory that a kernel takes for itself is somewhere, too."""
    command = [c_compiler.COMPILER, *c_compiler.FAST_FLAGS, "-fopt-info-vec", "-o", str(tmp_path / "x.so"),
               str(kernel_library.SOURCE), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if "-fopt-info" in done.stderr:
        pytest.skip("the compiler does not report what it does with loops")
    assert not done.returncode, done.stderr
    assert "vectorized" not in done.stderr and "versioned" not in done.stderr
