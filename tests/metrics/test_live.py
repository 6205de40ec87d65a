"""The live view: its pictures, and a whole run on a pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import re
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from rich.console import Console

from rldsl.runtime.metrics.live import LiveView, ViewState, clock, eta, picture, shares, sparkline, usable
from rldsl.runtime.metrics.reporter import print_line
from rldsl.runtime.metrics.tee import Tee, tee
from tests.forked import start
from tests.metrics.program import plan

LINE = {"step": 4, "actor/loss": -0.5, "reward": 0.75, "seconds": 4.0, "tokens_per_second": 1234.0,
        "time/generate": 2.0, "time/train": 1.0, "time/rest": 1.0, "memory/peak_bytes": 10**9}


def text(seen: ViewState, width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(picture(seen, width))
    return console.export_text()


def test_a_picture_says_how_far_how_long_and_how_well() -> None:
    first = ViewState("grpo", 10, seconds=2.0, doing="actor train p.rlf:3").with_line({"step": 1})
    seen = replace(first, seconds=8.0).with_line(LINE)
    shown = text(seen)
    for part in ("grpo", "step 4/10", "0:08", "ETA 0:12", "1,234 tokens/s", "generate 2.00 s", "reward", "0.75", "-0.5",
                 "now: actor train p.rlf:3"):
        assert part in shown, part
    assert shown.index("reward") < shown.index("actor/loss") and "memory" not in shown


def test_a_picture_before_the_first_step() -> None:
    shown = text(ViewState("grpo", 10))
    assert "step 0/10" in shown and "ETA -:--" in shown and "now:" not in shown


def test_the_curve_grows_with_the_lines() -> None:
    seen = ViewState("grpo", 10)
    for step, reward in enumerate((0.0, 0.5, 1.0), 1):
        seen = seen.with_line(LINE | {"step": step, "reward": reward})
    assert sparkline((0.0, 0.5, 1.0)) == "▁▅█" or sparkline((0.0, 0.5, 1.0)) == "▁▄█"
    assert sparkline((0.0, 0.5, 1.0)) in text(seen)


@pytest.mark.parametrize("values, shown", [((), ""), ((1.0, 1.0), "▁▁"), ((float("nan"), 0.0, 1.0), " ▁█"),
                                           ((float("inf"), float("-inf")), "  ")])
def test_curves_of_odd_numbers(values: tuple[float, ...], shown: str) -> None:
    assert sparkline(values) == shown


@pytest.mark.parametrize("width", [20, 40, 200])
def test_no_line_of_a_picture_is_wider_than_the_terminal(width: int) -> None:
    seen = ViewState("a_flow_with_a_long_name", 10_000, seconds=1e5, doing="x" * 300).with_line(LINE)
    assert all(len(line.rstrip()) <= width for line in text(seen, width).splitlines())


def test_the_bar_is_filled_by_the_phases() -> None:
    assert shares(LINE, 8) == [("generate", 4), ("train", 2), ("rest", 2)]
    assert sum(cells for _, cells in shares(LINE | {"time/rest": 0.37}, 77)) == 77


@pytest.mark.parametrize("line", [{}, {"time/rest": 0.0}])
def test_no_bar_without_times(line: dict[str, float]) -> None:
    assert shares(line, 10) == []


def test_the_end_is_reckoned_from_the_steps_of_this_start() -> None:
    seen = ViewState("f", 100, begun=90, seconds=60.0)
    assert eta(seen) is None
    seen = seen.with_line({"step": 91})
    assert eta(seen) is None, "the first step is warm-up"
    for step, seconds in ((92, 62.0), (93, 64.0), (94, 66.0)):
        seen = replace(seen, seconds=seconds).with_line({"step": step})
    assert eta(seen) == pytest.approx(12.0)
    assert eta(replace(seen, seconds=67.0)) == pytest.approx(11.0), "a second of the next step has passed"
    assert eta(replace(seen, seconds=99.0)) == 0.0
    assert eta(replace(seen, step=100)) == 0.0 == eta(ViewState("f", 1).with_line({"step": 1}))


@pytest.mark.parametrize("seconds, shown", [(None, "-:--"), (0, "0:00"), (61.4, "1:01"), (3661, "1:01:01")])
def test_clocks(seconds: float | None, shown: str) -> None:
    assert clock(seconds) == shown


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_a_rank_says_stands_above_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    stream = tee(screen, tmp_path, 3, again=False)
    view = LiveView(stream, "grpo", 10, 0, now=lambda: 0.0)
    view.line(LINE)
    print("a warning", file=stream, flush=True)
    view.close()
    print("after", file=stream, flush=True)
    shown = screen.getvalue()
    assert shown.index("a warning") < shown.rindex("step 4/10") < shown.index("after")
    assert shown.rindex("\033[?25h") > shown.rindex("\033[?25l"), "the cursor is there"
    assert (tmp_path / "log/rank-3.log").read_text() == "a warning\nafter\n"


def test_a_log_is_begun_anew_or_goes_on(tmp_path: Path) -> None:
    for again, expected in ((False, "x\n"), (True, "x\nx\n"), (False, "x\n")):
        print("x", file=tee(io.StringIO(), tmp_path, 0, again), flush=True)
        assert (tmp_path / "log/rank-0.log").read_text() == expected


def test_a_log_that_cannot_be_made_is_no_reason_to_be_silent(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a file")
    screen = io.StringIO()
    assert tee(screen, tmp_path, 0, again=False) is screen
    assert not isinstance(screen, Tee)


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert not usable(Screen())


def test_plain_lines_are_as_ever() -> None:
    stream = io.StringIO()
    print_line(stream, LINE, 1000)
    assert stream.getvalue() == "step    4/1000  reward 0.75  actor/loss -0.5  tokens/s 1234\n"


def on_terminal(place: Path, *options: str, out: str = "out", steps: int = 3) -> tuple[int, str]:
    """Exit status and what a terminal gets of a run of one rank."""
    (place / "p.plan").write_bytes(plan(place, steps=steps))
    ours, theirs = pty.openpty()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NO_COLOR", raising=False)
        terminal = os.ttyname(theirs)
        process = start("rldsl.run", "p.plan", "--device", "cpu", "--out", out, *options, files=(terminal,) * 3,
                        env={"TERM": "xterm-256color", "COLUMNS": "100"})
    found = b""
    while ours in (ready := wait([ours, process.sentinel], 60)):
        found += os.read(ours, 1 << 16)
    assert ready, f"not ended: {found.decode()}"
    os.close(theirs)
    os.close(ours)
    process.join()
    return process.exitcode, found.decode()


@pytest.mark.thorough
def test_a_run_on_a_terminal(place: Path) -> None:
    code, shown = on_terminal(place, steps=60)  # longer than a few pictures take
    assert code == 0, shown
    last = re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", shown[shown.rindex("\033[1A"):])
    assert "step 60/60" in last and "reward" in last and "generate" in last and "ETA 0:00" in last and "steps in" in last
    assert "now:" not in last and shown.rindex("\033[?25h") > shown.rindex("\033[?25l")
    log = (place / "out/log/rank-0.log").read_text()
    assert "steps in" in log and "\033" not in log and "ETA" not in log


def test_plain_lines_on_a_terminal(place: Path) -> None:
    code, shown = on_terminal(place, "--plain")
    assert code == 0 and [x.split("  ")[0] for x in shown.splitlines() if x.startswith("step ")] == [
        f"step {i}/3" for i in (1, 2, 3)]
    assert "\033[1A" not in shown and "ETA" not in shown


def test_a_message_on_a_terminal_is_whole(place: Path) -> None:
    (place / "out/metrics.jsonl").mkdir(parents=True)
    code, shown = on_terminal(place)
    assert code == 1 and "RL0708" in shown and "ETA" not in shown
