"""Diagnostics of the processes of a run: printed, and left for the program that started the run.

In: diagnostics of ranks and of the launcher. Out: text on standard error, and records, one JSON object a line, in the
file that the environment names (`rlc run --json` reads them). Without such a file, only the text.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rldsl.diag import Diagnostic
from rldsl.report import colored, record, render

VARIABLE = "RLDSL_MESSAGE_FILE"  # of the environment: where the processes of a run leave their diagnostics


def report(diagnostics: Sequence[Diagnostic]) -> None:
    """Print diagnostics to standard error, and leave them for whoever started the run."""
    print(render(diagnostics, colored(sys.stderr)), file=sys.stderr, flush=True)
    leave(diagnostics)


def leave(diagnostics: Sequence[Diagnostic]) -> None:
    """Leave diagnostics whose text has been printed in another form."""
    file = os.environ.get(VARIABLE)
    if file:
        lines = "".join(json.dumps(record(d)) + "\n" for d in diagnostics)
        with suppress(OSError), Path(file).open("a") as stream:  # one write, so that processes do not mix their lines
            stream.write(lines)


def has_reader() -> bool:
    """Whether a program that reads the diagnostics started this run."""
    return VARIABLE in os.environ


def collected(file: Path) -> list[dict[str, Any]]:
    """The records that the processes of a run have left, in the order of time."""
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):  # a process was killed while it wrote its line
            found.append(json.loads(line))
    return found
