"""Functions that return prompts: what a rank gets of them, and one message for everything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rldsl.plan.function import Function
from rldsl.runtime.rewards.pool import RewardPool
from tests.rewards.functions import EACH, ROWS, mistake, written
from tests.samples import thorough_between


def asks(folder: Path, returns: str, one: str) -> Function:
    """A function that returns the expression `one` for each row."""
    body = f"def one(row):\n    return {one}\n{EACH}"
    return replace(written(folder, body), returns=returns)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_strings_messages_and_missing_rows(tmp_path: Path, workers: int) -> None:
    one = ("[row['prompt'], [{'role': 'user', 'content': row['completion'], 'name': 'x'}], None, 'é😀\\0\\n']"
           "[int(row['completion']) % 4]")
    with RewardPool([asks(tmp_path, "prompts?", one)], workers) as pool:
        found = pool.call(pool.functions[0], ROWS)
    assert found[:4] == ["0+1=", [{"role": "user", "content": "1", "name": "x"}], None, "é😀\0\n"]
    assert len(found) == len(ROWS)


WRONG = {  # what the function returns for row 17 -> what the message says of it
    "None": "None", "''": "an empty string", "[]": "an empty list", "3": "an int", "b'x'": "a bytes",
    "'\\ud83d'": "a string with half of a character (a lone surrogate)",
    "['hello']": "a list whose item 0 is a str",
    "[{'role': 'user'}]": "a list whose item 0 has a wrong 'content' (missing)",
    "[{'role': 'user', 'content': 'a'}, {'role': 1, 'content': 'b'}]":
        "a list whose item 1 has a wrong 'role' (an int)",
    "[{'role': 'user', 'content': None}]": "a list whose item 0 has a wrong 'content' (None)",
    "{'role': 'user', 'content': 'a'}": "a dict",
}


@pytest.mark.parametrize("value", thorough_between(WRONG))
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_no_prompt(tmp_path: Path, workers: int, value: str) -> None:
    found = mistake(asks(tmp_path, "prompts", f"{value} if row['completion'] == '17' else 'x'"), workers)
    assert found.code == "RL0776"
    assert found.title == f"`score` returned {WRONG[value]} for row 17 (rows.jsonl:18), not a prompt"
    assert any("17+1=" in note for note in found.notes)
    assert ("declare `-> prompts?(...)`" in found.help) == (value == "None")


@pytest.mark.parametrize("result", ["'one text'", "None", "3.0", "['x']", "['x'] * 1000", "{}"])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_wrong_number_of_prompts(tmp_path: Path, workers: int, result: str) -> None:
    function = replace(written(tmp_path, f"def score(rows):\n    return {result}\n"), returns="prompts")
    found = mistake(function, workers)
    assert found.code == "RL0776" and "prompt" in found.help + found.title


def test_a_function_of_numbers_returns_no_text(tmp_path: Path) -> None:
    found = mistake(asks(tmp_path, "seq", "'a question'"))
    assert found.title == "`score` returned a str for row 0 (rows.jsonl:1), not a number"


def test_an_error_names_the_line(tmp_path: Path) -> None:
    found = mistake(asks(tmp_path, "prompts", "row['question']"))
    assert found.code == "RL0775" and found.place.endswith("rewards.py:2") and "a row has `prompt`" in found.help
