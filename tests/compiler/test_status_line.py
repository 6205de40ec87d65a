"""What a terminal shows while a command works, what a pipe does not, and how Ctrl-C ends a command."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rldsl.cli import main
from rldsl.cli.status_line import ERASE, StatusLine
from rldsl.progress import Interrupted, Stage, listening, stage


def drawn(line: StatusLine, stream: io.StringIO, word: str) -> bool:
    """Whether `word` appears before long."""
    end = time.monotonic() + 20
    while word not in stream.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    return word in stream.getvalue()


def test_a_stage_as_text() -> None:
    assert str(Stage("pass value_lifetimes", 3, 12)) == "pass value_lifetimes (4 of 12)"
    assert str(Stage("pass value_lifetimes", 12, 12)) == "pass value_lifetimes (12 of 12)"
    assert str(Stage("searching", detail="gap 2 %")) == "searching, gap 2 %"


def test_nobody_has_to_listen() -> None:
    stage("alone")
    heard: list[Stage] = []
    with listening(heard.append):
        stage("outer")
        with listening(lambda _: None):
            stage("inner")
        stage("outer again", 1, 2)
    stage("after")
    assert heard == [Stage("outer"), Stage("outer again", 1, 2)]


def test_a_terminal_shows_the_newest_stage_and_is_left_empty() -> None:
    stream = io.StringIO()
    with StatusLine(stream, drawn=True) as line:
        line(Stage("pass node_events", 0, 12))
        assert drawn(line, stream, "pass node_events (1 of 12), ")
        line(Stage("verifying memory"))
        assert drawn(line, stream, "verifying memory")
        assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith(ERASE)


def test_a_stage_without_text_removes_the_line() -> None:
    stream = io.StringIO()
    with StatusLine(stream, drawn=True) as line:
        line(Stage("compiling"))
        assert drawn(line, stream, "compiling")
        line(Stage(""))
        assert stream.getvalue().endswith(ERASE)
        shown = len(stream.getvalue())
        time.sleep(0.5)
        assert len(stream.getvalue()) == shown


def test_a_pipe_gets_nothing() -> None:
    stream = io.StringIO()
    before = threading.active_count()
    with StatusLine(stream, drawn=False) as line:
        line(Stage("compiling"))
        assert threading.active_count() == before
        time.sleep(0.8)
    assert stream.getvalue() == "" and line.stage == Stage("compiling")


def test_long_lines_are_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = io.StringIO()
    with StatusLine(stream, drawn=True) as line:
        line(Stage("x" * 100))
        assert drawn(line, stream, "x")
    assert all(len(part) < 30 for part in stream.getvalue().split(ERASE))


def interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, *options: str) -> str:
    """What `rlc compile` says when `error` ends it."""
    def work(*_: object) -> str:
        stage("pass node_events", 0, 12)
        raise error

    monkeypatch.setattr("rldsl.commands.compile.compile", work)
    done = CliRunner().invoke(main, ["compile", str(tmp_path / "p.rlf"), *options])
    assert done.exit_code == 130
    return done.output


def test_ctrl_c_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = interrupted(monkeypatch, tmp_path, KeyboardInterrupt())
    assert said == "interrupted in: pass node_events (1 of 12); to start again, repeat the command\n"


def test_ctrl_c_is_one_object_where_json_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for error, title, advice in [
            (KeyboardInterrupt(), "interrupted in: pass node_events (1 of 12)", "to start again, repeat the command"),
            (Interrupted("interrupted after 2 s; use --seconds"), "interrupted after 2 s", "use --seconds")]:
        [found] = json.loads(interrupted(monkeypatch, tmp_path, error, "--json"))["diagnostics"]
        assert (found["code"], found["title"], found["help"]) == ("RL0090", title, advice)


def test_ctrl_c_with_words_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert interrupted(monkeypatch, tmp_path, Interrupted("use --seconds")) == "use --seconds\n"


def test_ctrl_c_of_which_the_ranks_have_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert interrupted(monkeypatch, tmp_path, Interrupted()) == ""


def test_every_command_goes_through_the_same_door() -> None:
    """Else Ctrl-C would end it with click's own `Aborted!`."""
    assert isinstance(main, click.Group)
    for name, command in main.commands.items():
        body = command.callback
        assert body is not None
        while hasattr(body, "__wrapped__"):
            body = body.__wrapped__
        assert body.__module__.startswith("rldsl.cli."), name
