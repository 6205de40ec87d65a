"""Messages about captured functions name the places where the user wrote them."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from rldsl.python.captured import captured
from rldsl.python.origins import in_own_places
from rldsl.python.redirect import Redirection

SCALE = 2


def scaled(x: float) -> float:
    return SCALE * x


def decorated(function: object) -> object:
    return function


@decorated
def exact(rows: list[dict[str, str]]) -> list[float]:
    return [scaled(1.0) for _ in rows]


class Game:
    def step(self) -> int:
        return SCALE


MODULE = captured({"exact": exact, "Game": Game})  # type: ignore[dict-item]
FOUND = Redirection("/cache/functions/abc.py", frozenset({"exact", "Game"}), MODULE.definitions)


def own(line: int) -> str:
    return in_own_places(f" --> {FOUND.path}:{line}\n  = note", FOUND)


@pytest.mark.parametrize("text", ["    return SCALE * x", "    return [scaled(1.0) for _ in rows]", "@decorated",
                                  "        return SCALE", "class Game:"])
def test_a_line_of_a_script(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the number that it has in this file, which is named as from the working directory."""
    monkeypatch.chdir(Path(__file__).parent)
    here = 1 + MODULE.text.splitlines().index(text)
    mine = 1 + Path(__file__).read_text().splitlines().index(text)
    assert own(here) == f" --> test_origins.py:{mine}\n  = note"


def test_a_file_elsewhere_has_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = inspect.getsourcelines(scaled)[1]
    assert own(1 + MODULE.text.splitlines().index("def scaled(x: float) -> float:")) == \
        f" --> {os.path.abspath(__file__)}:{first}\n  = note"


@pytest.mark.parametrize("text", ["from __future__ import annotations", "SCALE = 2"])
def test_a_line_that_no_user_wrote_so_stays(text: str) -> None:
    line = 1 + MODULE.text.splitlines().index(text)
    assert own(line) == f" --> {FOUND.path}:{line}\n  = note"


def test_the_file_alone_and_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert in_own_places(f" --> {FOUND.path}", FOUND) == " --> test_origins.py"
    for text in ("step 1 reward 0.5", "/cache/functions/abd.py:3"):
        assert in_own_places(text, FOUND) == text
    assert in_own_places(FOUND.path, Redirection()) == FOUND.path
