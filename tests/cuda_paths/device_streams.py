"""In which order the streams of a device that is not there would run what is launched, and who may not rely on it.

Each stream, and the host, counts what it launches and knows how much of every other stream it runs after. A read of
what another stream wrote, or a write to what it reads, is a race unless the one runs after the other, as for torch's
own detector on a GPU (`torch.cuda._sanitizer`). Memory that is freed while another stream may still use it is found,
too: the allocator gives it to the next tensor of the stream that it belongs to.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

HOST = "host"


class Memory:
    """What is known of one storage."""

    __slots__ = ("side", "pinned", "order", "home", "write", "reads", "recorded", "parts")

    def __init__(self, side: str, order: Order, home: str):
        self.side = side          # "device" or "host"
        self.pinned = False       # memory of the host that a device copies from and to by itself
        self.order, self.home = order, home  # home: the stream whose memory it is; "": of none
        self.write: tuple[str, int] | None = None  # the last write: stream, number of the launch
        self.reads: dict[str, int] = {}  # stream -> its last read since then
        self.recorded = False     # `record_stream` has been called
        self.parts: dict[tuple[int, int], Memory] = {}

    def part(self, first: int, size: int) -> Memory:
        """Of pinned memory, which holds many tensors."""
        if (first, size) not in self.parts:
            self.parts[first, size] = Memory(self.side, self.order, "")
        return self.parts[first, size]

    def __del__(self) -> None:
        self.order.freed(self)


class Order:
    """What streams launch, and what they wait for. race: called with what is wrong."""

    def __init__(self, race: Callable[[str], None]):
        self.race, self.active = race, True
        self.launched: Counter[str] = Counter()
        self.known: defaultdict[str, dict[str, int]] = defaultdict(dict)  # stream -> other -> launches it runs after

    def now(self, stream: str) -> dict[str, int]:
        """What whoever waits for the stream now runs after."""
        return {**self.known[stream], stream: self.launched[stream]}

    def wait(self, waiter: str, until: Mapping[str, int]) -> None:
        mine = self.known[waiter]
        for stream, number in until.items():
            mine[stream] = max(mine.get(stream, 0), number)

    def launch(self, stream: str, reads: Iterable[Memory], writes: Iterable[Memory]) -> None:
        self.launched[stream] += 1
        if stream != HOST:
            self.wait(stream, self.now(HOST))
        for memory in reads:
            self._check(stream, memory.write, "reads what {} writes")
            memory.reads[stream] = self.launched[stream]
        for memory in writes:
            self._check(stream, memory.write, "writes what {} writes")
            for other in memory.reads.items():
                self._check(stream, other, "writes what {} reads")
            memory.write, memory.reads = (stream, self.launched[stream]), {}

    def _check(self, stream: str, other: tuple[str, int] | None, what: str) -> None:
        if other is not None and not self._after(stream, other):
            self.race(f"{stream} {what.format(other[0])}, and does not wait for it")

    def _after(self, stream: str, other: tuple[str, int]) -> bool:
        return other[0] == stream or self.known[stream].get(other[0], 0) >= other[1]

    def freed(self, memory: Memory) -> None:
        if not (self.active and memory.home) or memory.recorded:
            return
        users = [*memory.reads.items(), *([memory.write] if memory.write else [])]
        for other in users:
            if other[0] != HOST and not self._after(memory.home, other):
                self.race(f"memory of {memory.home} is freed while {other[0]} uses it")
