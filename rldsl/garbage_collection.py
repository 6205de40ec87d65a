"""Fewer collections of Python's cyclic garbage, which take a good part of the time of a short process.

Importing torch and transformers makes a million objects that live as long as the process, and Python's collector goes
through all of them again and again: that is a fifth of the CPU time of a start.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (100_000, 50, 100)  # `gc.set_threshold`: collections of the youngest objects after 100,000 new ones


def collect_rarely() -> None:
    """For the rest of the process, which needs most of what it makes until it ends."""
    gc.set_threshold(*RARELY)


def never_collect() -> None:
    """For a command that needs most of what it makes until it ends."""
    gc.disable()


@contextmanager
def ending_quickly() -> Iterator[None]:
    """Around all that a process does: it ends as ever, with its exit status, threads waited for and functions of
    `atexit` called, but does not free its objects one by one. With torch and transformers that takes one to three
    seconds, and a tenth of the time of `rlc verify` at 10,240 ranks. What ends the block must end the process. Files
    must be closed by then. An exception other than SystemExit ends the process as if this were not there."""
    statuses: list[int] = []
    atexit.register(_leave, statuses)  # the first to be registered is the last to be called
    try:
        yield
    except SystemExit as left:
        statuses.append(left.code & 0xFF if isinstance(left.code, int) else int(left.code is not None))
        raise
    else:
        statuses.append(0)


def _leave(statuses: list[int]) -> None:
    if not statuses:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:  # None: it was closed when the process began
                stream.flush()
    except OSError:  # the interpreter has a message and a status for what cannot be written
        return
    os._exit(statuses[0])


@contextmanager
def importing() -> Iterator[None]:
    """Collect rarely while the block imports, and go through what there is by its end only when the process ends: a
    library that triton uses prints a list of what is not freed then."""
    usual = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.set_threshold(*usual)
