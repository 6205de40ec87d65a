"""The files of a run: an operating system's refusal becomes a message; what a file holds has a digest.

In: a path. Invariant: what can be found out before the first step is found out then, and leaves nothing behind.
Errors: RL0708 the file cannot be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from rldsl.diag import fail


@contextmanager
def written(file: Path) -> Iterator[None]:
    """Around whatever writes `file`."""
    try:
        yield
    except OSError as error:
        raise fail("RL0708", f"the file cannot be written: {error.strerror or error}", place=str(file),
                   help="check the path, its permissions and the space left") from None


def check_writable(file: Path) -> None:
    """Whether `file` could be written now; its contents stay, and no new file does."""
    with written(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        new = not file.exists()
        file.open("a").close()
        if new:
            file.unlink()


def digest(file: Path) -> str:
    """sha256 of the bytes, in hexadecimal."""
    whole = sha256()
    with file.open("rb") as opened:
        while part := opened.read(1 << 22):
            whole.update(part)
    return whole.hexdigest()
