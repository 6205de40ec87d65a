"""Tensors whose memory is given back while nobody needs what is in it.

In: tensors. Out: a `Rest`, after whose `sleep` they have no memory and after whose `wake` they have some again, with
nothing in it yet. Tensors and their views stay what they are, so that whatever refers to them goes on doing so.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Rest:
    """awake: whether the memory is there."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        storages = {s._cdata: s for s in (t.untyped_storage() for t in tensors)}
        self.sizes = [(s, s.nbytes()) for s in storages.values()]
        self.awake = True

    def sleep(self) -> None:
        for storage, _ in self.sizes:
            storage.resize_(0)
        self.awake = False

    def wake(self) -> None:
        for storage, size in self.sizes:
            storage.resize_(size)
        self.awake = True
