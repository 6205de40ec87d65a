"""When `rlc search` ends, by its gap, its time or Ctrl-C, and what it says until then."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rldsl.commands import search as work
from rldsl.progress import listening
from rldsl.search import find_placement
from rldsl.simulate import Lengths
from tests.search.commands import folder, rlc, searched


def test_time_ends_a_search_which_says_so(folder: Path) -> None:
    found = json.loads(searched("--json", "--gap", "0", "--seconds", "0.000001"))
    assert not found["complete"] and found["best"] and found["gap"] >= 0
    assert "stopped by --seconds" in (folder / "grpo.place.rlf").read_text()


def test_a_result_has_one_gap_and_says_why_the_search_ended(folder: Path) -> None:
    text = searched("--gap", "0.5")
    assert text.count("gap ") == 2 and "search nodes: within the accepted gap of 50.00%" in text, text
    assert "search nodes: stopped by --seconds\n" in searched("--gap", "0", "--seconds", "0.000001")


def test_the_gap_is_shown_while_it_searches() -> None:
    said: list[str] = []
    asked = work.SearchRequest("grpo.rlf", "two.yaml", {}, None, (), (), 0.0, 0.0, 0.0, Lengths())
    with listening(lambda stage: said.append(str(stage))):
        work.search(asked, "p.rlf", True)
    gaps = [float(s.rsplit("gap ", 1)[1].rstrip("%")) for s in said if "gap" in s]
    assert gaps and gaps == sorted(gaps, reverse=True), "it only shrinks"
    assert all("best" in s and "bound" in s for s in said if "gap" in s)


def test_a_second_ctrl_c_stops_without_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)

    monkeypatch.setattr("rldsl.commands.search.find_placement", twice)
    done = rlc("search", "grpo.rlf", "--cluster", "two.yaml")
    assert done.exit_code == 130 and "nothing was written" in done.output
    assert not (folder / "grpo.place.rlf").exists()


def test_ctrl_c_writes_the_best_so_far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupted(*arguments: Any) -> object:
        os.kill(os.getpid(), signal.SIGINT)  # before anything is found
        return find_placement(*arguments)

    monkeypatch.setattr("rldsl.commands.search.find_placement", interrupted)
    done = rlc("search", "grpo.rlf", "--cluster", "two.yaml", "--gap", "0")
    assert done.exit_code == 0 and "stopped by Ctrl-C" in done.output
    assert "stopped by Ctrl-C" in (folder / "grpo.place.rlf").read_text()
    assert signal.getsignal(signal.SIGINT) is before
