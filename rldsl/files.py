"""Writing files so that a user never loses one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rldsl.diag import fail


def write(path: str, data: bytes, help: str = "choose another path with -o") -> None:
    """All or nothing: a file is never half written. A link stays a link, and a file keeps its mode. Error: RL0094."""
    file = Path(os.path.realpath(path))
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_bytes(data)
        if file.is_file():
            shutil.copymode(file, part)
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise fail("RL0094", f"cannot write {path}: {error.strerror}", place=path, help=help) from None
