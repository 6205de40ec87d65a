"""Values of level `entry`: one element for each of several tokens that may come next, at each token of a response.

Which tokens these are is an *entry space*. It is named after the value that has their ids, k for each token of the
response (`t.ids` of `t = teacher.top(gen, k=8)`), or it is the whole vocabulary at the tokens of a frame. Two values
meet if they have one space.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rldsl.plan.model import Value

ENTRIES, HIDDEN = "entry", "hidden"  # extents of values that have several numbers for each token of a response


class EntrySpace(NamedTuple):
    """Tokens that may come next."""

    frame: str  # id of the sequences
    width: int  # how many there are at each token of a response; 0: the whole vocabulary


def vocabulary_space(frame: str) -> str:
    """The entry space that is the whole vocabulary at the tokens of a frame."""
    return f"{frame}.vocabulary"


def entry_spaces(values: Iterable[Value]) -> Mapping[str, EntrySpace]:
    """The entry spaces of a plan, by name."""
    return {v.entries: EntrySpace(v.frame, v.width if v.extent == ENTRIES else 0) for v in values if v.entries}
