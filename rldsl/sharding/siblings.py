"""Rows that have the same prompt, and divisions of rows that keep them together.

In: the number of rows per prompt, and the tokens (or the cost) of each row's prompt. Out: what a part of the rows
computes if each prompt is computed once, and parts of neighboring rows. Pure functions of integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Amounts = Sequence[int] | Mapping[int, int]  # of each row: tokens, or a cost
Parts = tuple[tuple[int, ...], ...]  # rows, ascending in each


@dataclass(frozen=True, slots=True)
class Siblings:
    """Rows of which a prompt is computed once, where they are in one part."""

    run: int  # row r has prompt r // run
    prompts: Amounts  # tokens (or cost) of each row's prompt

    def computed(self, rows: Iterable[int], amounts: Amounts) -> int:
        """What these rows, in ascending order, compute in one part. amounts: of complete rows, prompts included."""
        total, last = 0, -1
        for r in rows:
            total += amounts[r] - (self.prompts[r] if r // self.run == last else 0)
            last = r // self.run
        return total

    def together(self, parts: Parts, amounts: Amounts, most_rows: int = 0, most: int = 0) -> Parts:
        """As many parts of neighbors, if the one with most to compute then has less; otherwise `parts`. most_rows,
        most: bounds of a part's rows and of the sum of their amounts (0: none); a row with more is alone."""
        found = _neighbors(sorted(r for part in parts for r in part), amounts, len(parts), most_rows, most, self,
                           max(self.computed(part, amounts) for part in parts) - 1)
        return found or parts


def _neighbors(rows: Sequence[int], amounts: Amounts, count: int, most_rows: int, most: int, siblings: Siblings,
               high: int) -> Parts:
    """`count` parts of neighbors, so that the one with most to compute has as little as possible, to a thousandth;
    empty if that many are not enough for the bounds and at most `high` each. rows: ascending."""
    def runs(at_most: int) -> list[list[int]]:
        """As few as possible that compute at most so much each."""
        found: list[list[int]] = []
        whole = computed = 0
        for r in rows:
            more = amounts[r]
            if found and found[-1][-1] // siblings.run == r // siblings.run:
                more -= siblings.prompts[r]
            full = not found or len(found[-1]) == most_rows or most and whole + amounts[r] > most
            if full or computed + more > at_most:
                found.append([])
                whole, computed, more = 0, 0, amounts[r]
            found[-1].append(r)
            whole += amounts[r]
            computed += more
        return found

    low = max(siblings.computed(rows, amounts) // count, max((amounts[r] for r in rows), default=0)) - 1
    if high <= low or len(runs(high)) > count:
        return ()
    while high - low > max(1, low >> 10):
        middle = (low + high) // 2
        low, high = (middle, high) if len(runs(middle)) > count else (low, middle)
    found = runs(high)
    while len(found) < count:  # fewer are enough
        at = max(range(len(found)), key=lambda i: len(found[i]))
        found[at : at + 1] = [found[at][: len(found[at]) // 2], found[at][len(found[at]) // 2 :]]
    return tuple(map(tuple, found))
