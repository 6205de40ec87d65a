"""The three formats give the same rows, batches and places."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.runtime.data import open_source
from rldsl.runtime.data.source import permutation
from rldsl.sharding import partition
from tests.data.makers import WRITERS, declared, opened, texts

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i % 3, "tags": ["x"] * (i % 2)} for i in range(11)]
FORMATS = list(WRITERS)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_come_in_order_with_all_their_columns(tmp_path: Path, tokenizer: str, format: str) -> None:
    source = opened(tmp_path, tokenizer, ROWS, "answers", format, batch=4, numbers=("level",))
    assert texts(source, 1) == {"": [f"{i}+1={i + 1}$" for i in (4, 5, 6, 7)]}
    assert source.columns(1, 1) == ROWS[4:8] and source.passes == 5.0 and source.note == ""


def test_batches_are_the_same_in_every_format(tmp_path: Path, tokenizer: str) -> None:
    seen = []
    for format in FORMATS:
        (tmp_path / format).mkdir()
        source = opened(tmp_path / format, tokenizer, ROWS, "answers", format, batch=3, shuffle=True)
        seen.append([source.columns(step, 7) for step in range(8)])
    assert seen[0] == seen[1] == seen[2]
    assert len({tuple(row["prompt"] for rows in seen[0][:3] for row in rows)}) == 1  # of one epoch, without its tail


@pytest.mark.parametrize("format, places", [
    ("jsonl", ["d.jsonl:1", "d.jsonl:11"]), ("parquet", ["d/a.parquet:1", "d/b.parquet:6"]),
    ("hf", ["d/data-00000-of-00002.arrow:1", "d/data-00001-of-00002.arrow:5"]),
])
def test_a_place_is_a_file_and_a_row_in_it(tmp_path: Path, tokenizer: str, format: str, places: list[str]) -> None:
    table = opened(tmp_path, tokenizer, ROWS, "prompts", format).table
    assert [table.place(0), table.place(10)] == [f"{tmp_path}/{p}" for p in places]


def test_one_parquet_file_and_directories_below(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "d" / "x").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(ROWS[:4]), tmp_path / "d" / "x" / "1.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[4:8]), tmp_path / "d" / "y.parquet")
    (tmp_path / "d" / "notes.txt").write_text("not data")
    one = open_source(declared(tmp_path / "d/y.parquet", tokenizer, format="parquet", shuffle=False), 1)
    all_ = open_source(declared(tmp_path / "d", tokenizer, format="parquet", shuffle=False, batch=8), 1)
    assert one.columns(0, 1) == ROWS[4:8] and all_.columns(0, 1) == ROWS[:8]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()], ids=str)
def test_other_types_of_text(tmp_path: Path, tokenizer: str, kind: pa.DataType) -> None:
    table = pa.table({"prompt": pa.array(["1+1=", "2+2=", "1+1=", "3+3="]).cast(kind)})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=1)
    source = open_source(declared(tmp_path / "d.parquet", tokenizer, format="parquet", shuffle=False), 1)
    assert texts(source) == {"": ["1+1=", "2+2=", "1+1=", "3+3="]}


def test_a_file_without_rows_among_others(tmp_path: Path, tokenizer: str) -> None:
    whole = pa.Table.from_pylist(ROWS[:4])
    for name, part in (("a", whole), ("b", whole.slice(0, 0)), ("c", whole)):
        pq.write_table(part, tmp_path / f"{name}.parquet")
    source = open_source(declared(tmp_path, tokenizer, format="parquet", shuffle=False, batch=8), 1)
    assert source.columns(0, 1) == [*ROWS[:4], *ROWS[:4]] and source.table.place(4).endswith("c.parquet:1")


def test_lines_longer_than_a_block_and_blank_ones(tmp_path: Path, tokenizer: str,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rldsl.runtime.data.jsonl.BLOCK", 64)
    rng = random.Random(1)
    lines, rows = [], []
    for i in range(200):
        blank = rng.random() < 0.3
        lines.append("  " * rng.randrange(2) if blank else '{"prompt": "' + "1" * rng.randrange(1, 300) + '"}')
        if not blank:
            rows.append(i + 1)
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    source = open_source(declared(tmp_path / "d.jsonl", tokenizer, batch=1, shuffle=False), 1)
    assert [source.table.place(i) for i in range(len(source.table))] == [f"{tmp_path}/d.jsonl:{n}" for n in rows]
    assert [r["prompt"] for r in source.table.read(range(len(rows)))] == [lines[n - 1][12:-2] for n in rows]


@given(st.integers(0, 400), st.integers(0, 2**63), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_the_order_of_an_epoch_is_that_of_the_plan(n: int, seed: int, epoch: int) -> None:
    assert tuple(permutation(n, seed, epoch).tolist()) == partition.permutation(n, seed, epoch)


def test_the_order_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rldsl.runtime.data.source._BLOCK", 7)
    found = permutation(1000, 3, 1)
    assert tuple(found.tolist()) == partition.permutation(1000, 3, 1) and found.dtype == np.int64
