"""The times of a recorded event: how long it took does not depend on the clock being set meanwhile."""

from __future__ import annotations

import time

import pytest

from rldsl.plan.events import Free
from rldsl.runtime.interpreter.timeline import TimelineRecorder


@pytest.mark.parametrize("jump", [-3600.0, 0.0, 3600.0])
def test_the_clock_is_set_while_a_run_goes_on(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    recorder, since = TimelineRecorder(0), time.time()
    begin = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: since + jump)
    recorder.add(Free(id=1, mesh="m", buffers=()), 1, begin, begin + 0.25)
    span = recorder.spans[0]
    assert span["dur"] == pytest.approx(0.25e6) and abs(span["ts"] / 1e6 - since) < 5
