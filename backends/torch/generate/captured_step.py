"""A function that is called again and again with the same shapes, without its Python.

In: a key for everything that Python decides by, and a function that reads tensors which stay where they are; called
twice in a row it gives the same. Out: its results. The first calls are plain, then one is recorded: as a tape of
operators on the CPU, as a captured graph on CUDA. The first tape is asked beside its function once more, and if it does
not give bit for bit the same, nothing is replayed; nor is a function that cannot be recorded. Tapes that were not asked
for a while have no memory until they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from rldsl.backends.torch.generate.op_trace import Tape, Unrecorded, record

from rldsl.memory.decoding import KEPT

Out = tuple[torch.Tensor, ...]

PLAIN = 1  # calls before a recording, which takes as long as a few of them
KNOWN = 64  # tapes for each lane, most of them without memory


@dataclass
class Replay:
    """able: whether to try. twice: whether the function may be asked twice in one state, and is then compared. lanes:
    how many keys take turns. found: recordings, and how often it was called where there is none. awake: those with
    memory, the last that was asked at the end. trusted: a recording has been compared."""

    device: torch.device
    able: bool
    twice: bool = True
    lanes: int = 1
    found: dict[Hashable, Callable[[], Out] | int] = field(default_factory=dict)
    awake: dict[Hashable, Tape] = field(default_factory=dict)
    trusted: bool = False

    def __call__(self, key: Hashable, function: Callable[[], Out]) -> Out:
        if not self.able:
            return function()
        again = self.found.get(key, 0)
        if isinstance(again, int):
            if again == PLAIN:
                return self._recorded(key, function)
            self.found[key] = again + 1
            if len(self.found) > (KNOWN if self.device.type == "cpu" else KEPT) * self.lanes:
                old = next(iter(self.found))
                del self.found[old]
                self.awake.pop(old, None)
            return function()
        if isinstance(again, Tape):
            self._wake(key, again)
        if self.trusted or not self.twice:
            return again()
        out = function()
        self.trusted = self.able = all(map(torch.equal, out, again()))
        return out

    def sleep(self) -> None:
        """Nothing that was recorded has memory until it is asked again."""
        for tape in self.awake.values():
            tape.rest.sleep()
        self.awake.clear()

    def _wake(self, key: Hashable, tape: Tape) -> None:
        if self.awake.pop(key, None) is None and not tape.rest.awake:
            tape.rest.wake()
        self.awake[key] = tape
        if len(self.awake) > KEPT * self.lanes:  # what a lane was told last is still read, and is not the oldest
            self.awake.pop(next(iter(self.awake))).rest.sleep()

    def _recorded(self, key: Hashable, function: Callable[[], Out]) -> Out:
        try:
            if self.device.type == "cpu":
                out, tape = record(function, self.twice and not self.trusted)
                self.found[key] = tape
                self._wake(key, tape)
            else:  # whatever reads numbers on the host fails in a capture
                out, self.found[key] = capture(function)
                self.trusted = True
            return out
        except (Unrecorded, RuntimeError) as found:
            self.able = False
            if isinstance(found, Unrecorded) and not self.twice:  # it has done a part of its work
                raise
            return function()


def capture(function: Callable[[], Out]) -> tuple[Out, Callable[[], Out]]:
    """A CUDA graph. Its kernels were all run before, so that what they set up at first is there."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = function()

    def again() -> Out:
        graph.replay()
        return out

    return again(), again
