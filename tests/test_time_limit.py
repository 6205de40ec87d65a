"""`pytest --seconds N --begin-at TEXT` (`tests/time_limit.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.time_limit import rotated

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.time_limit import TimeLimit
def pytest_configure(config):
    config.pluginmanager.register(TimeLimit({seconds}, {text!r}))
"""


def run(folder: Path, seconds: float, text: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST.format(seconds=seconds, text=text))
    for name in "abc":
        (folder / f"test_{name}.py").write_text("def test_first(): pass\ndef test_second(): pass\n")
    done = subprocess.run([sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", "0", "--rootdir",
                           str(folder), str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_has_no_time_is_counted(tmp_path: Path) -> None:
    said = run(tmp_path, 0, "")
    assert "6 skipped" in said and "6 tests did not begin: no time left" in said


@pytest.mark.thorough
def test_with_time_all_run_and_the_text_decides_which_file_is_first(tmp_path: Path) -> None:
    first = set()
    for text in ("one", "two", "three", "four"):
        said = run(tmp_path, 600, text)
        assert "6 passed" in said and "did not begin" not in said
        first.add(next(line for line in said.splitlines() if "test_first" in line).split("::")[0])
    assert len(first) > 1


@pytest.mark.parametrize("text", ["", "a", "7c5d"])
def test_nothing_is_lost_or_twice(text: str) -> None:
    found = rotated(range(10), text)
    assert sorted(found) == [*range(10)] and all((b - a) % 10 == 1 for a, b in zip(found, found[1:], strict=False))
    assert rotated([], text) == []
