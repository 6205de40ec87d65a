"""Layers that keep their input alone and run again in the backward pass (Chen et al. 2016, arXiv:1604.06174).

In: the forward of a layer, and whether passes now want it. Out: a forward that does. Nothing in one draws random
numbers, since what is drawn belongs to the sample; so no number changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


class Recompute:
    """What a stage inherits. again: whether passes now recompute."""

    again = False

    def passes(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What is around the first forward of a layer, and around the second, in the backward pass."""
        return nullcontext(), nullcontext()

    @contextmanager
    def recomputing(self, wanted: bool) -> Iterator[None]:
        """Inside, where wanted."""
        self.again = wanted
        try:
            yield
        finally:
            self.again = False

    def perhaps_again(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a layer, which asks at each call."""
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (self.again and torch.is_grad_enabled()):
                return plain(*args, **kwargs)
            return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False,
                              context_fn=self.passes, **kwargs)

        return forward
