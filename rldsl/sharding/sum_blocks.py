"""How the sums of a model with `invariant=true` are cut, so that they are the same under every degree of tensor
parallelism.

In: what tensor parallelism divides: the input of a row-parallel weight, or the vocabulary. Out: where it is cut into
blocks. Each block is summed with kernels that see its shape alone, and the blocks are added in one binary tree. The
ranks of tp hold consecutive blocks, which are a subtree, since cuts at floor(i * units / blocks) nest.

Invariant: cuts follow from the model's shape alone, never from a placement.
"""

from __future__ import annotations

from collections.abc import Iterable

from rldsl.plan.model import ParamSpec

BLOCKS = 8  # of a sum, at most
MIN_BLOCK = 128  # terms of a block, for this many blocks; small products cost more than they compute


def num_blocks(units: int, size: int = 1) -> int:
    """The blocks of a sum over `units` indivisible runs of `size` terms: a power of two."""
    blocks = BLOCKS if units * size >= BLOCKS * MIN_BLOCK else BLOCKS // 2
    while blocks > units:
        blocks //= 2
    return blocks


def summed_input(spec: ParamSpec) -> tuple[int, int] | None:
    """(units, size of a unit) of the inputs of a row-parallel weight, which are summed; None for other parameters."""
    if spec.split is None or len(spec.split.parts) != 1 or not (
            spec.style == "rowwise" or spec.experts and spec.split.dim == 2):
        return None
    return spec.split.parts[0]


def summed_vocabulary(spec: ParamSpec) -> int:
    """The rows of an embedding or a head that tensor parallelism divides, over which probabilities are normalized; 0
    for other parameters."""
    return spec.shape[0] if spec.split is not None and spec.style in ("vocab", "head") else 0


def local_cuts(units: int, size: int, tp: int, index: int) -> tuple[int, ...]:
    """Where the blocks of position `index` of `tp` begin in its local tensor, and where the last one ends."""
    blocks = num_blocks(units, size)
    first, last = index * blocks // tp, (index + 1) * blocks // tp
    start = first * units // blocks
    return tuple((i * units // blocks - start) * size for i in range(first, last + 1))


def undividable(specs: Iterable[ParamSpec], tp: int) -> tuple[str, int] | None:
    """The first parameter whose sum has too few blocks for this degree, or a number that it does not divide, and that
    number; None if there is none."""
    for spec in specs:
        units, size = summed_input(spec) or (summed_vocabulary(spec), 1)
        if units and num_blocks(units, size) % tp:
            return spec.name, num_blocks(units, size)
    return None
