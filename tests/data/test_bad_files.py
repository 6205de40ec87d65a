"""Files and directories that cannot be read: each says the code, the file and row, and how to mend it."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.runtime.data import open_source
from tests.data.makers import declared, hf, parquet, wrong
from tests.forked import command

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": float(i)} for i in range(8)]
FORMATS = {"parquet": parquet, "hf": hf}


def one(data: Any) -> Diagnostic:
    (found,) = wrong(data)
    return found


TEXT = b'{"prompt": "1+1=", "answer": "2"}\n'
OTHERS = {  # what a file is, and what its message must advise
    "gzip": (gzip.compress(TEXT), "gunzip -k"), "bzip2": (bz2.compress(TEXT), "bunzip2 -k"),
    "xz": (lzma.compress(TEXT), "xz -dk"), "zstd": (b"\x28\xb5\x2f\xfd\x04\x00" + TEXT, "zstd -dk"),
    "lz4": (b"\x04\x22\x4d\x18\x64\x40" + TEXT, "lz4 -d"), "zip": (b"PK\x03\x04" + TEXT, "unzip"),
    "UTF-16": (TEXT.decode().encode("utf-16"), "iconv -f UTF-16 "), "UTF-32": (TEXT.decode().encode("utf-32"), "iconv"),
    "UTF-16 text": (TEXT.decode().encode("utf-16-le"), "iconv -f UTF-16LE"),
    "UTF-16 text, not": (TEXT.decode().encode("utf-16-be"), "iconv -f UTF-16BE")}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("format", ["jsonl", "parquet", "hf"])
def test_a_compressed_file_or_another_encoding(format: str, kind: str, tmp_path: Path) -> None:
    data, advice = OTHERS[kind]
    place = tmp_path / "my rows"
    if format == "hf":
        place.mkdir()
        (place / "state.json").write_text(json.dumps({"_data_files": [{"filename": "x.arrow"}]}))
        (place / "x.arrow").write_bytes(data)
    else:
        place.write_bytes(data)
    found = one(declared(place, "", format=format))
    assert found.code == "RL0754" and kind in found.title and advice in found.help and "my rows" in found.help, found


def table(folder: Path, format: str, columns: dict[str, pa.Array]) -> Path:
    """One file with columns that no list of dicts makes."""
    made = pa.table(columns)
    if format == "parquet":
        pq.write_table(made, folder / "d.parquet")
        return folder / "d.parquet"
    (folder / "d").mkdir()
    with pa.OSFile(str(folder / "d" / "x.arrow"), "wb") as sink, pa.ipc.new_stream(sink, made.schema) as writer:
        writer.write_table(made)
    (folder / "d" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "x.arrow"}]}))
    return folder / "d"


PROMPTS = pa.array(["1+1="] * 5)

COLUMNS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str]] = {  # columns, options, code, row, words
    "missing": ({"promt": PROMPTS, "id": PROMPTS}, {}, "RL0746", "", "the column `prompt` is missing"),
    "missing_number": ({"prompt": PROMPTS, "lable": PROMPTS}, {"numbers": ("label",)}, "RL0746", "",
                       "`label` is missing"),
    "number": ({"prompt": pa.array([1, 2, 3])}, {}, "RL0747", "", "is int64, not a string or a list of chat messages"),
    "struct": ({"prompt": pa.array([{"role": "user"}])}, {}, "RL0747", "", "struct<role: string>"),
    "binary": ({"prompt": pa.array([b"1+1="])}, {}, "RL0747", "", "is binary, not a string"),
    "null": ({"prompt": pa.array(["1", "2", None, "3"])}, {}, "RL0747", ":3", "is null, not a string"),
    "all_null": ({"prompt": pa.nulls(1)}, {}, "RL0747", ":1", "is null, not a string"),
    "empty": ({"prompt": pa.array(["1", "", "3"])}, {}, "RL0749", ":2", "the prompt is empty"),
    "no_messages": ({"prompt": pa.array([[{"role": "user", "content": "1"}], []])}, {}, "RL0747", ":2",
                    "an empty list"),
    "no_role": ({"prompt": pa.array([[{"content": "1"}]])}, {}, "RL0747", ":1", "a list, but not of chat messages"),
    "text_number": ({"prompt": PROMPTS, "n": pa.array(["1"] * 5)}, {"numbers": ("n",), "shuffle": 1}, "RL0747", ":1",
                    "`n` is a string, not a number"),
    "not_finite": ({"prompt": PROMPTS, "n": pa.array([1, 2, 3, 4, float("nan")])}, {"numbers": ("n",)}, "RL0747", ":5",
                   "not a finite number"),
    "too_large": ({"prompt": PROMPTS, "n": pa.array([1.0, 2, 3, 1e300, 5])}, {"numbers": ("n",)}, "RL0747", ":4",
                  "too large for float32"),
    "nan_elsewhere": ({"prompt": PROMPTS, "w": pa.array([1.0, None, float("nan"), 4, float("nan")])}, {}, "RL0747", ":3",
                      "the column `w` has a number that is not finite"),
    "infinity_of_32_bits": ({"prompt": PROMPTS, "w": pa.array([1, 2, 3, float("-inf"), 5], pa.float32())}, {}, "RL0747",
                            ":4", "not finite"),
    "nan_in_a_list": ({"prompt": PROMPTS, "w": pa.array([[1.0], [], None, [2.0, float("nan")], [1.0]])}, {}, "RL0747",
                      ":4", "the column `w` has a number that is not finite"),
    "nan_in_an_object": ({"prompt": PROMPTS, "w": pa.array([{"a": 1.0, "b": [{"c": x}]} for x in (1.0, 2.0, None, 4.0,
                          float("nan"))])}, {}, "RL0747", ":5", "the column `w` has a number that is not finite"),
    "nan_in_a_map": ({"prompt": PROMPTS, "w": pa.array([[("a", 1.0)], [("a", float("nan"))], [], None, []],
                      pa.map_(pa.string(), pa.float64()))}, {}, "RL0747", ":2", "not finite"),
    "date": ({"prompt": PROMPTS, "n": pa.array([0] * 5, pa.date32())}, {"numbers": ("n",)}, "RL0747", ":1", "a date"),
    "utf8": ({"prompt": pa.array([b"1", b"2", b"\xff", b"3"]).view(pa.string())}, {}, "RL0743", ":3", "is not UTF-8"),
    "no_rows": ({"prompt": pa.array([], pa.string())}, {}, "RL0742", None, "no rows"),  # type: ignore[dict-item]
    "few_rows": ({"prompt": PROMPTS}, {"batch": 6}, "RL0748", None, "has 5 rows, but a batch needs 6"),  # type: ignore
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", COLUMNS)
def test_a_bad_column(tmp_path: Path, tokenizer: str, format: str, case: str) -> None:
    columns, options, code, row, words = COLUMNS[case]
    path = table(tmp_path, format, columns)
    found = wrong(declared(path, tokenizer, format=format, **options))[0]
    file = path / "x.arrow" if format == "hf" else path
    assert (found.code, found.place) == (code, f"{path if row is None else file}{row or ''}") and words in found.title


@pytest.mark.parametrize("format", FORMATS)
def test_a_bad_number_is_said_with_its_file_and_row_in_it(tmp_path: Path, tokenizer: str, format: str) -> None:
    path = FORMATS[format](tmp_path, [{"prompt": "1", "w": float("nan") if i in (14, 16) else 1.0} for i in range(18)])
    found = one(declared(path, tokenizer, format=format))
    names = sorted(f.name for f in path.iterdir() if f.suffix in (".parquet", ".arrow"))
    assert found.place == f"{path / names[1]}:6" and "write null" in found.help


@pytest.mark.parametrize("format", FORMATS)
def test_null_and_absent_numbers_are_read(tmp_path: Path, tokenizer: str, format: str) -> None:
    path = table(tmp_path, format, {"prompt": PROMPTS, "w": pa.array([1.0, None, 3, 4, 5]), "v": pa.nulls(5),
                                    "u": pa.array([[1.0], None, [], [None], [2.0]])})
    assert open_source(declared(path, tokenizer, format=format), 10).step(0, 1)


@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_column_is_said_once_with_the_nearest(tmp_path: Path, tokenizer: str, format: str) -> None:
    found = one(declared(FORMATS[format](tmp_path, ROWS), tokenizer, format=format, columns=(("prompt", "prompts"),)))
    assert found.notes == ("columns in this row: `prompt`, `answer`, `level`",)
    assert found.help == 'did you mean `prompt`? If so, set `prompt="prompt"` in the data declaration'


@pytest.mark.parametrize("format", FORMATS)
def test_the_first_bad_rows_and_how_many_more(tmp_path: Path, tokenizer: str, format: str) -> None:
    path = FORMATS[format](tmp_path, [{"prompt": "1" if i < 6 else ""} for i in range(30)])
    (found,) = wrong(declared(path, tokenizer, format=format))
    assert found.place.endswith(":7") and found.notes[-1].startswith("the same in 23 other rows: ")


@pytest.mark.parametrize("format", FORMATS)
def test_without_pyarrow(tmp_path: Path, tokenizer: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FORMATS[format](tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    found = one(declared(path, tokenizer, format=format))
    assert found.code == "RL0753" and "pip install 'rldsl[parquet]'" in found.help and found.place == str(path)


@pytest.mark.parametrize("format", FORMATS)
def test_no_such_place_suggests_one(tmp_path: Path, tokenizer: str, format: str) -> None:
    FORMATS[format](tmp_path, ROWS)
    found = one(declared(tmp_path / "dd", tokenizer, format=format))
    assert found.code == "RL0741" and f"did you mean `{tmp_path / 'd'}`?" in found.help


def test_a_pattern_is_not_expanded(tmp_path: Path, tokenizer: str) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1="}\n' * 4)
    for path in (tmp_path / "*.jsonl", tmp_path / "[ab].jsonl"):
        found = one(declared(path, tokenizer))
        assert found.code == "RL0741" and "patterns are not expanded" in found.help
    (tmp_path / "[ab].jsonl").write_text('{"prompt": "1+1="}\n' * 4)
    assert len(open_source(declared(tmp_path / "[ab].jsonl", tokenizer), 10).table) == 4  # a name with such characters


@pytest.mark.parametrize("format", ["jsonl", *FORMATS])
def test_a_broken_link_is_called_that(tmp_path: Path, tokenizer: str, format: str) -> None:
    (tmp_path / "d").symlink_to("gone")
    found = one(declared(tmp_path / "d", tokenizer, format=format))
    assert found.code == "RL0741" and found.title.endswith("this symbolic link is broken")
    assert found.notes == ("it points to gone",) and "did you mean" not in found.help


# ------------------------------------------------------------------------------------------------------ parquet


def test_hidden_files_and_directories_are_no_rows(tmp_path: Path, tokenizer: str) -> None:
    """Spark writes to `_temporary` first: its parts would be rows that occur twice."""
    for i, name in enumerate(("a", "sub/b", "_temporary/0/c", ".cache/d", "sub/_old/e", ".f", "_g")):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"prompt": [f"{i}+1="] * 2}), tmp_path / "d" / f"{name}.parquet")
    source = open_source(declared(tmp_path / "d", tokenizer, format="parquet", batch=4, shuffle=False), 1)
    assert [row["prompt"] for row in source.columns(0, 1)] == ["0+1=", "0+1=", "1+1=", "1+1="]
    hidden = tmp_path / ".data"  # what the program names is never hidden
    (tmp_path / "d").rename(hidden)
    assert len(open_source(declared(hidden, tokenizer, format="parquet"), 1).table) == 4


def test_a_directory_without_parquet_files(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "d.csv").write_text("prompt\n1\n")
    found = one(declared(tmp_path, tokenizer, format="parquet"))
    assert (found.code, found.title) == ("RL0742", "this directory has no Parquet files") and ".parquet" in found.help
    assert "hf(" in one(declared(hf(tmp_path, ROWS), tokenizer, format="parquet")).help


def test_another_format_called_parquet(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "d.parquet").write_text('{"prompt": "1+1="}\n' * 8)
    found = one(declared(tmp_path / "d.parquet", tokenizer, format="parquet"))
    assert found.code == "RL0754" and "jsonl(...)" in found.help and found.place.endswith("d.parquet") and found.notes


@pytest.mark.parametrize("keep", [0, 3, 100, -9])
def test_a_parquet_file_that_breaks_off(tmp_path: Path, tokenizer: str, keep: int) -> None:
    broken = parquet(tmp_path, ROWS) / "b.parquet"
    broken.write_bytes(broken.read_bytes()[:keep])
    found = one(declared(tmp_path / "d", tokenizer, format="parquet"))
    assert (found.code, found.place) == ("RL0754", str(broken))


def test_a_parquet_file_with_damaged_pages(tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, compression="zstd")
    raw = bytearray(path.read_bytes())
    raw[4:80] = bytes(76)
    path.write_bytes(raw)
    found = one(declared(path, tokenizer, format="parquet"))
    assert (found.code, found.place) == ("RL0754", str(path)) and found.notes and found.help


@pytest.mark.parametrize("other, column, words", [
    ({"prompt": "1"}, "answer", "answer` is missing"), ({"prompt": "1", "answer": 3}, "answer", "answer` is int64"),
    ({"prompt": "1", "answer": "2", "more": 3}, "more", "more` is int64"),
])
def test_files_with_different_columns(tmp_path: Path, tokenizer: str, other: dict, column: str, words: str) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "1", "answer": "2"}] * 4), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([other] * 4), tmp_path / "b.parquet")
    found = one(declared(tmp_path, tokenizer, format="parquet"))
    assert found.code == "RL0755" and f"`{column}`" in found.title and found.place.endswith("b.parquet")
    assert words in found.notes[1] and found.notes[0].startswith(f"{tmp_path}/a.parquet")


def test_two_columns_of_one_name(tmp_path: Path, tokenizer: str) -> None:
    pq.write_table(pa.Table.from_arrays([PROMPTS, PROMPTS], ["prompt", "prompt"]), tmp_path / "a.parquet")
    assert one(declared(tmp_path, tokenizer, format="parquet")).title == "this file has two columns `prompt`"


NO_ROOM = """
import resource, sys
from rldsl.diag import Failure
from rldsl.runtime.data import parquet
from rldsl.runtime.data.row_schema import RowNeeds
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    parquet.scan(sys.argv[1], RowNeeds({"prompt": "prompt"}))
except Failure as failure:
    print(failure.diagnostics)
