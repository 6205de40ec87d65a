"""Parquet: one file, or all `*.parquet` files under a directory in the order of their names. As in Arrow and Spark, a
name that starts with `.` or `_` hides a file, and a directory with all that is in it: `_temporary` holds the unfinished
output of a job.

Parquet cannot be read by row, so it is decoded once, in pieces, into a nameless temporary file in Arrow's own format,
which is mapped and is gone when the process ends.
Codes: RL0741 no such file, RL0742 a directory without one, RL0758 no room for the temporary file, and those of
`arrow.py`.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rldsl.diag import Failure, fail
from rldsl.runtime.data.arrow import check_files, import_arrow, one_schema, readable, table_of
from rldsl.runtime.data.data_files import no_such, open_file, refuse_other_format
from rldsl.runtime.data.row_schema import RowNeeds, ScannedFile

ROWS = 1024  # in a record batch of the temporary file


def scan(path: str, needs: RowNeeds) -> ScannedFile:
    """Read and check all rows once. Raises a Failure with the first errors, each with its file and row."""
    pa = import_arrow(path)
    import pyarrow.parquet as pq

    def batches(file: str) -> Iterator[Any]:
        with open_file(file) as opened:
            yield from pq.ParquetFile(opened, pre_buffer=False).iter_batches(batch_size=ROWS)

    files, schemas = files_of(path), []
    for file in files:
        with open_file(file) as opened, readable(file, "file"):
            refuse_other_format(opened, file, "Parquet")
            schemas.append(pq.read_schema(opened))
    schema = one_schema(files, schemas)
    with tempfile.TemporaryFile() as temporary:
        try:
            writer = pa.ipc.new_stream(temporary, schema)
            check, parts = check_files(path, files, schema, needs, batches, _writing(writer, path), stamped=False)
            writer.close()
            temporary.flush()
        except OSError as error:
            raise _no_room(path, error) from None
        mapped = mmap.mmap(temporary.fileno(), 0, access=mmap.ACCESS_READ)
    return check.finish(table_of(list(pa.ipc.open_stream(pa.py_buffer(mapped))), parts))


def _writing(writer: Any, path: str) -> Any:
    def write(batch: Any) -> None:
        try:
            writer.write_batch(batch)
        except OSError as error:
            raise _no_room(path, error) from None

    return write


def _no_room(path: str, error: OSError) -> Failure:
    return fail("RL0758", f"the rows cannot be written to the temporary directory: {error.strerror or error}",
                place=path, notes=(f"temporary directory: {tempfile.gettempdir()}",),
                help="free disk space there, or set TMPDIR to a directory with enough space for the rows in Arrow "
                     "format")


def files_of(path: str) -> list[str]:
    """The files that hold the rows, in order."""
    if not Path(path).exists():
        raise no_such(path)
    if not Path(path).is_dir():
        return [path]
    files = sorted(str(f) for f in Path(path).rglob("*.parquet") if f.is_file()
                   and not any(part.startswith((".", "_")) for part in f.relative_to(path).parts))
    if not files:
        saved = any((Path(path) / name).exists() for name in ("state.json", "dataset_dict.json"))
        raise fail("RL0742", "this directory has no Parquet files", place=path,
                   help=f"read it with `hf(\"{path}\")`" if saved else "their names end in `.parquet`")
    return files
