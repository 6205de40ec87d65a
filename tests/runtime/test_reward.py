"""Python functions: they are loaded as compiled, called with rows, and every mistake has one clear message."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.model import Function
from rldsl.runtime.rewards.user_functions import call, load
from tests.rewards.functions import recorded

ROWS = [{"prompt": "1+1=", "completion": "2", "answer": "2"}, {"prompt": "2+3=", "completion": "4", "answer": "5"}]


def written(tmp_path: Path, body: str, name: str = "score") -> Function:
    path = tmp_path / "rewards.py"
    path.write_text(body)
    return recorded(path, name)


def error(function: Function, rows: list = ROWS) -> Diagnostic:
    with pytest.raises(Failure) as caught:
        call(function, rows)
    (found,) = caught.value.diagnostics
    return found


@pytest.mark.parametrize("body", ["[1, True]", "(1.0, 1)", "torch.ones(2)", "numpy.ones(2)", "[torch.tensor(1.0), 1]"])
def test_numbers_of_all_sorts(tmp_path, body):
    got = call(written(tmp_path, f"import numpy, torch\ndef score(rows):\n    return {body}\n"), ROWS)
    assert got == [1.0, 1.0]


def test_rows_arrive_and_neighboring_files_can_be_imported(tmp_path):
    (tmp_path / "helper_of_rewards.py").write_text("def same(a, b):\n    return float(a == b)\n")
    body = ("def score(rows):\n    from helper_of_rewards import same\n"
            "    return [same(r['completion'], r['answer']) for r in rows]\n")
    assert call(written(tmp_path, body), ROWS) == [1.0, 0.0]


def test_functions_of_one_file_share_it_and_no_rows_call_nothing(tmp_path):
    body = ("seen = []\ndef score(rows):\n    seen.append(1)\n    return [len(seen)] * len(rows)\n"
            "def other(rows):\n    return score(rows)\n")
    first, second = written(tmp_path, body), written(tmp_path, body, "other")
    assert call(first, []) == []
    assert call(first, ROWS) == [1.0, 1.0] and call(second, ROWS) == [2.0, 2.0]
    assert load(first)(ROWS) == [3, 3]


def test_it_raised(tmp_path):
    body = "def grade(row):\n    return row['label']\n\ndef score(rows):\n    return [grade(r) for r in rows]\n"
    found = error(written(tmp_path, body))
    assert found.code == "RL0775" and found.title == "`score` raised: KeyError: 'label'"
    assert found.place.endswith("rewards.py:2")


def test_it_raised_in_a_library(tmp_path):
    found = error(written(tmp_path, "import json\ndef score(rows):\n    x = 1\n    return json.loads('{')\n"))
    assert "JSONDecodeError" in found.title and found.place.endswith("rewards.py:4")


def test_it_left_the_program(tmp_path):
    assert "SystemExit: 3" in error(written(tmp_path, "def score(rows):\n    raise SystemExit(3)\n")).title


@pytest.mark.parametrize("result, title", [
    ("None", "`score` returned None, not one number per row"),
    ("3.0", "`score` returned a float, not one number per row"),
    ("'11'", "`score` returned a str, not one number per row"),
    ("(1.0 for r in rows)", "`score` returned a generator, not one number per row"),
    ("{0: 1, 1: 2}", "`score` returned a dict, not one number per row"),
    ("[1.0]", "`score` returned 1 values for 2 rows"),
    ("[1.0] * 7", "`score` returned 7 values for row 0"),
    ("[1.0 for r in rows if r['answer'] == '2']", "`score` returned 0 values for row 1"),
])
def test_it_returned_the_wrong_thing(tmp_path, result, title):
    found = error(written(tmp_path, f"def score(rows):\n    return {result}\n"))
    assert (found.code, found.title) == ("RL0776", title) and found.place.endswith("rewards.py")


@pytest.mark.parametrize("values, title", [
    ("[1.0, None]", "`score` returned None for row 1, not a number"),
    ("['1', 1.0]", "`score` returned a str for row 0, not a number"),
    ("[1.0, [2.0]]", "`score` returned a list for row 1, not a number"),
    ("[1.0, float('nan')]", "`score` returned nan for row 1"),
    ("[float('-inf'), 1.0]", "`score` returned -inf for row 0"),
    ("[1e300, 1.0]", "`score` returned 1e+300 for row 0"),
])
def test_a_bad_number_comes_with_its_row(tmp_path, values, title):
    body = f"def score(rows):\n    return [{values}[r['answer'] == '5'] for r in rows]\n"
    found = error(written(tmp_path, body))
    assert (found.code, found.title) == ("RL0776", title)
    assert ROWS["row 1" in title]["prompt"] in " ".join(found.notes)


@pytest.mark.parametrize("body", ["[1.0] * len(rows) if len(rows) < 2 else [1.0, float('nan')]",
                                  "[1.0 / (len(rows) < 2)] * len(rows)"])
def test_what_no_row_does_alone_is_told_of_all(tmp_path, body):
    assert error(written(tmp_path, f"def score(rows):\n    return {body}\n")).code in ("RL0775", "RL0776")


def test_the_file_changed(tmp_path):
    function = written(tmp_path, "def score(rows):\n    return [0.0] * len(rows)\n")
    Path(function.path).write_text("def score(rows):\n    return [1.0] * len(rows)\n")
    assert error(function).code == "RL0772"


def test_the_file_is_gone_or_no_python(tmp_path):
    function = written(tmp_path, "x = 1\n")
    (tmp_path / "rewards.txt").write_text("x = 1\n")
    other = Function("f", str(tmp_path / "rewards.txt"), "score", function.sha256)
    Path(function.path).unlink()
    assert [error(f).code for f in (function, other)] == ["RL0771", "RL0771"]


@pytest.mark.parametrize("body, words, line", [
    ("x = 1\nimport no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'", 2),
    ("def score(rows)\n    return 1\n", "SyntaxError", 1),
    ("x = 1\ny = x / 0\n", "ZeroDivisionError", 2),
])
def test_it_fails_on_import(tmp_path, body, words, line):
    found = error(written(tmp_path, body))
    assert found.code == "RL0773" and words in found.title and found.place.endswith(f"rewards.py:{line}")


@pytest.mark.parametrize("line, help", [
    ("from near_rewards import x", "did you mean `near_reward`, which is next to this file?"),
    ("import pylatexenk", "install the missing module in the Python environment of the run"),
    ("from json import loadz", "install the missing module in the Python environment of the run")])
def test_a_module_next_to_it_with_nearly_that_name(tmp_path, line, help):
    (tmp_path / "near_reward.py").write_text("x = 1\n")
    assert error(written(tmp_path, f"{line}\ndef score(rows):\n    return [0.0]\n")).help == help


def test_no_such_function_suggests_one(tmp_path):
    found = error(written(tmp_path, "def scores(rows):\n    return [0.0]\n"))
    assert found.code == "RL0774" and found.help == "did you mean `scores`?"


def test_not_a_function(tmp_path):
    assert error(written(tmp_path, "score = 3\n")).title == "`score` is an int, not a function"


def test_a_function_may_consume_what_it_is_given(tmp_path):
    body = ("def score(rows):\n    found = []\n    while rows:\n        row = rows.pop(0)\n"
            "        found.append(float(row.pop('answer') == '2'))\n    return found\n")
    rows = [dict(row) for row in ROWS]
    assert call(written(tmp_path, body), rows) == [1.0, 0.0] and rows == ROWS


def test_a_function_that_consumes_rows_and_returns_too_few_is_named(tmp_path):
    body = "def score(rows):\n    rows.clear()\n    return []\n"
    assert error(written(tmp_path, body)).code == "RL0776"
