"""Release the memory of tensors while nobody needs their contents (vLLM: sleep and wake up).

In: tensors. Out: a `ReleasableStorage`: after `release_memory` they have no memory, after `allocate_memory` they have
memory with undefined contents. The tensors and their views stay the same objects, so all references stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class ReleasableStorage:
    """The storages behind some tensors."""

    has_memory: bool  # False between `release_memory` and `allocate_memory`

    def __init__(self, tensors: Iterable[torch.Tensor]):
        storages = {s._cdata: s for s in (t.untyped_storage() for t in tensors)}  # views share one
        self.sizes = [(s, s.nbytes()) for s in storages.values()]  # bytes
        self.has_memory = True

    def release_memory(self) -> None:
        for storage, _ in self.sizes:
            storage.resize_(0)
        self.has_memory = False

    def allocate_memory(self) -> None:
        for storage, size in self.sizes:
            storage.resize_(size)
        self.has_memory = True
