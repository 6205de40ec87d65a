"""How Ctrl-C gets from a command to processes that it starts, and what signals are called.

In: the process that starts others, or the id of one. Out: when it may be interrupted, and by which signal.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
    """SIGKILL, say; "signal 35" of one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
