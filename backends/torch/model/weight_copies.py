"""Weights as the products of an invariant model read them, made once in a call instead of at every product.

In: the parameters of a stage. Out: copies in the dtype of products; the blocks of columns of a row-parallel weight,
each contiguous where a kernel needs that. A call changes no
parameter before its end, and gradients are those of the parameters. A call's end releases the memory of copies but not
the tensors, since captured decode steps read them again in a later call, which fills them before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from rldsl.backends.torch.kernels.products import mkl_lacks_avx512


@dataclass(slots=True)
class _Copy:
    """A tensor that holds parts of parameters."""

    source: Callable[[], torch.Tensor]  # what the parameters are
    tensor: torch.Tensor
    size: int           # bytes
    filled: bool = True  # whether it has memory, and what the parameter is now


class WeightCopies:
    """Those of one stage."""

    def __init__(self, enabled: bool = True):
        """enabled: False where parameters change during a call, as with `zero`; then each product makes its own."""
        self.enabled = enabled
        self._copies: dict[Hashable, _Copy] = {}  # by what they hold, and their dtype
        self._calls = 0  # that are under way

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """During which copies stay as they are."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                for copy in self._copies.values():
                    copy.tensor.untyped_storage().resize_(0)
                    copy.filled = False

    def fill(self) -> None:
        """Fill all copies that there have been: captured steps read them."""
        for copy in self._copies.values():
            _fill(copy)

    def cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight in a dtype, without its gradient."""
        if weight.dtype == dtype:
            return weight.detach() if torch.is_grad_enabled() else weight
        return self._copy((id(weight), dtype), lambda: weight.data, dtype) if self.keeps(weight) else \
            weight.detach().to(dtype)

    def blocks(self, weight: torch.Tensor, dtype: torch.dtype, cuts: Sequence[int]) -> list[torch.Tensor]:
        """Runs of columns, in a dtype and without gradients, as products read them fastest."""
        with torch.no_grad():
            if dtype != torch.float32 or weight.device.type != "cpu" or not mkl_lacks_avx512():
                whole = self.cast(weight, dtype)
                return [whole[:, start:stop] for start, stop in pairwise(cuts)]
            if not self.keeps(weight):
                return [weight[:, start:stop] for start, stop in pairwise(cuts)]
            return [self._copy((id(weight), dtype, start, stop), partial(_columns, weight, start, stop), dtype)
                    for start, stop in pairwise(cuts)]

    def keeps(self, weight: torch.Tensor) -> bool:
        """Whether there are copies of it."""
        return self._calls > 0 and self.enabled and isinstance(weight, nn.Parameter)

    def _copy(self, key: Hashable, source: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """source: holds the parameters, so that no other ones get their ids."""
        copy = self._copies.get(key)
        if copy is None:
            tensor = source().to(dtype, copy=True, memory_format=torch.contiguous_format)
            copy = self._copies[key] = _Copy(source, tensor, tensor.untyped_storage().nbytes())
        elif not copy.filled:
            _fill(copy)
        return copy.tensor


def _columns(weight: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return weight.data[:, start:stop]


@torch.no_grad()
def _fill(copy: _Copy) -> None:
    if not copy.filled:
        copy.tensor.untyped_storage().resize_(copy.size)
        copy.tensor.copy_(copy.source())
        copy.filled = True


NO_COPIES = WeightCopies(enabled=False)  # each product makes its own
