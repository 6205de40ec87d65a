"""JSON lines hold JSON: what would be read in a way that nobody meant is refused, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.diag import Failure
from rldsl.runtime.data import jsonl
from rldsl.runtime.data.row_schema import RowNeeds

NEEDS = RowNeeds({"prompt": "prompt"}, ())


def scanned(tmp_path: Path, line: str) -> jsonl.ScannedFile:
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "1"}\n' + line + "\n")
    return jsonl.scan(str(file), NEEDS)


@pytest.mark.parametrize("line, words", [
    ('{"prompt": "1", "prompt": "2"}', "the key 'prompt' occurs twice"),
    ('{"prompt": "1", "x": {"a": 1, "a": 2}}', "the key 'a' occurs twice"),
    ('{"prompt": "1", "x": NaN}', "NaN is not a JSON number"),
    ('{"prompt": "1", "x": [-Infinity]}', "-Infinity is not a JSON number"),
    ('{"prompt": "1", "x": ' + "9" * 4301 + "}", "an integer has too many digits"),
    ('{"prompt": "1", "x": ' + "[" * 100_000, "nested too deeply"),
])
def test_a_line_is_refused(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(Failure) as caught:
        scanned(tmp_path, line)
    (found,) = caught.value.diagnostics
    assert (found.code, found.place) == ("RL0744", f"{tmp_path / 'd.jsonl'}:2") and words in found.title


@pytest.mark.parametrize("line", ['{"prompt": "NaN", "x": 1e400}', '{"prompt": "1", "x": [{"a": 1}, {"a": 2}]}',
                                  '{"prompt": "1", "x": ' + "9" * 4300 + "}"])
def test_a_line_is_read(tmp_path: Path, line: str) -> None:
    assert len(scanned(tmp_path, line).table) == 2
