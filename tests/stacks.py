"""What a process that does not end is doing: the Python stacks of its threads, and which of them use the processor."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

from tests.cpu import TICK, children

SECONDS = 1.0  # for which a process is watched


def register(file: Path | None = None) -> None:
    """In the process: SIGUSR1 writes its stacks to `file`, else to stderr."""
    if file is None:
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    else:
        faulthandler.register(signal.SIGUSR1, file=os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND),
                              all_threads=True)


def of(pid: int, file: Path) -> str:
    """Of a process that has registered `file`."""
    used = threads(pid)
    dump(pid)
    return f"--- process {pid}: {used}\n{file.read_text() if file.exists() else 'it has registered no file'}"


def dump(pid: int) -> None:
    """Let a process write its stacks. One that has not registered ends."""
    try:
        os.kill(pid, signal.SIGUSR1)
        time.sleep(SECONDS)
    except ProcessLookupError:
        pass


def threads(pid: int) -> str:
    """The threads of a process, those of C++ too: name, state, and how busy it is."""
    before = _ticks(pid)
    time.sleep(SECONDS)
    return ", ".join(f"{name} {state} {(ticks - before.get(thread, (0, '', ''))[0]) / TICK / SECONDS:.0%}"
                     for thread, (ticks, name, state) in _ticks(pid).items()) or "it has ended"


def _ticks(pid: int) -> dict[str, tuple[int, str, str]]:
    """Thread -> processor time in ticks, name, state."""
    found: dict[str, tuple[int, str, str]] = {}
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        try:
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended since
            continue
        state, *numbers = rest.split()
        found[thread.name] = sum(map(int, numbers[10:12])), name, state
    return found


def dump_all(pid: int) -> str:
    """A process and its descendants write their stacks where they have registered. Returns how busy the threads are."""
    alive = [pid, *descendants(pid)]
    busy = [f"--- process {each}: {threads(each)}" for each in alive]
    for each in alive:
        dump(each)
    return "\n".join(busy)


def descendants(pid: int) -> list[int]:
    """The processes that a process has begun, and those that these have begun."""
    return [x for child in children(pid) for x in (child, *descendants(child))]
