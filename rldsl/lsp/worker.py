"""The process that computes forecasts, so that the language server never waits for one.

In: questions on standard input, one JSON object per line. Out: forecasts on standard output, one per line, in that
order. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from rldsl.lsp.forecast import CallCost, Forecast, Question, forecast


def question_line(question: Question) -> bytes:
    return json.dumps(asdict(question)).encode() + b"\n"


def read_forecast(line: bytes) -> Forecast:
    """The forecast in a line. ValueError, TypeError or KeyError if no worker wrote it."""
    found: dict[str, Any] = json.loads(line)
    return Forecast(**{**found, "calls": tuple(CallCost(**c) for c in found["calls"])})


def answer(line: str) -> Forecast:
    try:
        return forecast(Question(**json.loads(line)))
    except Exception as error:  # an internal compiler error must not end the forecasts of other programs
        return Forecast(why=f"the compiler failed: {type(error).__name__}: {error}")


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    if hasattr(os, "nice"):
        os.nice(5)
    for line in sys.stdin:
        out.write(json.dumps(asdict(answer(line))) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
