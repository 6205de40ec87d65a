"""The values that a rank holds, by buffer name (`value@spread`), and those that are still arriving.

Communication is issued early and waited for late: a transfer leaves a `Pending` here, and the first read waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rldsl.diag import internal_error


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """What a rank holds of a value: a ragged (jagged) array with its row numbers. All on one device."""

    ids: torch.Tensor  # [S] int64, ascending: row numbers; prompt numbers at prompt level, [0] at batch level
    sizes: torch.Tensor  # [S] int64: entries of each id
    data: torch.Tensor  # [sum(sizes)]: the entries of one id after those of another

    def __post_init__(self) -> None:
        # without this check the error would never show on a CPU, and only much later on a GPU
        devices = self.ids.device, self.sizes.device, self.data.device
        if len(set(devices)) > 1:
            raise internal_error("tensors of one value on the devices {}, {} and {}".format(*devices), "run")

    def select(self, ids: torch.Tensor, total: int | None = None) -> RaggedRows:
        """The entries of `ids`, which are ascending and all held. This is checked, since else two ranks that divide
        rows differently would give wrong numbers; by the GPU itself, where the host does not wait for the answer.

        total: how many entries these are, if the host knows it: else it waits for the device."""
        if ids.numel() == self.ids.numel():
            if ids.numel():
                _check(ids == self.ids, "the requested rows differ from the stored rows")
            return self
        return self.gather(ids, total)

    def gather(self, ids: torch.Tensor, total: int | None = None) -> RaggedRows:
        """The entries of `ids`, which are all held, in the order of `ids`; an id may occur more than once. Checked as
        by `select`."""
        at = torch.searchsorted(self.ids, ids)
        if ids.numel():
            if not self.ids.numel():
                raise internal_error("requested rows are not stored here", "run")
            _check(self.ids[at.clamp(max=self.ids.numel() - 1)] == ids, "requested rows are not stored here")
        sizes = self.sizes[at]
        return RaggedRows(ids, sizes, self.data[ragged_indices(self.sizes.cumsum(0) - self.sizes, at, sizes, total)])

    @staticmethod
    def empty(dtype: torch.dtype, device: torch.device) -> RaggedRows:
        """No rows."""
        ids = torch.empty(0, dtype=torch.int64, device=device)
        return RaggedRows(ids, ids, torch.empty(0, dtype=dtype, device=device))

    def append(self, other: RaggedRows, row_offset: int) -> RaggedRows:
        """These rows, then those of `other`, whose numbers are increased by `row_offset`."""
        return RaggedRows(torch.cat([self.ids, other.ids + row_offset]), torch.cat([self.sizes, other.sizes]),
                      torch.cat([self.data.to(other.data.dtype), other.data]))

    @staticmethod
    def join(parts: Sequence[RaggedRows]) -> RaggedRows:
        """Disjoint sets of rows as one, ids ascending."""
        if len(parts) == 1:
            return parts[0]
        ids, order = torch.cat([p.ids for p in parts]).sort()
        sizes, data = torch.cat([p.sizes for p in parts]), torch.cat([p.data for p in parts])
        starts = sizes.cumsum(0) - sizes
        return RaggedRows(ids, sizes[order], data[ragged_indices(starts, order, sizes[order], len(data))])


def _check(equal: torch.Tensor, text: str) -> None:
    """Raise an internal error unless all of `equal` are true. On CUDA the kernels after this one do not run then, and
    the next wait of the host raises."""
    if equal.device.type == "cpu":
        if not bool(equal.all()):
            raise internal_error(text, "run")
    elif equal.is_cuda:
        torch._assert_async(equal.all(), text)


def ragged_indices(starts: torch.Tensor, at: torch.Tensor, sizes: torch.Tensor, total: int | None = None
                   ) -> torch.Tensor:
    """Indices into a flat array: for each i, starts[at[i]], starts[at[i]] + 1, ..., sizes[i] of them. total: as of
    `RaggedRows.select`."""
    total = int(sizes.sum()) if total is None else total
    return starts[at].repeat_interleave(sizes, output_size=total) + offsets_within(sizes, total)


def offsets_within(sizes: torch.Tensor, total: int | None = None) -> torch.Tensor:
    """[sum(sizes)]: 0, 1, ..., size - 1 for each of `sizes`. total: their sum, if the host knows it: else it waits for
    the device, once."""
    starts, total = sizes.cumsum(0) - sizes, int(sizes.sum()) if total is None else total
    return torch.arange(total, device=sizes.device) - starts.repeat_interleave(sizes, output_size=total)


@dataclass(frozen=True, slots=True)
class Pending:
    """Communication under way."""

    finish: Callable[[], Any]  # waits for it and returns what the buffer holds
    bytes: int = 0  # that this rank sends and receives


class BufferStore:
    """The buffers of one rank: what it holds, or a `Pending` for what is still to arrive."""

    def __init__(self, shared: BufferStore | None = None, shared_names: Collection[str] = ()):
        """shared: where to read the buffers of `shared_names`, which this store does not hold."""
        self._buffers: dict[str, Any] = {}
        self._shared, self._shared_names = shared, shared_names

    def put(self, name: str, value: Any) -> None:
        """Replace a buffer. Waits for communication under that name first: a rank that only sends never reads it."""
        if isinstance(self._buffers.get(name), Pending):
            self.get(name)
        self._buffers[name] = value

    def names(self) -> tuple[str, ...]:
        return tuple(self._buffers)

    def wait_all(self) -> None:
        """Wait for everything that is on its way."""
        for name in list(self._buffers):
            self.get(name)

    def get(self, name: str) -> Any:
        """The buffer's contents, once they have arrived. The buffer stays in the store."""
        if self._shared is not None and name in self._shared_names:
            return self._shared.get(name)
        value = self._buffers[name]
        if isinstance(value, Pending):
            value = self._buffers[name] = value.finish()
        return value

    def update(self, other: BufferStore) -> None:
        """Put all buffers of another store here."""
        for name, value in other._buffers.items():
            self.put(name, value)

    def free(self, name: str) -> None:
        """Remove a buffer, after waiting for its communication. Does nothing on a rank that does not have it."""
        if name in self._buffers:
            self.get(name)
            del self._buffers[name]
