"""Opening the files of data sources, and checking whether they have changed.

Codes: RL0741 cannot be opened, RL0752 changed during the run, RL0754 another format.
"""

from __future__ import annotations

import codecs
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rldsl.diag import Failure, fail
from rldsl.plan.disk_paths import in_kernel_files

# what files begin with that are not text: bytes, what the file is, how to get text or rows from it
_KINDS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "compressed with gzip", "decompress it first: `gunzip -k {path}`"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it first: `zstd -dk {path}`"),
    (b"BZh", "compressed with bzip2", "decompress it first: `bunzip2 -k {path}`"),
    (b"\xfd7zXZ\x00", "compressed with xz", "decompress it first: `xz -dk {path}`"),
    (b"\x04\x22\x4d\x18", "compressed with lz4", "decompress it first: `lz4 -d {path}`"),
    (b"PK\x03\x04", "a zip archive", "unpack it first: `unzip {path}`"),
    (b"PAR1", "a Parquet file", "read it with `parquet(...)`"),
    (b"ARROW1", "an Arrow file", "save it as JSON lines or Parquet; directories of the `datasets` library are read "
                                 "with `hf(...)`"),
    (codecs.BOM_UTF32_LE, "UTF-32 text", "convert it to UTF-8: `iconv -f UTF-32 -t UTF-8 {path}`"),  # before UTF-16
    (codecs.BOM_UTF16_LE, "UTF-16 text", "convert it to UTF-8: `iconv -f UTF-16 -t UTF-8 {path}`"),
    (codecs.BOM_UTF16_BE, "UTF-16 text", "convert it to UTF-8: `iconv -f UTF-16 -t UTF-8 {path}`"),
    (b"{\0", "UTF-16 text", "convert it to UTF-8: `iconv -f UTF-16LE -t UTF-8 {path}`"),
    (b"\0{", "UTF-16 text", "convert it to UTF-8: `iconv -f UTF-16BE -t UTF-8 {path}`"),
)


Stamp = tuple[int, int]  # size and time of a file


def no_such(path: str, what: str = "data file") -> Failure:
    if Path(path).is_symlink():
        return fail("RL0741", f"no such {what}: this symbolic link is broken", place=path,
                    notes=(f"it points to {os.readlink(path)}",), help="link to an existing one, or give its own path")
    if any(c in Path(path).name for c in "*?["):
        return fail("RL0741", f"no such {what}", place=path,
                    help="patterns are not expanded: concatenate JSON lines into one file, or give the directory of "
                         "Parquet files to `parquet(...)`")
    folder = Path(path).parent
    siblings = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    near = get_close_matches(Path(path).name, siblings, n=1)
    return fail("RL0741", f"no such {what}", place=path, help=f"did you mean `{folder / near[0]}`?"
                if near else "paths are relative to the working directory")


def open_file(path: str) -> Any:
    """A regular file for reading: a pipe would block, and cannot be read by position."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise fail("RL0741", "this data file cannot be opened: it is a directory", place=path,
                       help=f"give a file in it{_reader(Path(path))}")
        if not stat.S_ISREG(mode) or in_kernel_files(os.path.realpath(path)):
            raise fail("RL0741", "this data file cannot be opened: it is not a regular file", place=path,
                       help="rows are read by byte offset; save them to a regular file first")
        return open(path, "rb")
    except FileNotFoundError:
        raise no_such(path) from None
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        raise fail("RL0741", f"this data file cannot be opened: {_reason(error)}", place=path) from None


@contextmanager
def read_file(path: str) -> Iterator[Any]:
    """The same, for a block that reads it: an error of the disk has a code, too. What Arrow reads is another matter,
    because it reports damaged data as errors of the system."""
    with open_file(path) as file:
        try:
            yield file
        except OSError as error:
            raise fail("RL0741", f"this data file cannot be read: {_reason(error)}", place=path,
                       help="check the disk, or copy the file to another one") from None


def refuse_other_format(file: Any, path: str, wanted: str) -> None:
    """RL0754 if the first bytes of an open file show that it is something else than `wanted`. The file is then at its
    begin again. wanted: as in the message, "JSON lines", "Parquet", "an Arrow stream"."""
    start = file.read(8)
    file.seek(0)
    for sign, kind, advice in _KINDS:
        if start.startswith(sign):
            if wanted not in kind:
                raise fail("RL0754", f"this file is {kind}, not {wanted}", place=path,
                           help=advice.format(path=shlex.quote(path)))
            return


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _reader(folder: Path) -> str:
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return f", or read it with `hf(\"{folder}\")`"
    return f", or read it with `parquet(\"{folder}\")`" if any(folder.rglob("*.parquet")) else ""


def file_stamp(descriptor: int) -> Stamp:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def file_changed(path: str) -> Failure:
    return fail("RL0752", "this data file changed during the run", place=path,
                help="do not change it while a run reads it; start the run again")
