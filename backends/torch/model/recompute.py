"""Activation checkpointing: layers that save only their input and run again in the backward pass (Chen et al. 2016,
arXiv:1604.06174).

In: the forward of a layer, and whether passes recompute at present. Out: a forward that does.
Invariant: no number changes, since no forward draws random numbers: what is drawn belongs to the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


class ActivationCheckpointing:
    """A mixin for stages."""

    recompute = False  # whether passes recompute at present

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of a layer's first forward, and of its second, in the backward pass."""
        return nullcontext(), nullcontext()

    @contextmanager
    def recomputing(self, wanted: bool) -> Iterator[None]:
        """Recompute inside, if wanted."""
        self.recompute = wanted
        try:
            yield
        finally:
            self.recompute = False

    def checkpointed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a layer, which recomputes if passes do when it is called."""
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (self.recompute and torch.is_grad_enabled()):
                return plain(*args, **kwargs)
            return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False,
                              context_fn=self.checkpoint_contexts, **kwargs)

        return forward
