"""Capture a function that is called again and again with the same shapes, and replay it without its Python.

In: a key for everything that the function's Python depends on, and a function that reads tensors which stay where they
are; called twice in one state it gives the same. Out: its results.

The first calls run the function, then one call captures it: as an `OpTrace` on the CPU, as a CUDA graph on a GPU. The
first capture is compared with the function once more, in a later state; if it does not match bit for bit, nothing is
replayed. A function that cannot be captured runs as it is. Captures that were not used for a while have no memory until
they are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from rldsl.backends.torch.generate.op_trace import NotTraceable, OpTrace, Outputs, trace
from rldsl.memory.decode_shapes import MAX_CAPTURES_WITH_MEMORY

CALLS_BEFORE_CAPTURE = 1  # a capture takes as long as a few calls
MAX_CAPTURES = 64  # per micro-batch group, most of them without memory


@dataclass
class CapturedSteps:
    """The pool of captured graphs (CUDA) or operator traces (CPU) of one function."""

    device: torch.device  # on which the function runs
    enabled: bool            # False: every call runs the function
    repeatable: bool = True  # whether the function may run twice in one state: then a capture is compared with it
    num_groups: int = 1      # how many micro-batch groups take turns; each has keys of its own
    # key -> its graph or operator trace, or how often the function was called while there is none
    captures: dict[Hashable, Callable[[], Outputs] | int] = field(default_factory=dict)
    with_memory: dict[Hashable, OpTrace] = field(default_factory=dict)  # least recently used first
    verified: bool = False   # a capture has been compared with its function

    def __call__(self, key: Hashable, function: Callable[[], Outputs]) -> Outputs:
        if not self.enabled:
            return function()
        captured = self.captures.get(key, 0)
        if isinstance(captured, int):
            if captured == CALLS_BEFORE_CAPTURE:
                return self._capture(key, function)
            self.captures[key] = captured + 1
            limit = MAX_CAPTURES if self.device.type == "cpu" else MAX_CAPTURES_WITH_MEMORY  # a graph always has memory
            if len(self.captures) > limit * self.num_groups:
                oldest = next(iter(self.captures))
                del self.captures[oldest]
                self.with_memory.pop(oldest, None)
            return function()
        if isinstance(captured, OpTrace):
            self._allocate_memory(key, captured)
        if self.verified or not self.repeatable:
            return captured()
        out = function()
        self.verified = self.enabled = all(map(torch.equal, out, captured()))
        return out

    def release_memory(self) -> None:
        """Give the memory of all captures back until they are used again."""
        for captured in self.with_memory.values():
            captured.storage.release_memory()
        self.with_memory.clear()

    def _allocate_memory(self, key: Hashable, captured: OpTrace) -> None:
        if self.with_memory.pop(key, None) is None and not captured.storage.has_memory:
            captured.storage.allocate_memory()
        self.with_memory[key] = captured
        # the last result of each group is still read: with several captures per group it is never the oldest
        if len(self.with_memory) > MAX_CAPTURES_WITH_MEMORY * self.num_groups:
            self.with_memory.pop(next(iter(self.with_memory))).storage.release_memory()

    def _capture(self, key: Hashable, function: Callable[[], Outputs]) -> Outputs:
        try:
            if self.device.type == "cpu":
                out, captured = trace(function, self.repeatable and not self.verified)
                self.captures[key] = captured
                self._allocate_memory(key, captured)
            else:  # a function that reads values on the host fails in a capture, so nothing is left to compare
                out, self.captures[key] = capture_graph(function)
                self.verified = True
            return out
        except (NotTraceable, RuntimeError) as error:
            self.enabled = False
            if isinstance(error, NotTraceable) and not self.repeatable:  # it has done a part of its work
                raise
            return function()


def capture_graph(function: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], Outputs]]:
    """The function's result and its CUDA graph. The function has run before, so that everything its kernels set up at
    their first launch exists."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = function()

    def replay() -> Outputs:
        graph.replay()
        return out

    return replay(), replay
