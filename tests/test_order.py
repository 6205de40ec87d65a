"""The order in which test files are handed out."""

from __future__ import annotations

from pathlib import Path

from tests.order import SECONDS, longest_first


def test_long_files_come_first_and_tests_stay_together() -> None:
    long = "tests/docs/test_tutorial.py"
    several = [f"tests/b.py::{i}" for i in range(30)]
    given = ["tests/a.py::x", *several, f"{long}::p[a::b]", f"{long}::a", "tests/c.py::y"]
    found = [given[i] for i in longest_first(given)]
    assert found == [*given[31:33], *several, given[0], given[33]]


def test_every_file_of_the_table_is_there() -> None:
    assert [name for name in SECONDS if not (Path(__file__).parent / name).is_file()] == []
