"""Where the main thread of a rank is in Python. In: a thread, or an exception. Out: its lines, and the operation
between ranks that it is in."""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType

MAX_LINES = 24
# modules by their names: health does not load torch
SHARED_MEMORY = "rldsl.runtime.shared_memory"
COLLECTIVES = ("rldsl.runtime.collectives", SHARED_MEMORY)


@dataclass(frozen=True, slots=True)
class Stack:
    """Where a thread is."""

    call: str = ""               # the operation between ranks that the innermost line is in; "": none
    lines: tuple[str, ...] = ()  # "FILE:LINE FUNCTION", innermost last


def of_main(all_lines: bool = True) -> Stack:
    """The stack of the main thread now. all_lines: False finds the call alone, which is quicker."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return Stack()
    return _stack([*traceback.walk_stack(frame)][::-1] if all_lines else [(frame, frame.f_lineno)])


def of_error(trace: TracebackType | None) -> Stack:
    """Where an exception was raised. What lies above the place that caught it is the same on all ranks."""
    return _stack(list(traceback.walk_tb(trace)))


def _stack(steps: Sequence[tuple[FrameType, int | None]]) -> Stack:
    """steps: (frame, line) from the outermost to the innermost; a frame between two lines has no line number."""
    if not steps:
        return Stack()
    frame, line = steps[-1]
    waits = ".wait(" in linecache.getline(frame.f_code.co_filename, line or 0)
    call = _collective(frame) if _is_of_torch(frame) or _module(frame) == SHARED_MEMORY else "wait" if waits else ""
    return Stack(call, tuple(f"{f.f_code.co_filename}:{n or 0} {f.f_code.co_name}" for f, n in steps[-MAX_LINES:]))


def _is_of_torch(frame: FrameType) -> bool:
    return "/torch/distributed/" in frame.f_code.co_filename.replace("\\", "/")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _collective(frame: FrameType) -> str:
    """What was asked for: an `all_reduce` of ours may be an exchange of torch.distributed, or go through shared memory
    as an operator of torch. frame: in there."""
    name, outer = frame.f_code.co_name, frame.f_back
    while outer is not None and (_is_of_torch(outer) or _module(outer) in (*COLLECTIVES, "torch._ops")):
        if _module(outer) in COLLECTIVES:
            name = outer.f_code.co_name
        outer = outer.f_back
    return name
