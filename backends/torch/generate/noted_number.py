"""A number on which a function may depend, and whether the function's Python has read it.

In: the number. Out: the number, and a note that it was read. A captured step whose Python does not read a number is the
same step for all of them (`captured_step.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class NotedNumber:
    """For one run of a function, which gets the number from `read` alone."""

    number: int            # for those who call the function: no note is made of a look at it here
    is_read: bool = False  # whether `read` was called

    def read(self) -> int:
        self.is_read = True
        return self.number
