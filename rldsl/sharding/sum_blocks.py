"""How the sums of a model with `invariant=true` are cut, so that they are the same under every degree of tensor
parallelism.

In: what tensor parallelism divides: the input of a row-parallel weight, or the vocabulary; in a backward pass the
output of a column-parallel weight, or the heads. Out: where it is cut into blocks. Each block is summed with kernels
that see its shape alone, and the blocks are added in one binary tree. The ranks of tp hold consecutive blocks, which
are a subtree, since cuts at floor(i * units / blocks) nest.

Weights that read the same input (q, k and v) add their parts of its gradient block by block, so all of them have places
in one tree of BLOCKS leaves: block j of b is leaf j * BLOCKS / b. Where fewer units (KV heads) than ranks let several
hold the same one, the leaf belongs to the first of them.

Invariant: cuts follow from the model's shape alone, never from a placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rldsl.plan.model import ParamSpec

BLOCKS = 8  # of a sum, at most
MIN_BLOCK = 128  # terms of a block, for this many blocks; small products cost more than they compute


def num_blocks(units: int, size: int = 1) -> int:
    """The blocks of a sum over `units` indivisible runs of `size` terms: a power of two."""
    blocks = BLOCKS if units * size >= BLOCKS * MIN_BLOCK else BLOCKS // 2
    while blocks > units:
        blocks //= 2
    return blocks


def num_column_blocks(units: int, size: int) -> int:
    """The blocks of a sum over the output of a column-parallel weight. Heads are few and wide, and every degree that
    divides them, or that they divide, must divide their blocks."""
    if size == 1:
        return num_blocks(units)
    return min(BLOCKS, 1 << units.bit_length() - 1)


def column_leaves(parts: Sequence[tuple[int, int]], tp: int, index: int) -> dict[int, tuple[tuple[int, int], ...]]:
    """Leaf -> [start, stop) of each of its runs of outputs, as position `index` of `tp` has them in its local tensor.
    parts: (units, size of a unit) of each part of the output, each of which is divided on its own."""
    leaves: dict[int, list[tuple[int, int]]] = {}
    offset = 0
    for units, size in parts:
        blocks = num_column_blocks(units, size)
        first = index * units // tp
        last = max((index + 1) * units // tp, first + 1)  # as in `boxes.pieces`
        for block in range(blocks):
            leaf, (start, stop) = block * BLOCKS // blocks, (i * units // blocks for i in (block, block + 1))
            if index * BLOCKS // tp <= leaf < (index + 1) * BLOCKS // tp:
                leaves.setdefault(leaf, []).append((offset + (start - first) * size, offset + (stop - first) * size))
        offset += (last - first) * size
    return {leaf: tuple(runs) for leaf, runs in leaves.items()}


def head_blocks(heads: int, tp: int, index: int) -> tuple[tuple[int, int], ...]:
    """[first, last) query heads of each block of position `index` of `tp`, numbered from the first of all ranks."""
    blocks = num_column_blocks(heads, 2)
    return tuple((i * heads // blocks, (i + 1) * heads // blocks)
                 for i in range(index * blocks // tp, (index + 1) * blocks // tp))


def summed_input(spec: ParamSpec) -> tuple[int, int] | None:
    """(units, size of a unit) of the inputs of a row-parallel weight, which are summed; None for other parameters."""
    if spec.split is None or len(spec.split.parts) != 1 or not (
            spec.style in ("rowwise", "rowwise_split") or spec.experts and spec.split.dim == 2):
        return None
    return spec.split.parts[0]


def summed_vocabulary(spec: ParamSpec) -> int:
    """The rows of an embedding or a head that tensor parallelism divides, over which probabilities are normalized; 0
    for other parameters."""
    return spec.shape[0] if spec.split is not None and spec.style in ("vocab", "head") else 0


def summed_output(spec: ParamSpec) -> tuple[tuple[int, int], ...] | None:
    """(units, size of a unit) of each part of the outputs of a column-parallel weight or bias, over which the gradient
    of its input is summed; None for other parameters."""
    if spec.split is None:
        return None
    columns = spec.style in ("colwise", "colwise_gather") or spec.experts and spec.split.dim == 1
    return spec.split.parts if columns else None


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
