"""Give the memory of tensors back while nobody needs their contents.

In: tensors. Out: a `StorageParking`: after `park` they have no memory, after `unpark` they have memory with undefined
contents. The tensors and their views stay the same objects, so that everything that refers to them stays valid.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class StorageParking:
    """The storages behind some tensors."""

    has_memory: bool

    def __init__(self, tensors: Iterable[torch.Tensor]):
        storages = {s._cdata: s for s in (t.untyped_storage() for t in tensors)}  # views share one
        self.sizes = [(s, s.nbytes()) for s in storages.values()]  # bytes
        self.has_memory = True

    def park(self) -> None:
        for storage, _ in self.sizes:
            storage.resize_(0)
        self.has_memory = False

    def unpark(self) -> None:
        for storage, size in self.sizes:
            storage.resize_(size)
        self.has_memory = True
