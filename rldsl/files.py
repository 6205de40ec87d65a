"""Files of the user: reading plans, writing files so that none is lost, and the folder for what can be made again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from rldsl.diag import fail


def read_bytes(path: str) -> bytes:
    """The bytes of a plan file."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise fail("RL0091", f"no such file: {path}", place=path, help="use `rlc compile` to write a plan") from None
    except OSError as error:
        raise fail("RL0092", f"cannot read {path}: {error.strerror}", place=path) from None


def write(path: str, data: bytes, help: str = "choose another path with -o") -> None:
    """All or nothing: a file is never half written. A link stays a link, and a file keeps its mode. What is no file (a
    pipe, /dev/null) is written as it is, and never replaced. Error: RL0094."""
    if os.path.exists(path) and not os.path.isfile(path):
        _write_device(path, data, help)
        return
    file = Path(os.path.realpath(path))
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_bytes(data)
        if file.is_file():
            shutil.copymode(file, part)
        part.replace(file)
    except BaseException as error:
        with suppress(OSError):  # a read-only file system refuses this, too
            part.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise fail("RL0094", f"cannot write {path}: {error.strerror}", place=path, help=help) from None


def keep_inputs(target: str, inputs: Iterable[str | None], help: str = "choose another path with -o") -> None:
    """A command calls this before it works: its output must not replace a file that it reads. Error: RL0094."""
    for path in inputs:
        with suppress(OSError):  # one of them does not exist
            if path and os.path.samefile(path, target) and os.path.isfile(path):
                raise fail("RL0094", f"cannot write {target}: this command reads it", place=target, help=help)


def _write_device(path: str, data: bytes, help: str) -> None:
    try:
        with open(path, "wb") as stream:  # a directory is refused here
            stream.write(data)
    except OSError as error:
        raise fail("RL0094", f"cannot write {path}: {error.strerror}", place=path, help=help) from None


def with_digest(text: bytes) -> bytes:
    """A text below a line with its sha256, as files in the cache folder are kept."""
    return sha256(text).hexdigest().encode() + b"\n" + text


def without_digest(data: bytes) -> bytes | None:
    """The text of such a file; None if it has changed since it was written."""
    digest, _, text = data.partition(b"\n")
    return text if digest == sha256(text).hexdigest().encode() else None


def cache_folder() -> Path | None:
    """Where things are kept between starts that can be made again: `$RLDSL_CACHE`, else `rldsl` in the user's cache
    folder (XDG base directories). None with `RLDSL_CACHE=off`, or without a home."""
    named = os.environ.get("RLDSL_CACHE", "")
    if named:
        return None if named == "off" else Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "rldsl" if os.path.isabs(home) else None  # relative paths are to be ignored, it says
