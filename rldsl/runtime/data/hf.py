"""Directories that `Dataset.save_to_disk` of HuggingFace's `datasets` library writes: Arrow streams, mapped where they
lie. The library itself is not needed; nothing is downloaded and nothing of the directory is run.

Codes: RL0741 no such directory, RL0742 no files, RL0754 no such dataset, and those of `arrow.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rldsl.diag import fail
from rldsl.runtime.data.arrow import check_files, import_arrow, one_schema, readable, table_of
from rldsl.runtime.data.data_files import no_such, read_file, refuse_other_format
from rldsl.runtime.data.row_schema import RowNeeds, ScannedFile

END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream


def scan(path: str, needs: RowNeeds) -> ScannedFile:
    """Read and check all rows once. Raises a Failure with the first errors, each with its file and row."""
    pa = import_arrow(path)

    def batches(file: str) -> Iterator[Any]:
        yield from pa.ipc.open_stream(pa.memory_map(file))

    files, schemas = files_of(path), []
    for file in files:
        _ends(file)
        with readable(file, "file"):
            schemas.append(pa.ipc.open_stream(pa.memory_map(file)).schema)
    kept: list[Any] = []
    check, parts = check_files(path, files, one_schema(files, schemas), needs, batches, kept.append, stamped=True)
    return check.finish(table_of(kept, parts))


def _ends(file: str) -> None:
    """RL0754 if the file is something else, or if a stream has no end: one that was cut off between two batches would
    be read as a shorter one."""
    with read_file(file) as opened:
        refuse_other_format(opened, file, "an Arrow stream")
        opened.seek(max(0, opened.seek(0, 2) - len(END)))
        if opened.read() != END:
            raise fail("RL0754", "this file is truncated", place=file, help="write the dataset again")


def files_of(path: str) -> list[str]:
    """The files that hold the rows, in order."""
    folder = Path(path)
    if not folder.exists():
        raise no_such(path, "data directory")
    if (folder / "dataset_dict.json").exists():
        splits = sorted(p.parent.name for p in folder.glob("*/state.json"))
        raise fail("RL0754", f"this directory contains several datasets: {', '.join(splits)}", place=path,
                   help=f"choose one: `hf(\"{folder / splits[0]}\")`" if splits else "give the directory of one")
    if not (folder / "state.json").is_file():
        parquet = folder.is_dir() and any(folder.rglob("*.parquet"))
        raise fail("RL0754", "not a directory of the `datasets` library: it has no `state.json`", place=path,
                   help=f"read it with `parquet(\"{path}\")`" if parquet else "write one with "
                                                                              "`dataset.save_to_disk(...)`")
    again = "write the dataset again with `dataset.save_to_disk(...)`"
    try:
        state = json.loads((folder / "state.json").read_bytes())
        names = [item["filename"] for item in state["_data_files"]]
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        raise fail("RL0754", "this file does not list the files of a dataset", place=f"{path}/state.json",
                   help=again) from None
    if not all(isinstance(n, str) and Path(n).name == n not in ("", "..") for n in names):
        raise fail("RL0754", "this file lists files outside its directory", place=f"{path}/state.json", help=again)
    if not names:
        raise fail("RL0742", "this dataset is empty", place=path, help="save a dataset that has rows")
    return [str(folder / n) for n in names]
