"""What a rank says on stderr goes to the screen and to `OUT/log/rank-N.log`.

In: text of this process's Python code; what libraries in C write goes to the screen alone. Out: both, at once, so that
nothing is lost when the process ends without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO


class Tee:
    """A text stream. screen: where it was going; a live view puts itself in its place."""

    def __init__(self, screen: TextIO, log: TextIO):
        self.screen, self.log = screen, log

    def write(self, text: str) -> int:
        self.log.write(text)
        return self.screen.write(text)

    def flush(self) -> None:
        self.log.flush()
        self.screen.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.screen, name)


def tee(screen: TextIO, out: Path, rank: int, again: bool) -> TextIO:
    """The stream to say things on. again: the run goes on, and so does its log. Where the file cannot be made, the
    screen: the run itself finds out, and says so."""
    file = out / "log" / f"rank-{rank}.log"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        log = file.open("a" if again else "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError:
        return screen
    return Tee(screen, log)  # type: ignore[return-value]
