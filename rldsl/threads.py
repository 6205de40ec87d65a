"""Threads that the system refuses to start, where a limit of the user, of the container or of memory is reached.

In: a thread to start, or an exception. Out: RL0707, which says what to raise. Python's own message, "can't start new
thread", comes with a traceback and names no limit.
"""

from __future__ import annotations

import errno
import threading
from types import TracebackType

from rldsl.diag import Diagnostic, Failure

# in what Python and the C++ library say
WORDS = ("can't start new thread", "can't allocate lock", "resource temporarily unavailable")
STARTS = ("_execute_child", "_launch", "fork")  # functions that start a process, of `subprocess` and `multiprocessing`
ADVICE = ("raise the limits of the shell that starts it (`ulimit -u` and `ulimit -v`; `ulimit -s` is the memory of "
          "each thread) or of the container, or start fewer processes at once")


def start(thread: threading.Thread, who: str = "this process") -> None:
    """Start a thread. who: whose it is, for the message. Errors: RL0707."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not is_refused(error):
            raise
        raise Failure([refused(who)]) from None


def is_refused(error: BaseException) -> bool:
    """Whether an exception says that no thread or process can be started."""
    if isinstance(error, RuntimeError):
        return str(error).strip().lower() in WORDS
    return isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOMEM) and _in_a_start(
        error.__traceback__)


def _in_a_start(trace: TracebackType | None) -> bool:
    """Whether an exception comes from the start of a process. EAGAIN means something else elsewhere."""
    while trace is not None:
        if trace.tb_frame.f_code.co_name in STARTS:
            return True
        trace = trace.tb_next
    return False


def refused(who: str, place: str = "") -> Diagnostic:
    """RL0707. place: where in the program it was."""
    return Diagnostic("RL0707", f"{who} may start no more threads or processes", place=place, help=ADVICE)
