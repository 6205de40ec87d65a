"""`pytest --seconds N --begin-at TEXT`: no test begins after N seconds; the files begin in an order that TEXT decides.

For tests that are worth running while there is time. With another text, say the commit, other files have their turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar
from zlib import crc32

import pytest

REASON = "no time left"
Item = TypeVar("Item")


def rotated(files: Sequence[Item], text: str) -> list[Item]:
    """The same files in the same cycle, from another one on."""
    start = crc32(text.encode()) % len(files) if files else 0
    return [*files[start:], *files[:start]]


class TimeLimit:
    """Of the process that has it: each worker counts from its own start. Tests that have begun end as they would."""

    def __init__(self, seconds: float, text: str):
        self.end, self.text = time.monotonic() + seconds, text
        self.left = 0  # tests that had no time

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        place = {path: n for n, path in enumerate(rotated(list(dict.fromkeys(i.path for i in items)), self.text))}
        items.sort(key=lambda item: place[item.path])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() >= self.end:
            pytest.skip(REASON)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.left += report.skipped and REASON in str(report.longrepr)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left:
            terminalreporter.write_line(f"{self.left} tests did not begin: {REASON}")
