"""What a rank did last: a ring of (when, iterations, event, phase), for the post-mortem of a run.

In: each event as the rank begins and ends it, and what it waits for. Out: where the rank is, and how it came there.
Invariant: one short tuple an entry in a list of fixed length, so it costs the same on the first step and on the last.
The rank's main thread writes; its watcher reads at any moment.
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
    """One rank's."""

    def __init__(self, size: int = SIZE):
        self._slots: list[_Slot] = [(0, time.monotonic(), None, (), "start-up", None)] * size
        self._iterations: tuple[int, ...] = ()  # of the loops that the rank is in, outermost first, from 1
        self._event: Event | None = None
        self._count = 0  # entries so far; entry n is in slot n % size

    @property
    def event(self) -> Event | None:
        """The one that the rank is at, or was at last."""
        return self._event

    @property
    def walks(self) -> bool:
        """Whether the rank is on its way: it has begun with its list and not ended it."""
        return self._event is not None and self._slots[self._count % len(self._slots)][4] != "over"

    def enter_iteration(self, depth: int, number: int) -> None:
        """The rank begins iteration `number`, from 1, of the loop that has `depth` loops around it."""
        self._iterations = (*self._iterations[:depth], number)

    def leave_loop(self, depth: int) -> None:
        """The rank leaves the loop that has `depth` loops around it."""
        self._iterations = self._iterations[:depth]

    def prepares(self, what: str) -> None:
        """What the rank does before its first event, as a message says it: "opening ..."."""
        self._add("start-up", what)

    def begins(self, event: Event) -> None:
        self._event = event
        self._add("begins")

    def ends(self) -> None:
        self._add("ends")

    def here(self) -> EventRun | None:
        """This run of this event, to wait for later."""
        return None if self._event is None else EventRun(self._event.id, self._iterations)

    def waits(self, awaited: EventRun | None) -> None:
        """For what an earlier event has set on its way; until `resume`."""
        self._add("waits", awaited)

    def wait_tracker(self, finish: Callable[[], T]) -> Callable[[], T]:
        """`finish`, noting while it runs that this rank waits for it, and for which event: the one that is at hand
        now."""
        posted = self.here()

        def tracked() -> T:
            self.waits(posted)
            result = finish()
            self.resume()
            return result

        return tracked

    def calls(self, function: str) -> None:
        """A user's Python function; until `resume`."""
        self._add("calls", function)

    def resume(self) -> None:
        self._add("resumes")

    def over(self) -> None:
        """The rank has walked its whole list."""
        self._add("over")

    def _add(self, phase: Phase, what: EventRun | str | None = None) -> None:
        count = self._count + 1
        self._slots[count % len(self._slots)] = (count, time.monotonic(), self._event, self._iterations, phase, what)
        self._count = count

    def stand(self, call: str = "") -> RankPosition:
        """Where the rank is now. call: the operation between ranks that it is in."""
        return _stand(self._slots[self._count % len(self._slots)], time.monotonic(), call)

    def entries(self) -> tuple[RingEntry, ...]:
        """All that is held, oldest first."""
        now, held = time.monotonic(), sorted(self._slots[:], key=lambda slot: slot[0])
        return tuple(RingEntry(s.seconds, s.at, s.phase, s.awaits, s.function)
                     for s in (_stand(slot, now) for slot in held if slot[0]))


def _stand(slot: _Slot, now: float, call: str = "") -> RankPosition:
    _, when, event, iterations, phase, what = slot
    return RankPosition(None if event is None else EventRun(event.id, iterations), phase, round(now - when, 3),
                        what if isinstance(what, EventRun) else None, what if isinstance(what, str) else "", call)
