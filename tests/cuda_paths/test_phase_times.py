"""Seconds of phases are those of the device: with a clock that stands for a GPU's, which is behind the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rldsl.plan.events import Generate, Lengths, Train
from rldsl.runtime.metrics.builtin_metrics import Meter
from rldsl.runtime.metrics.phase_times import PhaseTimes
from rldsl.runtime.metrics.reporter import Reporter, _Line

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Device:
    """A stream: what was launched takes its time after what was launched before."""

    def __init__(self) -> None:
        self.launched, self.passed, self.waits = 0.0, 0.0, 0

    def mark(self, enable_timing: bool) -> Mark:
        assert enable_timing
        return Mark(self)


class Mark:
    def __init__(self, device: Device):
        self.device = device

    def record(self) -> None:
        self.at = self.device.launched

    def query(self) -> bool:
        return self.at <= self.device.passed

    def synchronize(self) -> None:
        self.device.waits += not self.query()
        self.device.passed = max(self.device.passed, self.at)

    def elapsed_time(self, other: Mark) -> float:
        assert self.query() and other.query()
        return (other.at - self.at) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.mark)
    return made


def test_a_phase_takes_what_the_device_takes(device: Device) -> None:
    times = PhaseTimes()
    for phase, seconds in (("generate", 2.0), ("train", 3.0), ("train", 4.0)):
        times.begin(CUDA)
        device.launched += seconds  # the host is done at once
        times.end(phase, 0.001)
        device.launched += 0.5  # of no phase
    assert not times.known()
    device.passed = 4.0
    assert not times.known() and not device.waits
    assert times.seconds() == {"generate": 2.0, "train": 7.0} and device.waits and times.known()


def test_on_a_cpu_the_host_s_seconds_count(device: Device) -> None:
    times = PhaseTimes()
    for seconds in (2.0, 3.0, -1.0):
        times.begin(CPU)
        times.end("train", seconds)
    assert times.known() and times.seconds() == {"train": 5.0}


def event(kind: type, **facts: Any) -> Any:
    made = object.__new__(kind)
    for name, value in facts.items():
        object.__setattr__(made, name, value)
    return made


def test_a_line_waits_until_the_device_has_passed_its_step(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wait of the host, unless the run ends or a checkpoint follows."""
    step: Any = SimpleNamespace(context=SimpleNamespace(device=CUDA), talked=[], number=1, ragged_bytes=0)
    monkeypatch.setattr("rldsl.runtime.metrics.builtin_metrics.peak_bytes", lambda _: 7)
    meter = Meter(SimpleNamespace(body=(), header=SimpleNamespace(world=1)))  # type: ignore[arg-type]
    lines: list[Any] = []
    for number in range(2):
        generate = event(Generate, frame="gen")
        meter.begins(step, generate)
        device.launched += 1.0 + number
        meter.took(step, generate, 1e-4)
        meter.begins(step, event(Lengths))
        lines.append(meter.finish(step))
    reporter: Any = object.__new__(Reporter)
    written: list[dict[str, float]] = []
    reporter._lines = type("Lines", (list,), {"popleft": lambda self: self.pop(0)})(
        _Line(i + 1, (), 0.0, 10.0, 0, x) for i, x in enumerate(lines))
    reporter._since, reporter._arrays = 0.0, SimpleNamespace(write=lambda *_: ())
    reporter._write, reporter._show = written.append, lambda *_: None
    reporter.write_lines()
    assert not written
    device.passed = 1.5
    reporter.write_lines()
    assert [line["time/generate"] for line in written] == [1.0] and not device.waits
    reporter.write_lines(wait=True)
    assert [line["time/generate"] for line in written] == [1.0, 2.0] and device.waits == 1


def test_events_of_no_phase_have_no_marks(device: Device) -> None:
    step: Any = SimpleNamespace(context=SimpleNamespace(device=CUDA))
    meter = Meter(SimpleNamespace(body=(), header=SimpleNamespace(world=1)))  # type: ignore[arg-type]
    meter.begins(step, event(Lengths))
    assert meter._times._begun is None
    meter.begins(step, event(Train))
    assert meter._times._begun is not None
