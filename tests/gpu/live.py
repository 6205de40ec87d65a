"""A pytest plugin: a line for each test as soon as it has ended, in the file that RLDSL_TEST_LINES names. A stage that runs
out of time still says what it found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = os.environ.get("RLDSL_TEST_LINES")
    if not file or os.environ.get("PYTEST_XDIST_WORKER"):
        return
    if report.when == "call" or report.outcome != "passed":
        with Path(file).open("a") as lines:
            lines.write(f"{report.outcome} {report.duration:.1f} {report.nodeid}\n")
            if report.outcome == "failed":
                lines.write("".join(f"    {line}\n" for line in report.longreprtext.splitlines()[-25:]))
