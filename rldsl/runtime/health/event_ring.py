"""What a rank did last: a ring of (when, iterations, event, phase), for the post-mortem of a run.

In: each event as the rank begins and ends it, and what it waits for. Out: where the rank is, and how it got there.
Invariant: each entry is one short tuple in a list of fixed length, so it costs the same on the first step and on the
last. The rank's main thread writes; its watchdog reads at any moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rldsl.plan.events import Event
from rldsl.postmortem.dumps import EventRun, Phase, RankPosition, RingEntry

SIZE = 128  # entries: some steps of a small program, the last events of a large one

T = TypeVar("T")
_Slot = tuple[int, float, Event | None, tuple[int, ...], Phase, EventRun | str | None]


class EventRing:
    """The ring of one rank."""

    def __init__(self, size: int = SIZE):
        self._slots: list[_Slot] = [(0, time.monotonic(), None, (), "start-up", None)] * size
        self._iterations: tuple[int, ...] = ()  # of the loops that the rank is in, outermost first, from 1
        self._event: Event | None = None
        self._count = 0  # entries so far; entry n is in slot n % size
        self.waited = 0.0  # seconds so far in which the rank waited for what an earlier event had started

    @property
    def event(self) -> Event | None:
        """The event that the rank is in, or was in last."""
        return self._event

    @property
    def is_running(self) -> bool:
        """Whether the rank has begun its list of events and not finished it."""
        return self._event is not None and self._slots[self._count % len(self._slots)][4] != "over"

    def enter_iteration(self, depth: int, number: int) -> None:
        """The rank begins iteration `number`, from 1, of the loop that has `depth` loops around it."""
        self._iterations = (*self._iterations[:depth], number)

    def leave_loop(self, depth: int) -> None:
        """The rank leaves the loop that has `depth` loops around it."""
        self._iterations = self._iterations[:depth]

    def begin_startup(self, what: str) -> None:
        """Note what the rank does before its first event, in the words of a message: "opening ..."."""
        self._add("start-up", what)

    def begin_event(self, event: Event) -> None:
        self._event = event
        self._add("begins")

    def end_event(self) -> None:
        self._add("ends")

    def current_run(self) -> EventRun | None:
        """The current run of the current event, to wait for later."""
        return None if self._event is None else EventRun(self._event.id, self._iterations)

    def begin_wait(self, awaited: EventRun | None) -> None:
        """Note that the rank waits for what an earlier event has started; until `resume`."""
        self._add("waits", awaited)

    def wait_tracker(self, finish: Callable[[], T]) -> Callable[[], T]:
        """`finish`, which notes while it runs that this rank waits for the current event."""
        posted = self.current_run()

        def tracked() -> T:
            self.begin_wait(posted)
            begin = time.monotonic()
            result = finish()
            self.waited += time.monotonic() - begin
            self.resume()
            return result

        return tracked

    def begin_call(self, function: str) -> None:
        """Note that the rank is in a user's Python function; until `resume`."""
        self._add("calls", function)

    def resume(self) -> None:
        self._add("resumes")

    def finish(self) -> None:
        """The rank has finished its list of events."""
        self._add("over")

    def _add(self, phase: Phase, what: EventRun | str | None = None) -> None:
        count = self._count + 1
        self._slots[count % len(self._slots)] = (count, time.monotonic(), self._event, self._iterations, phase, what)
        self._count = count

    def position(self, call: str = "") -> RankPosition:
        """Where the rank is now. call: the operation between ranks that it is in."""
        return _position(self._slots[self._count % len(self._slots)], time.monotonic(), call)

    def entries(self) -> tuple[RingEntry, ...]:
        """All entries, oldest first."""
        now, slots = time.monotonic(), sorted(self._slots[:], key=lambda slot: slot[0])
        return tuple(RingEntry(s.seconds, s.at, s.phase, s.awaits, s.function)
                     for s in (_position(slot, now) for slot in slots if slot[0]))


def _position(slot: _Slot, now: float, call: str = "") -> RankPosition:
    _, when, event, iterations, phase, what = slot
    return RankPosition(None if event is None else EventRun(event.id, iterations), phase, round(now - when, 3),
                        what if isinstance(what, EventRun) else None, what if isinstance(what, str) else "", call)
