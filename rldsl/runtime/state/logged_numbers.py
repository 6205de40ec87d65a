"""Logged numbers on their way to the rank that reports them.

In: what to wait for. Out: whether it has arrived. A thread waits for one message after the other, so that the rank
itself never does: gloo reports a receive as complete only to a thread that waits for it.
Errors: what a wait raises is raised again where the result is asked for.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from rldsl import threads

MAX_UNSENT = 1024  # messages that a rank may be ahead of the one that reports; each is some hundred bytes


class Posted(Protocol):
    """Messages under way (`comm/exchange.py`)."""

    def wait(self) -> None: ...


@dataclass
class Arrival:
    """Something that arrives once."""

    _there: threading.Event = field(default_factory=threading.Event)  # set when the wait for it has ended
    _error: BaseException | None = None                               # what that wait raised
    at: float = 0.0                                                   # when it ended, by `time.monotonic`

    @staticmethod
    def now() -> Arrival:
        """An arrival that is complete from the start."""
        arrival = Arrival(at=time.monotonic())
        arrival._there.set()
        return arrival

    def complete(self, wait: Callable[[], Any]) -> None:
        """Wait for it, in a separate thread."""
        try:
            wait()
        except BaseException as error:  # noqa: BLE001 (for the thread that asks)
            self._error = error
        self.at = time.monotonic()
        self._there.set()

    def arrived(self) -> bool:
        return self._there.is_set()

    def wait(self) -> None:
        """Block until it has arrived. Raises what the wait for it raised."""
        self._there.wait()
        if self._error is not None:
            raise self._error


Waiting = SimpleQueue[tuple[Arrival, Callable[[], Any]] | None]  # None: nothing follows


class Arrivals:
    """What a rank expects, in the order in which it was posted."""

    def __init__(self) -> None:
        self._waiting: Waiting = SimpleQueue()
        self._thread: threading.Thread | None = None

    def expect(self, wait: Callable[[], Any]) -> Arrival:
        """Expect something. wait: returns when it has arrived."""
        if self._thread is None:  # a daemon: where a peer has died, the message never comes
            self._thread = threading.Thread(target=_complete_all, args=(self._waiting,), name="rldsl-metrics",
                                            daemon=True)
            threads.start(self._thread)
            weakref.finalize(self, self._waiting.put, None)  # it ends with the run, not only with the process
        arrival = Arrival()
        self._waiting.put((arrival, wait))
        return arrival


def _complete_all(waiting: Waiting) -> None:
    while (expected := waiting.get()) is not None:
        arrival, wait = expected
        arrival.complete(wait)
        del expected, arrival, wait  # what has arrived is not held until something else is expected


class SentLogs:
    """Messages of this rank that may not have been taken yet; they keep the sent numbers alive."""

    def __init__(self) -> None:
        self._under_way: deque[Posted] = deque()

    def add(self, posted: Posted) -> None:
        self._under_way.append(posted)
        if len(self._under_way) > MAX_UNSENT:
            self._under_way.popleft().wait()

    def finish(self) -> None:
        """Wait until all messages have been taken."""
        while self._under_way:
            self._under_way.popleft().wait()


@dataclass(frozen=True)
class LoggedNumbers:
    """The metrics of one log event."""

    names: tuple[str, ...]                # in the order of the event
    # sender, name and how many numbers each metric has, in the order of the messages
    order: tuple[tuple[int, str, int], ...]
    # sender -> [numbers] float64: of each of its metrics whether there are numbers, and which
    received: Mapping[int, torch.Tensor]
    arrival: Arrival                      # of all messages in `received`
    wait: Callable[[], None]              # the same as arrival.wait, noted as a wait of this rank
    lists: frozenset[str] = frozenset()   # the metrics that are lists of numbers, if only of one

    def numbers(self) -> dict[str, float]:
        """Metric -> number, of those that are no lists, once all have arrived."""
        return {name: numbers[0] for name, numbers in self._by_name().items() if name not in self.lists}

    def arrays(self) -> dict[str, list[float]]:
        """Metric -> numbers, of those that are lists, once all have arrived."""
        return {name: numbers for name, numbers in self._by_name().items() if name in self.lists}

    def _by_name(self) -> dict[str, list[float]]:
        self.arrival.wait()
        rest = {peer: iter(x.tolist()) for peer, x in self.received.items()}
        found: dict[str, list[float]] = {}
        for peer, name, width in self.order:
            there, *numbers = islice(rest[peer], 1 + width)
            if there:
                found[name] = numbers
        return {name: found[name] for name in self.names if name in found}
