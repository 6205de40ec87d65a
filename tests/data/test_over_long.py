"""Rows with more tokens than the declaration allows: truncated, dropped or refused, and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.diag import Failure
from rldsl.runtime.data import open_source
from tests.data.makers import WRITERS, declared, jsonl, opened, texts, wrong

FORMATS = list(WRITERS)
LIMITS = dict(max_prompt_tokens=4, max_answer_tokens=3)
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "9+10=", "answer": "19"}, {"prompt": "2+2=", "answer": "444"},
        {"prompt": "5+5=", "answer": "10"}, {"prompt": "10+10=", "answer": "2020"}]


def test_truncated_rows_lose_the_beginning_of_prompts_and_the_end_of_answers(tmp_path: Path, tokenizer: str) -> None:
    source = opened(tmp_path, tokenizer, ROWS, "answers", tells=True, **LIMITS)
    assert texts(source) == {"": ["1+1=2$", "+10=19$", "2+2=444", "5+5=10$", "+10=202"]}
    assert source.note == "data d: 3 of 5 rows truncated to max_prompt_tokens=4 or max_answer_tokens=3"


@pytest.mark.parametrize("format", FORMATS)
def test_dropped_rows_are_not_there(tmp_path: Path, tokenizer: str, format: str) -> None:
    source = opened(tmp_path, tokenizer, ROWS, "answers", format, over_long="drop", batch=2, **LIMITS)
    assert texts(source) == {"": ["1+1=2$", "5+5=10$"]} and source.passes == 10
    assert source.columns(0, 1) == [ROWS[0], ROWS[3]]
    assert source.note == ("data d: 3 of 5 rows dropped because they are longer than max_prompt_tokens=4 or "
                           "max_answer_tokens=3")


def test_dropped_rows_keep_their_places(tmp_path: Path, tokenizer: str) -> None:
    table = opened(tmp_path, tokenizer, ROWS, "answers", over_long="drop", batch=2, **LIMITS).table
    assert [table.place(i) for i in range(len(table))] == [f"{tmp_path}/d.jsonl:{n}" for n in (1, 4)]


def test_pairs_are_dropped_one_by_one(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"prompt": "1+1=", "pos_answers": ["2", "two"], "neg_answers": ["3", "3"], "id": 1},
            {"prompt": "2+2=", "pos_answers": ["4", "4"], "neg_answers": ["three", "3"], "id": 2}]
    source = opened(tmp_path, tokenizer, rows, "pairs", over_long="drop", **LIMITS)
    assert texts(source) == {"chosen": ["1+1=2$", "2+2=4$"], "rejected": ["1+1=3$", "2+2=3$"]}
    assert [row["id"] for row in source.columns(0, 1)] == [1, 2]


def test_the_end_of_an_answer_counts(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"prompt": "1", "answer": "22"}, {"prompt": "1", "answer": "333"}]
    assert len(opened(tmp_path, tokenizer, rows, "answers", over_long="drop", batch=1, **LIMITS).table) == 1


def test_chat_is_counted_as_it_is_written(tmp_path: Path, chat: str) -> None:
    rows = [{"prompt": [{"role": "user", "content": c}], "answer": [{"role": "assistant", "content": "2"}]}
            for c in ("1", "11")]
    source = opened(tmp_path, chat, rows, "answers", over_long="drop", batch=1, max_prompt_tokens=6)  # "u.1 a."
    assert len(source.table) == 1 and texts(source) == {"": ["u.1 a.2$"]}


def test_no_limit_and_no_long_row_change_nothing(tmp_path: Path, tokenizer: str) -> None:
    for n, limits in enumerate(({}, {"max_prompt_tokens": 6, "max_answer_tokens": 5})):
        for over_long in ("truncate", "drop", "error"):
            folder = tmp_path / f"{over_long}{n}"
            folder.mkdir()
            source = opened(folder, tokenizer, ROWS, "answers", tells=True, over_long=over_long, **limits)
            assert source.note == "" and source.columns(0, 1) == ROWS


def test_truncated_rows_of_a_long_file_are_estimated(tmp_path: Path, tokenizer: str,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rldsl.runtime.data.over_long_rows.MAX_COUNTED_ROWS", 10)
    rows = [{"prompt": "1+1=" if i % 2 else "10+10="} for i in range(95)]
    source = opened(tmp_path, tokenizer, rows, tells=True, batch=5, **LIMITS | {"max_answer_tokens": 0})
    count, rest = source.note.removeprefix("data d: ").split(" ", 1)
    assert rest == "of the 10 rows checked truncated to max_prompt_tokens=4" and 2 <= int(count) <= 8


def test_truncated_rows_are_counted_by_one_rank_only(tmp_path: Path, tokenizer: str) -> None:
    assert opened(tmp_path, tokenizer, ROWS, "answers", **LIMITS).note == ""


# ------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("format, place", [("jsonl", "d.jsonl:2"), ("parquet", "d/a.parquet:2"),
                                           ("hf", "d/data-00000-of-00002.arrow:2")])
def test_an_error_names_the_row_and_what_is_too_long(tmp_path: Path, tokenizer: str, format: str, place: str) -> None:
    path = WRITERS[format](tmp_path, ROWS)
    first, second, third = wrong(declared(path, tokenizer, "answers", format=format, over_long="error", **LIMITS))
    assert (first.code, first.place) == ("RL0756", f"{tmp_path}/{place}") and "over_long=drop" in first.help
    assert first.title == "this row is too long: `prompt` has 5 tokens, but max_prompt_tokens=4"
    assert second.title == "this row is too long: `answer` has 4 tokens, but max_answer_tokens=3"
    assert "`prompt` has 6 tokens" in third.title and "`answer` has 5 tokens" in third.title


def test_the_first_long_rows_and_how_many_more(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"prompt": "1" * (5 + n % 10)} for n in range(30)]
    found = wrong(declared(jsonl(tmp_path, rows), tokenizer, over_long="error", **LIMITS))
    assert len(found) == 5 and all("the same in 2 other rows: " in d.notes[0] for d in found)
    assert found[-1].notes[-1] == "and 15 other errors"


@pytest.mark.parametrize("kept, words", [(3, "has 3 rows, but a batch needs 4"), (0, "has 0 rows, but a batch needs")])
def test_too_few_rows_are_left(tmp_path: Path, tokenizer: str, kept: int, words: str) -> None:
    path = jsonl(tmp_path, [{"prompt": "1" * (1 if i < kept else 9)} for i in range(9)])
    (found,) = wrong(declared(path, tokenizer, over_long="drop", **LIMITS))
    assert found.code == "RL0748" and words in found.title and f"{9 - kept} of 9 rows dropped" in found.notes[0]


def test_a_bad_template_is_told_for_the_row(tmp_path: Path, chat: str, tokenizer: str) -> None:
    rows = [{"prompt": "1"}, {"prompt": [{"role": "user", "content": "1"}]}]
    with pytest.raises(Failure, match="RL0750") as caught:
        open_source(declared(jsonl(tmp_path, rows), tokenizer, over_long="drop", batch=1), 1)
    assert caught.value.diagnostics[0].place.endswith("d.jsonl:2")
