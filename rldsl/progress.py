"""What a command is doing, from the code that does it to whoever waits for it.

In: calls of `stage` wherever work may take a second. Out: the newest `Stage`, which a terminal shows and an interrupted
command names. Without a listener a call costs a lookup, so the library needs no flag for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A piece of work."""

    text: str  # what is done: "pass reallocs"; "" where somebody else reports from now on
    done: int = 0  # parts of it that are done
    total: int = 0  # parts in all; 0 where that is not known
    detail: str = ""  # how far it is, where parts do not say

    def __str__(self) -> str:
        part = f" ({min(self.done + 1, self.total)} of {self.total})" if self.total else ""
        return f"{self.text}{part}" + (f", {self.detail}" if self.detail else "")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the line that says where the command stopped and how to continue; "" if it has been printed."""


Listener = Callable[[Stage], None]
_LISTENER: ContextVar[Listener | None] = ContextVar("rldsl progress", default=None)


def stage(text: str, done: int = 0, total: int = 0, detail: str = "") -> None:
    """Say what is done from now on."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(Stage(text, done, total, detail))


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """`listener` hears every stage inside the block."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """For work that makes many objects and no reference cycles: the garbage collector would find nothing, and would
    visit every object each time (a third of the CPU time of a compilation at 10,240 ranks). Also a decorator."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
