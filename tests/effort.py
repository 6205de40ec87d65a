"""How much work something is, counted, so that a busy or slow machine changes nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def without_collector() -> Iterator[None]:
    """Python's garbage collector waits: what it runs for the garbage of earlier tests, finalizers and callbacks of
    libraries, would be counted too, wherever it happens to begin."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def calls(work: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's."""
    count = 0

    def note(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    with without_collector():
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(before)
    return count


def lines(work: Callable[[], object]) -> int:
    """Lines of Python that are executed, and turns of comprehensions: for loops that call nothing. Some twenty times
    slower than the work itself."""
    count = 0

    def note(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return note

    before = sys.gettrace()
    with without_collector():
        sys.settrace(note)
        try:
            work()
        finally:
            sys.settrace(before)
    return count
