"""A large file is never held: a rank keeps the places of its rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.forked import command
from tests.samples import thorough_between

ROWS, MB = 100_000, 1 << 20

MEASURED = """
import sys, time
import torch, transformers, numpy
import pyarrow, pyarrow.parquet
from rldsl.runtime.data import open_source
from tests.data.makers import declared

def own():  # bytes of memory that are this process's own: not pages of mapped files
    status = open("/proc/self/status").read()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

import threading
peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, own())
        time.sleep(0.001)
format, path, tokenizer, over_long = sys.argv[1:]
pyarrow.parquet.read_schema(path) if format == "parquet" else None
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(tokenizer)("1+1=")
before = own()
thread = threading.Thread(target=watch); thread.start()
source = open_source(declared(path, tokenizer, "answers", format=format, batch=64, over_long=over_long), 10)
assert len(source.table) == 100_000
for step in range(3):
    source.step(step, 1)
    source.columns(step, 1)
done = True; thread.join()
print(peak - before)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 MB of rows in three formats; few tokens each, so that a tokenizer is quick with them."""
    folder = tmp_path_factory.mktemp("large")
    pad = "lorem ipsum " * 78
    with (folder / "d.jsonl").open("w") as file:
        for i in range(ROWS):
            file.write(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1), "notes": f"{i} {pad}"}) + "\n")
    table = pa.table({"prompt": [f"{i}+1=" for i in range(ROWS)], "answer": [str(i + 1) for i in range(ROWS)],
                      "notes": [f"{i} {pad}" for i in range(ROWS)]})
    pq.write_table(table, folder / "d.parquet", row_group_size=ROWS // 4)
    (folder / "d").mkdir()
    with pa.OSFile(str(folder / "d/x.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    (folder / "d/state.json").write_text('{"_data_files": [{"filename": "x.arrow"}]}')
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("format, name, over_long, most", thorough_between([
    ("jsonl", "d.jsonl", "drop", 24), ("hf", "d", "truncate", 24),
    ("parquet", "d.parquet", "truncate", 80),  # one row group of 25 MB is decoded at a time
]))
def test_a_large_file_is_not_held(folder: Path, tokenizer: str, format: str, name: str, over_long: str,
                                  most: int) -> None:
    (folder / "measured.py").write_text(MEASURED)
    run = command(str(folder / "measured.py"), format, str(folder / name), tokenizer, over_long)
    assert run.returncode == 0, run.stderr
    assert (folder / "d.jsonl").stat().st_size > 95 * MB
    assert int(run.stdout) < most * MB, f"{int(run.stdout) / MB:.1f} MB"


def test_the_index_has_few_bytes_a_row(folder: Path) -> None:
    from rldsl.runtime.data import jsonl
    from rldsl.runtime.data.row_schema import RowNeeds

    table = jsonl.scan(str(folder / "d.jsonl"), RowNeeds({"prompt": "prompt"})).table
    assert isinstance(table, jsonl.JsonLines)
    assert sys.getsizeof(table.offsets) + sys.getsizeof(table.blanks) < 10 * ROWS
