"""What a command is doing, from the code that does it to whoever waits for it.

In: calls of `stage` wherever work may take a second. Out: the newest `Stage`, which a terminal shows and an interrupted
command names. Without a listener a call costs a lookup, so the library needs no flag for it. Also how Ctrl-C gets from
a command to processes that it starts.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


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


@contextmanager
def ctrl_c_held() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C until the block calls what it gets, which raises a KeyboardInterrupt that has come. In the middle of
    the start of a process, it would lose that process, which nobody could end then."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    holds = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()

    def release() -> None:
        if holds:
            signal.signal(signal.SIGINT, before)
        if came:
            came.clear()
            raise KeyboardInterrupt

    if holds:  # otherwise it does not reach this thread, or a shell has it ignored
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield release
    finally:
        release()


def interrupting_signal(pid: int) -> signal.Signals:
    """What ends a process of ours as Ctrl-C does: SIGINT. One that does not handle SIGTERM is still importing, where
    SIGINT would have Python print a traceback: SIGTERM ends it without one."""
    with suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
        if not caught >> signal.SIGTERM - 1 & 1:
            return signal.SIGTERM
    return signal.SIGINT


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


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
