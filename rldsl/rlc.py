"""Where the command `rlc` begins: Ctrl-C ends it with one line while Python still imports the rest of it.

The command line itself is `rldsl.cli`, which handles Ctrl-C from there on.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from rldsl import garbage_collection
from rldsl.output_format import EARLY_INTERRUPTION, json_requested


def main() -> None:
    """Run the command line, and end the process with it. Exit status 130 after Ctrl-C."""
    garbage_collection.collect_rarely()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell has it ignored
        signal.signal(signal.SIGINT, _end)
    with garbage_collection.ending_quickly():
        from rldsl.cli import main

        main(prog_name="rlc")


def _end(_number: int, _frame: FrameType | None) -> None:
    if json_requested(sys.argv[1:]):
        os.write(1, EARLY_INTERRUPTION.encode())
    else:
        os.write(2, b"interrupted; to start again, repeat the command\n")
    os._exit(128 + signal.SIGINT)  # as a shell reports it
