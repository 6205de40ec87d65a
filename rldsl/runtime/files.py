"""The files of a run: an operating system's refusal becomes a message; what a file holds has a digest.

In: a path. Invariant: what can be found out before the first step is found out then, and leaves nothing behind.
Errors: RL0708 the file cannot be written.
"""

from __future__ import annotations

import os
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
                   help="check the path, its permissions and the free disk space") from None


def check_writable(file: Path) -> None:
    """Whether `file` could be written now; its contents stay, and it leaves no new file behind."""
    with written(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        new = not file.exists()
        file.open("a").close()
        if new:
            file.unlink()


def replace_text(file: Path, text: str) -> None:
    """Write a file that is whole under its name, or as it was: beside it, to the disk, then renamed. What is no file
    (a pipe, /dev/null) is written as it is. OSError."""
    file = file.resolve()  # a link stays a link
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")
        return
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        os.replace(partial, file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Until it is on the disk: a crash of the machine must not leave a name without its bytes. Of a directory, its
    names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(file: Path) -> str:
    """sha256 of the bytes, in hexadecimal."""
    whole = sha256()
    with file.open("rb") as opened:
        while part := opened.read(1 << 22):
            whole.update(part)
    return whole.hexdigest()
