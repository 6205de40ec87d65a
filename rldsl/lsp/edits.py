"""Changes of a text, line by line, so that an editor keeps its cursor, marks and folds.

In: a text before and after. Out: the lines that differ, as replacements of character ranges.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from itertools import accumulate


def line_edits(before: str, after: str) -> list[tuple[int, int, str]]:
    """(start, end, new text) of each run of lines that differs, in order; offsets are those of `before`."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, old))]
    return [(starts[a], starts[b], "".join(new[c:d]))
            for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if kind != "equal"]
