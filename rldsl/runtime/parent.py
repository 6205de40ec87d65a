"""No process of a run outlives the one that started it: a rank ends with torchrun's agent, the agent with `rlc run`.

A process that is killed (SIGKILL, out of memory) cannot end what it started, and a rank needs its agent for nothing
once it has joined the others: it would work on, unseen, and hold the run's directory.
In: the id of the parent process. Out: SIGTERM to this process within `PERIOD` seconds of the parent's end.
Invariant: this holds from the first line of a process, so also while it imports torch or waits for others. It does not
matter which thread of the parent started this process, as it would for Linux's PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from rldsl import threads

PERIOD = 0.5  # seconds between looks


def has_ended(parent: int) -> bool:
    """Whether the process that started this one is gone: the system has given this one another parent."""
    return os.getppid() != parent


def terminate_with(parent: int) -> None:
    """Send SIGTERM to this process once `parent`, which started it, has ended. Errors: RL0707."""
    threads.start(threading.Thread(target=_terminate, args=(parent,), name="rldsl-parent", daemon=True))


def _terminate(parent: int) -> None:
    while not has_ended(parent):
        time.sleep(PERIOD)
    os.kill(os.getpid(), signal.SIGTERM)
