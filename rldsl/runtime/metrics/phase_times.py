"""How long the phases of a step took: on a GPU, between marks in its stream, since an event ends for the host when its
kernels are launched.

In: where the events of a phase begin and end. Out: seconds of each phase, once the device has passed the marks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch


@dataclass
class PhaseTimes:
    """Of the events of one step that one rank executes."""

    _host: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds of each phase so far
    _marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)  # phase, begin, end
    _begun: torch.cuda.Event | None = None  # where the event under way begins

    def begin(self, device: torch.device) -> None:
        """An event of a phase begins."""
        self._begun = _mark() if device.type == "cuda" else None

    def end(self, phase: str, seconds: float) -> None:
        """It has ended for the host. seconds: that it took."""
        if self._begun is None:
            self._host[phase] += max(seconds, 0.0)
        else:
            self._marks.append((phase, self._begun, _mark()))
        self._begun = None

    def known(self) -> bool:
        """Whether the device has passed all marks."""
        return all(end.query() for _, _, end in self._marks)

    def seconds(self) -> dict[str, float]:
        """Of each phase. Waits for the device, if it has not passed all marks."""
        total = defaultdict(float, self._host)
        for phase, begin, end in self._marks:
            end.synchronize()
            total[phase] += begin.elapsed_time(end) / 1e3
        return dict(total)


def _mark() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark
