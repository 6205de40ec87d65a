"""The gain of generating one step ahead where the seconds of calls are published: given those, the schedule decides.

Nothing of a kernel is predicted here: the published seconds are the durations of the calls, and the compiled plans are
simulated with them, on-policy and one step ahead. The published step of an on-policy run is longer than its phases
together. What is left over, in which no device is said to work, is the driver's: rewards, advantages, and passing rows
on. It comes between generation and training and, with a lag, while the next responses are generated, so it counts with
the log-probs, and the on-policy step takes as long as published. Whether a step with a lag has it, too, is not
published: see `VARIANTS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.prediction import HERE, Prediction, cluster_of, lengths_of, make_model, sets_of
from benchmarks.published.rows import Row
from rldsl import api
from rldsl.simulate import simulate

# how the seconds in no phase of the on-policy step are counted -> whether (on-policy, one step ahead) has them
VARIANTS: Mapping[str, tuple[bool, bool]] = {
    "in both steps": (True, True), "in the on-policy step": (True, False), "in neither": (False, False)}


@dataclass(frozen=True, slots=True)
class Gain:
    """An on-policy step over one with a lag."""

    row: Row  # with the lag
    what: str  # which durations were given, and where the seconds in no phase are
    seconds: tuple[float, float]  # of a step, predicted: on-policy, one step ahead
    published: float  # the gain

    @property
    def predicted(self) -> float:
        return self.seconds[0] / self.seconds[1]

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def unexplained(row: Row) -> float:
    """Seconds of a published on-policy step that are in none of its phases."""
    return row.seconds - sum(row.phases.values())


def gains(on: Prediction, off: Prediction, folder: Path) -> Iterator[Gain]:
    """First with the published phases of both runs. Then with those of the on-policy run alone: what the other devices
    change about a call is then the ratio of two predictions. on, off: as predicted without published seconds."""
    left = unexplained(on.row)
    published = on.row.seconds / off.row.seconds
    for what, (here, there) in VARIANTS.items():
        seconds = (_step(on.row, on.row.phases, left * here, folder),
                   _step(off.row, off.row.phases, left * there, folder))
        yield Gain(off.row, f"phases of both runs, {left:.0f} s {what}", seconds, published)
    before, after = on.phases(), off.phases()
    scaled = {call: on.row.phases[call] * after[call] / before[call] for call in before}
    for what, (here, there) in VARIANTS.items():
        seconds = (_step(on.row, on.row.phases, left * here, folder), _step(off.row, scaled, left * there, folder))
        yield Gain(off.row, f"on-policy phases alone, {left:.0f} s {what}", seconds, published)


def _step(row: Row, phases: Mapping[str, float], rest: float, folder: Path) -> float:
    """Seconds of a step whose calls take `phases`. rest: seconds between generation and log-probs."""
    make_model(folder, row.model)
    plan = api.compile("dapo.rlf", sets_of(row), str(HERE / "places" / f"{row.name}.place.rlf"))
    given = {"actor.generate": phases["generate"] + phases.get("switch", 0.0),
             "actor.logprobs": phases["logprobs"] + rest, "actor.train": phases["train"], "reward": 0.0}
    return simulate(plan, cluster_of(row), lengths_of(row), given).seconds
