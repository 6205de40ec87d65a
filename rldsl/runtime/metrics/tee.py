"""What a rank says on stderr goes to the screen and to `OUT/log/rank-N.log`.

In: text of this process's Python code; what libraries in C write goes to the screen alone. Out: both, at once, so that
nothing is lost when the process is killed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rldsl.diag import visible

COLOR = re.compile("(\x1b\\[[0-9;]{0,8}m)")  # one group: `split` returns the sequences, too


class Tee:
    """A text stream. screen: where its text was going; a live view replaces this stream."""

    def __init__(self, screen: TextIO, log: TextIO):
        self.screen = screen
        self.log: TextIO | None = log

    def write(self, text: str) -> int:
        """Control characters are escaped, but for ends of lines and the colors of our own messages."""
        shown = "".join(part if i % 2 else visible(part, "\n\t") for i, part in enumerate(COLOR.split(text)))
        self._log(lambda log: log.write(shown))
        self._on_screen(lambda screen: screen.write(shown))
        return len(text)

    def flush(self) -> None:
        self._log(lambda log: log.flush())
        self._on_screen(lambda screen: screen.flush())

    def _on_screen(self, work: Callable[[TextIO], object]) -> None:
        """Show something. Where nobody reads the output any more (its pipe is closed), the run continues in silence:
        its numbers and messages are in its files."""
        try:
            work(self.screen)
        except BrokenPipeError:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, self.screen.fileno())  # what is still in the stream's buffer goes there, too
            os.close(silence)

    def _log(self, work: Callable[[TextIO], object]) -> None:
        """Write to the log. A full disk ends the log, not the run: what writes the run's files reports it (RL0708)."""
        if self.log is None:
            return
        try:
            work(self.log)
        except OSError:
            log, self.log = self.log, None
            with suppress(OSError):
                log.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.screen, name)


def tee(screen: TextIO, out: Path, rank: int, again: bool) -> TextIO:
    """The stream to print on. again: the run is resumed, so its log is appended to. If the file cannot be made, this is
    the screen alone: the run itself will report why."""
    file = out / "log" / f"rank-{rank}.log"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        log = file.open("a" if again else "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError:
        return screen
    return Tee(screen, log)  # type: ignore[return-value]  # it forwards all that a stream has
