"""How the rows of a minibatch are divided where gradients must not depend on a placement (`invariant=training`).

In: the rows of a minibatch, with their tokens. Out: leaves, and in each leaf its passes. The gradient of a pass is
added to those of the leaf's passes before it; the leaves are added in a binary tree. The dp ranks hold consecutive
leaves, which are a subtree for every degree that divides their number; `partition.py` divides a `Spread` with `leaves`.

Invariant: leaves and passes follow from the rows, their lengths and the program alone, never from a placement. So each
sum over tokens in a backward pass has the same rows in the same order on every placement.

Leaves that have one pass each may be computed together: everything else about a row does not depend on the rows next to
it, and each weight sums its gradient leaf by leaf all the same. How many are is free, and bounded by memory alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rldsl.plan.spaces import IndexedFrame
from rldsl.sharding.micro_batches import micro_batches
from rldsl.sharding.partition import Rows

LEAVES = 8  # of a minibatch: the highest degree of dp
TOKEN_GROUPS = 2  # of a pass: the highest degree of cp, which divides each sequence as if there were that many ranks
PASS_TOKENS = 1024  # of a pass, unless one row has more: enough to fill the matrix multiplications of a layer
JOINED_TOKENS = 4 * PASS_TOKENS  # of leaves that are computed together, unless the program says how many (`mbt`)


def pass_tokens(frames: Iterable[IndexedFrame]) -> int:
    """The most tokens of a pass over rows of frames that are trained on together. At least those of the longest row,
    since a row is never cut."""
    return max(PASS_TOKENS, sum(f.max_prompt_tokens + f.max_response_tokens for f in frames))


def joined_tokens(frames: Iterable[IndexedFrame]) -> int:
    """The most tokens of leaves that are computed together, where the program does not set it."""
    return max(JOINED_TOKENS, pass_tokens(frames))


def leaves_together(leaves: Sequence[Rows], dp: int, lengths: Sequence[int], pass_limit: int, most: int) -> int:
    """How many consecutive leaves of a dp rank are computed together: a power of two, with at most `most` tokens
    wherever in the minibatch, so that ranks that wait for one another make as many passes. 1 if a leaf has several
    passes. leaves, lengths: as of `passes_of_rank`. pass_limit: its `mbt`."""
    sizes = [sum(lengths[row] for row in leaf) for leaf in leaves]
    if max(sizes) > pass_limit:
        return 1
    count = len(leaves) // dp
    while count > 1 and any(sum(sizes[at : at + count]) > most for at in range(0, len(sizes), count)):
        count //= 2
    return count


def divides(dp: int, cp: int = 1) -> bool:
    """Whether each of `dp` ranks can have a subtree of the leaves, and each of `cp` ranks whole token groups."""
    return LEAVES % dp == 0 and TOKEN_GROUPS % cp == 0


def passes_of_rank(leaves: Sequence[Rows], dp: int, index: int, lengths: Sequence[int], mbt: int, pad: bool
                   ) -> list[tuple[Rows, ...]]:
    """[leaf] -> passes of a dp rank, of at most `mbt` tokens each. leaves: of the whole minibatch. lengths: tokens, by
    row number. pad: add empty passes, so that all ranks run the same number at the same time."""
    each = len(leaves) // dp
    passes = [micro_batches(leaf, lengths, 0, 1, mbt) for leaf in leaves]
    mine = passes[index * each : (index + 1) * each]
    if not pad:
        return mine
    most = [max(len(passes[r * each + i]) for r in range(dp)) for i in range(each)]
    return [own + ((),) * (count - len(own)) for own, count in zip(mine, most, strict=True)]
