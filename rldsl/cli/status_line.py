"""The line on a terminal that shows what a command is doing, for commands that take more than a moment.

In: stages of work (`rldsl/progress.py`). Out: one line on standard error, redrawn in place and removed before anything
else is printed; nothing at all where standard error is not a terminal.
"""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from rldsl.progress import Stage

DELAY, PERIOD = 0.5, 0.2  # seconds before the line appears, and between two drawings of it
ERASE = "\r\x1b[K"


class StatusLine:
    """A context manager, and the listener of stages inside its block. stage: the newest one, also where nothing is
    drawn."""

    def __init__(self, stream: TextIO, drawn: bool):
        """stream: where to draw. drawn: False if it is not a terminal."""
        self.stage: Stage | None = None
        self._stream, self._drawn, self._begun = stream, drawn, time.monotonic()
        self._lock, self._ended, self._visible = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._redraw, name="rlc-status", daemon=True)

    def __call__(self, stage: Stage) -> None:
        self.stage = stage
        if not stage.text:
            self.clear()

    def __enter__(self) -> StatusLine:
        if self._drawn:
            with suppress(RuntimeError):  # the system gives no more threads: the command works without a line
                self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Remove the line for good: others write to the terminal from now on."""
        self._ended.set()
        self.clear()

    def clear(self) -> None:
        """Remove the line, so that something else can be printed; it comes back with the next drawing."""
        with self._lock:
            if self._visible:
                self._stream.write(ERASE)
                self._stream.flush()
                self._visible = False

    def _redraw(self) -> None:
        self._ended.wait(DELAY)
        while not self._ended.is_set():
            with self._lock:
                if self.stage is not None and self.stage.text and not self._ended.is_set():
                    text = f"{self.stage}, {time.monotonic() - self._begun:.0f} s"
                    self._stream.write(ERASE + text[: shutil.get_terminal_size().columns - 1])
                    self._stream.flush()
                    self._visible = True
            self._ended.wait(PERIOD)
