"""What is known of models from earlier, so that transformers need not be imported to describe them again.

In: what a description depends on. Out: the description, from the user's cache folder or made now and kept there.
Invariant: an entry is named by the sha256 of all that its value depends on (config.json, the head, the names of the
tensors, the versions of transformers and torch, and the sources of this package), and begins with the sha256 of its
own bytes. So a changed model or library finds no entry, and a damaged entry is made again. Entries are written to a
temporary file first and then renamed, so concurrent writers do not meet. A cache that cannot be read or written is
as good as none. Environment: `RLDSL_CACHE` names another folder, and `RLDSL_CACHE=off` keeps nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from rldsl.diag import Failure
from rldsl.files import cache_folder, with_digest, without_digest
from rldsl.plan import codec
from rldsl.plan.codec import plain_record, read_record

Record = TypeVar("Record")
MAX_ENTRIES = 512  # when there are more, the oldest go


def entry_key(*parts: str) -> str:
    """The name of the entry whose value depends on `parts`, on the libraries and on this package."""
    return sha256(json.dumps([_maker(), *parts]).encode()).hexdigest()


def cached_record(cls: type[Record], key: str, make: Callable[[], Record]) -> Record:
    """The record kept under `key`, or the one that `make` returns, which is then kept. Errors: those of `make`."""
    folder = cache_folder()
    if folder is None:
        return make()
    file = folder / "models" / f"{key}.json"
    with suppress(OSError, ValueError, Failure, RecursionError):
        data = file.read_bytes() if file.is_file() else b""  # a pipe or a device might never end
        if (text := without_digest(data)) is not None:
            return read_record(cls, json.loads(text), str(file))
    made = make()
    with suppress(OSError, ValueError):
        _write(file, json.dumps(plain_record(made), separators=(",", ":")).encode())
    return made


def _write(file: Path, text: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".new-", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(with_digest(text))
        os.replace(name, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    _prune(file.parent)


def _prune(folder: Path) -> None:
    """Drop the oldest entries of a folder that has grown; another process may drop the same ones."""
    entries = list(folder.glob("*.json"))
    if len(entries) <= MAX_ENTRIES:
        return
    ages: list[tuple[float, Path]] = []
    for entry in entries:
        with suppress(OSError):
            ages.append((entry.stat().st_mtime, entry))
    for _, entry in sorted(ages)[: len(entries) - MAX_ENTRIES]:
        with suppress(OSError):
            entry.unlink()


@cache
def _maker() -> list[str]:
    """What makes descriptions: the libraries, and the sources of this package and of the records."""
    records = Path(codec.__file__).parent
    files = [*sorted(Path(__file__).parent.glob("*.py")),
             *(records / f"{name}.py" for name in ("codec", "parameters", "module_costs"))]
    sources = sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    return [sources, *(_version(name) for name in ("transformers", "torch"))]


def _version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} none"