"""


def test_no_room_for_the_temporary_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": [f"{i} " * 9 for i in range(20_000)]}), tmp_path / "d.parquet")
    (tmp_path / "scan.py").write_text(NO_ROOM)
    run = command(str(tmp_path / "scan.py"), str(tmp_path / "d.parquet"))
    assert "RL0758" in run.stdout and "TMPDIR" in run.stdout, run.stderr


@pytest.mark.parametrize("format", FORMATS)
def test_a_time_that_python_cannot_represent(tmp_path: Path, tokenizer: str, format: str) -> None:
    """Only the rows of a step are decoded as a whole, so this is found then: with the row, not as an internal error."""
    times = pa.array([0, 1, 2**50, 3], pa.timestamp("ms"))
    path = table(tmp_path, format, {"prompt": PROMPTS.slice(0, 4), "time": times})
    found = one(declared(path, tokenizer, format=format, shuffle=False))
    assert found.code == "RL0754" and found.title == "this row cannot be read" and found.place.endswith(":3")
    assert found.notes == ("date value out of range",) and "remove the row" in found.help


# ----------------------------------------------------------------------------------------------- datasets directories


def test_a_dictionary_of_splits(tmp_path: Path, tokenizer: str) -> None:
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "d"))
    found = one(declared(tmp_path / "d", tokenizer, format="hf"))
    assert found.code == "RL0754" and found.title.endswith("several datasets: test, train")
    assert found.help == f'choose one: `hf("{tmp_path}/d/test")`'
    assert open_source(declared(tmp_path / "d" / "train", tokenizer, format="hf"), 1).table


def test_no_directory_of_datasets(tmp_path: Path, tokenizer: str) -> None:
    assert "save_to_disk" in one(declared(tmp_path, tokenizer, format="hf")).help
    found = one(declared(parquet(tmp_path, ROWS), tokenizer, format="hf"))
    assert found.code == "RL0754" and f'parquet("{tmp_path}/d")' in found.help
    (tmp_path / "file").write_text("x")
    assert one(declared(tmp_path / "file", tokenizer, format="hf")).code == "RL0754"


@pytest.mark.parametrize("state, code, words", [
    ("{", "RL0754", "does not list the files"), ("[]", "RL0754", "does not list the files"),
    ("[" * 100_000, "RL0754", "does not list the files"), ('{"_data_files": [3]}', "RL0754", "does not list the files"),
    ('{"_data_files": [{"filename": 3}]}', "RL0754", "outside its directory"),
    ('{"_data_files": [{"filename": "../secret.arrow"}]}', "RL0754", "outside its directory"),
    ('{"_data_files": [{"filename": "/secret.arrow"}]}', "RL0754", "outside its directory"),
    ('{"_data_files": [{"filename": ".."}]}', "RL0754", "outside its directory"),
    ('{"_data_files": []}', "RL0742", "empty"),
    ('{"_data_files": [{"filename": "data-00000-of-00001.arow"}]}', "RL0741", "no such data file"),
], ids=str)
def test_a_state_that_names_no_files(tmp_path: Path, tokenizer: str, state: str, code: str, words: str) -> None:
    (tmp_path / "state.json").write_text(state)
    found = one(declared(tmp_path, tokenizer, format="hf"))
    assert found.code == code and words in found.title and found.place.startswith(str(tmp_path)) and found.help


@pytest.mark.parametrize("keep", [0, 5, 200, -700])
def test_an_arrow_file_that_breaks_off(tmp_path: Path, tokenizer: str, keep: int) -> None:
    broken = hf(tmp_path, ROWS) / "data-00001-of-00002.arrow"
    broken.write_bytes(broken.read_bytes()[:keep])
    found = one(declared(tmp_path / "d", tokenizer, format="hf", batch=8))
    assert (found.code, found.title, found.place) == ("RL0754", "this file is truncated", str(broken))


def test_an_arrow_file_that_is_none(tmp_path: Path, tokenizer: str) -> None:
    broken = hf(tmp_path, ROWS) / "data-00001-of-00002.arrow"
    broken.write_bytes(b"nothing" * 9 + broken.read_bytes()[-8:])
    found = one(declared(tmp_path / "d", tokenizer, format="hf"))
    assert (found.code, found.title, found.place) == ("RL0754", "this file cannot be read", str(broken))


def test_an_arrow_file_with_wrong_offsets(tmp_path: Path, tokenizer: str) -> None:
    """Reading such a file without looking could end the process."""
    path = table(tmp_path, "hf", {"prompt": pa.array(["1+1="] * 64)})
    raw = (path / "x.arrow").read_bytes()
    offsets = b"".join((4 * i).to_bytes(4, "little") for i in range(65))
    assert raw.count(offsets) == 1
    (path / "x.arrow").write_bytes(raw.replace(offsets, offsets[:40] + b"\xff\xff\xff\x7f" + offsets[44:]))
    found = one(declared(path, tokenizer, format="hf"))
    assert (found.code, found.title) == ("RL0754", "this file is corrupted") and found.notes


def test_a_dataset_that_changes_during_the_run(tmp_path: Path, tokenizer: str) -> None:
    source = open_source(declared(hf(tmp_path, ROWS), tokenizer, format="hf"), 1)
    os.truncate(tmp_path / "d" / "data-00000-of-00002.arrow", 10)  # its mapping would raise SIGBUS
    with pytest.raises(Failure, match="RL0752"):
        source.step(0, 1)


# --------------------------------------------------------------------------------------------------- JSON lines


@pytest.mark.parametrize("make, code, words", [
    (parquet, "RL0741", "parquet("), (hf, "RL0741", "hf("), (lambda f, _: f, "RL0741", "give a file in it"),
])
def test_a_directory_for_a_file(tmp_path: Path, tokenizer: str, make: Callable, code: str, words: str) -> None:
    found = one(declared(make(tmp_path, ROWS), tokenizer))
    assert found.code == code and words in found.help


def test_a_pipe_does_not_hang(tmp_path: Path, tokenizer: str) -> None:
    os.mkfifo(tmp_path / "d.jsonl")
    assert one(declared(tmp_path / "d.jsonl", tokenizer)).title.endswith("not a regular file")


def test_parquet_called_json_lines(tmp_path: Path, tokenizer: str) -> None:
    found = one(declared(parquet(tmp_path, ROWS) / "a.parquet", tokenizer))
    assert found.code == "RL0754" and "a Parquet file, not JSON lines" in found.title
    assert "parquet(...)" in found.help and found.place.endswith("a.parquet")


@pytest.mark.parametrize("content", ['[{"prompt": "1"}, {"prompt": "2"}]', '[\n{"prompt": "1"},\n{"prompt": "2"}\n]'])
def test_one_json_list_called_json_lines(tmp_path: Path, tokenizer: str, content: str) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    found = wrong(declared(tmp_path / "d.jsonl", tokenizer))[0]
    assert "jq -c '.[]'" in found.help and found.place.endswith("d.jsonl:1")


def test_a_bad_byte_far_into_a_long_file(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rldsl.runtime.data.jsonl.BLOCK", 100)
    lines = [b'{"prompt": "1+1="}'] * 300
    lines[270] = b'{"prompt": "1\xe9"}'
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(lines))
    found = one(declared(tmp_path / "d.jsonl", tokenizer))
    assert (found.code, found.place) == ("RL0743", f"{tmp_path}/d.jsonl:271")
    assert found.title == "byte 14 of this line is not UTF-8"
