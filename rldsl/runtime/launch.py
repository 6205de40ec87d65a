"""torchrun on this machine, without its traceback when a rank fails: the rank itself has said what went wrong.

In: the arguments of torchrun. Out: the exit status of the first rank that failed, else 0. SIGTERM goes to the ranks,
which end by themselves (a run with checkpoints after writing one), instead of ending torchrun first.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path


def main(arguments: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if _can_forward():
        signal.signal(signal.SIGTERM, lambda *_: _forward_signal(os.getpid()))
        arguments = ["--signals_to_handle", "SIGINT,SIGHUP,SIGQUIT", *arguments]
    logging.disable(logging.CRITICAL)  # of this process alone: the ranks speak for themselves
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        code = min(error.failures.values(), key=lambda f: f.timestamp).exitcode
        return code if code > 0 else 1
    except KeyboardInterrupt:
        return 130
    return 0


def _can_forward() -> bool:
    """Whether this torchrun leaves SIGTERM to us, and this system tells who our children are."""
    from torch.distributed.launcher.api import LaunchConfig

    return any(f.name == "signals_to_handle" for f in fields(LaunchConfig)) and _children(os.getpid()) is not None


def _children(pid: int) -> list[int] | None:
    try:
        lists = [(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return None
    return [int(child) for found in lists for child in found]


def _forward_signal(pid: int) -> None:
    for child in _children(pid) or ():
        try:
            os.kill(child, signal.SIGTERM)
        except ProcessLookupError:  # it has just ended
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
