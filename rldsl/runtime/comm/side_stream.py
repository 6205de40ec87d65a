"""A second stream of the device, for communication that must not hold up the stream that computes.

In: what is launched inside `entered`. Out: a function after which the current stream sees its results.
On CUDA, waiting for a message makes a stream wait and not the host. So a chain of messages, each of which needs what an
earlier one brought, can be launched at once, and only its own stream waits. On a CPU there is no second stream: the
host waits, and work runs when it is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream of a rank besides the one on which it computes."""

    def __init__(self, device: torch.device):
        self.device = device
        # None: there is only the host, which waits
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is launched inside runs after all that was launched before, and nothing launched later waits for it.
        Tensors that are made inside get memory which no other stream reuses."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Callable[[], None]:
        """A function that makes the current stream wait for everything launched inside `entered` until now."""
        if self.stream is None:
            return lambda: None
        event = self.stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)
