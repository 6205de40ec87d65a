"""The micro-batches of a rank's rows: how many there are, and which rows each has.

In: rows, their lengths, and the bounds of a call. Out: row numbers. Pure functions of integers, so that all ranks of a
pipeline agree without communication.
"""

from __future__ import annotations

from collections.abc import Sequence

from rldsl.sharding.balance import balance_items
from rldsl.sharding.partition import Rows
from rldsl.sharding.siblings import Siblings


def micro_batches(rows: Sequence[int], lengths: Sequence[int], mbs: int, min_count: int,
                  mbt: int = 0, siblings: Siblings | None = None) -> tuple[Rows, ...]:
    """`rows` in micro-batches of at most `mbs` rows and `mbt` tokens (0: any number), of about equal token counts,
    at least `min_count` of them while there are that many rows. A row longer than `mbt` is alone. lengths: tokens,
    by row number. Rows ascend inside a micro-batch and micro-batches by their first row, so their concatenation is in
    general *not* in the order of `rows`. siblings: rows of one prompt stay together where that makes the micro-batch
    with most to compute smaller; there are as many as without."""
    if not rows:
        return ()
    rows = sorted(rows)
    sizes = [lengths[r] for r in rows]
    count = max(count_without_token_limit(len(rows), mbs, min_count), _bins(sizes, mbt) if mbt else 1)
    parts = balance_items(sizes, count, mbs or len(rows))
    while mbt and any(len(part) > 1 and sum(sizes[i] for i in part) > mbt for part in parts):
        count += 1
        parts = balance_items(sizes, count, mbs or len(rows))
    found = tuple(sorted(tuple(rows[i] for i in part) for part in parts))
    return found if siblings is None or len(found) == 1 else siblings.together(found, lengths, mbs, mbt)


def num_micro_batches(rows: Sequence[int], lengths: Sequence[int], mbs: int, min_count: int, mbt: int = 0) -> int:
    """Into how many micro-batches `micro_batches` divides them."""
    if mbt:
        return len(micro_batches(rows, lengths, mbs, min_count, mbt))
    return count_without_token_limit(len(rows), mbs, min_count)


def _bins(sizes: Sequence[int], capacity: int) -> int:
    """The number of bins that first-fit decreasing needs (Johnson 1973: at most 11/9 of the fewest possible, plus
    one)."""
    free: list[int] = []  # per bin
    for size in sorted(sizes, reverse=True):
        at = next((i for i, left in enumerate(free) if left >= size), None)
        if at is None:
            free.append(capacity - size)
        else:
            free[at] -= size
    return len(free)


def count_without_token_limit(rows: int, mbs: int, min_count: int) -> int:
    """Into how many micro-batches `micro_batches` divides `rows` rows if `mbt` is 0."""
    return min(rows, max(min_count, -(-rows // mbs) if mbs else 1, 1))
