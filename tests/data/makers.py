"""Rows written in each format, and sources opened over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.model import ROLES, Data
from rldsl.runtime.data import Source, open_source
from tests.tiny import CHARACTERS, write_jsonl

EOS = 1
Rows = Sequence[Mapping[str, Any]]


def jsonl(folder: Path, rows: Rows) -> Path:
    return write_jsonl(folder / "d.jsonl", rows)


def parquet(folder: Path, rows: Rows) -> Path:
    """Two files in a directory, in row groups of three rows."""
    (folder / "d").mkdir()
    for name, part in (("b.parquet", rows[len(rows) // 2 :]), ("a.parquet", rows[: len(rows) // 2])):
        schema = pa.Table.from_pylist(list(rows)).schema
        pq.write_table(pa.Table.from_pylist(list(part), schema=schema), folder / "d" / name, row_group_size=3)
    return folder / "d"


def hf(folder: Path, rows: Rows) -> Path:
    """As `save_to_disk` does it, by the library itself."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list([dict(r) for r in rows]).save_to_disk(str(folder / "d"), num_shards=min(2, len(rows)))
    return folder / "d"


WRITERS: dict[str, Callable[[Path, Rows], Path]] = {"jsonl": jsonl, "parquet": parquet, "hf": hf}


def declared(path: Path | str, tokenizer: str, kind: Any = "prompts", **more: Any) -> Data:
    given = dict(name="d", format="jsonl", path=str(path), row_format=kind, batch=4, tokenizer=tokenizer,
                 columns=tuple((r, r) for r in ROLES[kind])) | more
    return Data(**given)


def opened(folder: Path, tokenizer: str, rows: Rows, kind: Any = "prompts", format: str = "jsonl", tells: bool = False,
           **more: Any) -> Source:
    given = dict(format=format, batch=len(rows), shuffle=False) | more
    return open_source(declared(WRITERS[format](folder, rows), tokenizer, kind, **given), 10, tells)


def wrong(data: Data) -> tuple[Diagnostic, ...]:
    """What is said about a source that cannot be opened, or whose first step cannot be read."""
    with pytest.raises(Failure) as caught:
        open_source(data, 10).step(0, 1)
    return caught.value.diagnostics


def text(tokens: Any) -> str:
    return "".join("$" if t == EOS else CHARACTERS[t - 2] for t in tokens.tolist())


def texts(source: Source, step: int = 0) -> dict[str, list[str]]:
    return {name: [text(t) for t in frame.tokens] for name, frame in source.step(step, 1).items()}
