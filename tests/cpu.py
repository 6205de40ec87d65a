"""The processor's time of each test: `pytest --cpu N` prints the N tests that used most of it, and the sum of each
directory. With all processes a test started, forked ones too; so it says the same on a busy machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TICK = os.sysconf("SC_CLK_TCK")
GARBAGE = (20_000, 10, 10)  # for `gc.set_threshold`: with Python's 700 a tenth of the CPU time goes into collections


def seconds(pid: int | str = "self") -> float:
    """Of a process, of the children that it has waited for, and of those that live (Linux)."""
    try:
        used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]  # own and of the dead
    except OSError:
        return 0.0  # it has ended since
    return sum(map(int, used)) / TICK + sum(map(seconds, children(pid)))


def children(pid: int | str) -> list[int]:
    """Processes that this one has begun, of each of its threads; none once it has ended."""
    found: list[int] = []
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return found
    for thread in threads:
        try:
            found += map(int, (thread / "children").read_text().split())
        except OSError:  # the thread has ended since, and the process may go on
            continue
    return found


class Cpu:
    """Each report gets what was used since the one before it; the process that prints collects them."""

    def __init__(self, shown: int):
        self.shown, self.last = shown, seconds()
        self.found: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        now = seconds()
        report.cpu, self.last = max(now - self.last, 0.0), now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.found[report.nodeid] += getattr(report, "cpu", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: Counter[str] = Counter()
        for name, used in self.found.items():
            folders[name.partition("::")[0].rpartition("/")[0]] += used
        for title, rows in (("folders", folders.most_common()), ("tests", self.found.most_common(self.shown))):
            terminalreporter.section(f"seconds of processors: {title}")
            for name, used in rows:
                terminalreporter.write_line(f"{used:8.2f} {name}")
        terminalreporter.write_line(f"{folders.total():8.2f} together")
