"""A size on which a function may depend, and whether the function's Python has read it.

In: the size. Out: the size, and whether it was read. A captured step whose Python does not read the size is the same
step for all sizes; one whose Python does is specialized on it, as `torch.compile` says (`captured_step.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DynamicSize:
    """For one run of a function, which gets the size from `read` alone."""

    value: int             # for the caller: looking at it here does not count as reading
    is_read: bool = False  # whether `read` was called

    def read(self) -> int:
        self.is_read = True
        return self.value
