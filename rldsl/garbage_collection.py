"""Fewer collections of Python's cyclic garbage, which take a good part of the time of a short process.

Importing torch and transformers makes a million objects that live as long as the process, and Python's collector goes
through all of them again and again: that is a fifth of the CPU time of a start.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (100_000, 50, 100)  # `gc.set_threshold`: collections of the youngest objects after 100,000 new ones


def collect_rarely() -> None:
    """For the rest of the process, which needs most of what it makes until it ends."""
    gc.set_threshold(*RARELY)


def never_collect() -> None:
    """For a command that needs most of what it makes until it ends. The interpreter
    collects once more when it ends, which takes a tenth of the time of `rlc verify` at 10,240 ranks."""
    gc.disable()
    atexit.register(_skip_last_collection)


def _skip_last_collection() -> None:
    """Unless torch is loaded: see `importing`."""
    if "torch" not in sys.modules:
        gc.freeze()


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
