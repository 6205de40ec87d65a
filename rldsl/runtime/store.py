"""The values that a rank holds, by buffer name (`value@spread`), and those on their way to it.

Communication is issued early and waited for late: a transfer leaves a `Pending` here, and the first read waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Column:
    """Entries of some rows. ids: ascending row numbers (prompt numbers at prompt level, [0] at batch level).
    sizes: entries of each id. data: [sum(sizes)], one id's entries after another's. All on one device."""

    ids: torch.Tensor
    sizes: torch.Tensor
    data: torch.Tensor

    def __post_init__(self) -> None:
        # a mistake of ours, which a CPU never shows and a GPU shows much later
        assert self.ids.device == self.sizes.device == self.data.device, \
            f"a column spread over the devices {self.ids.device}, {self.sizes.device} and {self.data.device}"

    def pick(self, ids: torch.Tensor) -> Column:
        """The entries of `ids` (ascending, all of them held), in their order. Where the look does not stop a GPU, that
        they are held is looked at: rows divided differently by two ranks would be wrong numbers, not an error."""
        if ids.numel() == self.ids.numel():
            assert ids.is_cuda or torch.equal(ids, self.ids), "the requested rows differ from the stored rows"
            return self
        at = torch.searchsorted(self.ids, ids)
        assert ids.is_cuda or torch.equal(self.ids[at.clamp(max=self.ids.numel() - 1)], ids), \
            "requested rows are not stored here"
        sizes = self.sizes[at]
        return Column(ids, sizes, self.data[ragged_indices(self.sizes.cumsum(0) - self.sizes, at, sizes)])

    @staticmethod
    def none(dtype: torch.dtype, device: torch.device) -> Column:
        """No rows."""
        ids = torch.empty(0, dtype=torch.int64, device=device)
        return Column(ids, ids, torch.empty(0, dtype=dtype, device=device))

    def behind(self, other: Column, shift: int) -> Column:
        """These rows, then those of `other` with `shift` added to their numbers."""
        return Column(torch.cat([self.ids, other.ids + shift]), torch.cat([self.sizes, other.sizes]),
                      torch.cat([self.data.to(other.data.dtype), other.data]))

    @staticmethod
    def join(parts: Sequence[Column]) -> Column:
        """Disjoint columns as one, ids ascending."""
        if len(parts) == 1:
            return parts[0]
        ids, order = torch.cat([p.ids for p in parts]).sort()
        sizes, data = torch.cat([p.sizes for p in parts]), torch.cat([p.data for p in parts])
        starts = sizes.cumsum(0) - sizes
        return Column(ids, sizes[order], data[ragged_indices(starts, order, sizes[order])])


def ragged_indices(starts: torch.Tensor, at: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Indices of runs `at` of a flat array: starts[at], starts[at] + 1, ..., sizes[i] of each."""
    return starts[at].repeat_interleave(sizes) + offsets_within(sizes)


def offsets_within(sizes: torch.Tensor) -> torch.Tensor:
    """[sum(sizes)]: 0, 1, ... in each run."""
    starts = sizes.cumsum(0) - sizes
    return torch.arange(int(sizes.sum()), device=sizes.device) - starts.repeat_interleave(sizes)


@dataclass(frozen=True, slots=True)
class Pending:
    """Communication under way; `finish` waits for it and returns what the buffer holds. bytes: that this rank sends and
    receives."""

    finish: Callable[[], Any]
    bytes: int = 0


class BufferStore:
    """Buffers of one rank."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Replace a buffer; what is still on its way under that name comes first (a rank that only sends never
        reads)."""
        if isinstance(self._buffers.get(name), Pending):
            self.take(name)
        self._buffers[name] = value

    def names(self) -> tuple[str, ...]:
        return tuple(self._buffers)

    def settle(self) -> None:
        """Wait for everything that is on its way."""
        for name in list(self._buffers):
            self.take(name)

    def take(self, name: str) -> Any:
        """The buffer's contents; waits for what is on its way."""
        value = self._buffers[name]
        if isinstance(value, Pending):
            value = self._buffers[name] = value.finish()
        return value

    def free(self, name: str) -> None:
        """Forget a buffer; what is on its way is received first. A rank that never held it has nothing to do."""
        if name in self._buffers:
            self.take(name)
            del self._buffers[name]
