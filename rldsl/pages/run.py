"""What a page shows of a run: its metrics as curves, its samples, how it was started, and how another run differs.

In: the files of a run as values (`RunGiven`). Out: records of texts and numbers for templates/run.html.j2, and the JSON
from which templates/run.js draws curves. No files are read here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rldsl.pages.facts import Tile
from rldsl.plan.metrics_file import BUILT_IN, RATE, SECONDS, STEP, Lines
from rldsl.plan.notation import human, seconds_text

POINTS = 1500        # of a curve; of a longer run, each is the mean of neighboring steps
SAMPLE_STEPS = 12    # of which samples are shown, with the first and the last
SAMPLE_ROWS = 8      # of each batch in a step
LETTERS = 20_000     # of a text; of a longer one, the beginning and the end
RUNNING = "running"  # as `run.json` has it

Samples = Mapping[str, Sequence[Mapping[str, Any]]]  # generated batch -> the lines of its file


@dataclass(frozen=True, slots=True)
class Compared:
    """Another run, and where it differs."""

    name: str                                   # its directory
    lines: Lines                                # its metrics
    same_plan: bool                             # whether both ran the same plan
    settings: tuple[tuple[str, str, str], ...]  # (what, this run, the other one) of what differs
    plans: str                                  # the differences of their plans as text; "" if they are the same
    first: str                                  # where numbers and samples differ first, as text


@dataclass(frozen=True, slots=True)
class RunGiven:
    """What the page of a run is made from."""

    name: str                        # its directory
    record: Mapping[str, Any]        # `run.json`
    lines: Lines                     # its metrics
    order: tuple[str, ...] = ()      # names of metrics in the order in which they are shown
    samples: Samples | None = None   # also tables, as "table NAME"; None: the run writes none
    histograms: Sequence[Mapping[str, Any]] = ()  # the lines of its file
    compared: Compared | None = None
    refresh: int = 0                 # seconds after which a browser loads the page again; 0: never


@dataclass(frozen=True, slots=True)
class Metric:
    """The panel of a metric."""

    name: str  # of the metric
    last: str  # its last number
    about: str  # for those who do not see the curve


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side said in a conversation."""

    who: str     # "assistant" or "environment"
    text: str    # what it said
    calls: str   # calls of tools, as JSON; "" if there are none
    reward: str  # of the turn; "" if there is none


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled sequence."""

    batch: str                           # its name in the program
    step: int                            # of the run
    row: int                             # in the batch
    prompt: str                          # as text
    completion: str                      # as text
    values: tuple[tuple[str, str], ...]  # (name, number): rewards, advantages, scores
    order: tuple[tuple[str, float], ...]  # the same as numbers, to sort by
    stopped: str                         # what ended a conversation; "" if it is none
    turns: tuple[Turn, ...]              # of a conversation

    @property
    def begin(self) -> str:
        """The beginning of what the model wrote, on one line."""
        return " ".join((self.completion or " ".join(t.text for t in self.turns)).split())[:160]


def tiles(given: RunGiven, predicted: float, cluster: str) -> tuple[Tile, ...]:
    """predicted: seconds of a step on the cluster with this name."""
    record, lines = given.record, given.lines
    step = int(lines[-1][STEP]) if lines else 0
    steps, state = record.get("steps", 0), str(record.get("state", ""))
    found = [Tile("state", state, f"step {step:,} of {steps:,}")]
    for name in [n for n in given.order if n not in BUILT_IN and any(n in line for line in lines)][:2]:
        values = [line[name] for line in lines if name in line and math.isfinite(line[name])]
        if values:
            found.append(Tile(name, number_text(name, values[-1]), f"first {number_text(name, values[0])}; "
                              f"{number_text(name, min(values))} to {number_text(name, max(values))}"))
    took = [line[SECONDS] for line in lines[1:] if math.isfinite(line.get(SECONDS, math.nan))]
    if took:
        found.append(Tile("step, median", seconds_text(median(took)),
                          f"predicted {seconds_text(predicted)} on {cluster}"))
    total = sum(line[SECONDS] for line in lines if math.isfinite(line.get(SECONDS, math.nan)))
    if total:
        left = median(took) * (steps - step) if took and state == RUNNING else 0.0
        found.append(Tile("time of steps", seconds_text(total), f"about {seconds_text(left)} left" if left else
                          f"started {str(record.get('started', ''))[:16].replace('T', ' ')}"))
    rates = [line[RATE] for line in lines if math.isfinite(line.get(RATE, math.nan))]
    if rates:
        found.append(Tile("tokens/s", f"{median(rates):,.0f}", "median, prompts and responses"))
    return tuple(found)


def metrics(given: RunGiven) -> tuple[tuple[str, tuple[Metric, ...]], ...]:
    """(title, panels): what the program computes, then what a run measures. Metrics of the other run alone come along.
    """
    lines = [*given.lines, *(given.compared.lines if given.compared else ())]
    every = dict.fromkeys(name for line in lines for name in line if name != STEP)
    names = [n for n in given.order if n in every] + [n for n in every if n not in given.order]
    groups = (("Computed by the program", [n for n in names if n not in BUILT_IN]),
              ("Speed and memory", [n for n in names if n in BUILT_IN]))
    return tuple((title, tuple(_metric(given, n) for n in group)) for title, group in groups if group)


def _metric(given: RunGiven, name: str) -> Metric:
    values = [(int(line[STEP]), line[name]) for line in given.lines if name in line]
    finite = [x for _, x in values if math.isfinite(x)]
    if not finite:
        return Metric(name, "no number", f"{name}: no finite number")
    low, high = number_text(name, min(finite)), number_text(name, max(finite))
    first, last = number_text(name, values[0][1]), number_text(name, values[-1][1])
    return Metric(name, last, f"{name}: {len(values)} steps, from {first} in step {values[0][0]} to {last} in step "
                  f"{values[-1][0]}; lowest {low}, highest {high}")


def number_text(name: str, x: float) -> str:
    """A number of this metric; templates/run.js writes it in the same way."""
    if not math.isfinite(x):
        return "not finite"
    if "bytes" in name.rpartition("/")[2] and x >= 0:
        return human(round(x))
    if name == SECONDS or name.startswith("time/"):
        return seconds_text(x)
    return f"{x:,.0f}" if abs(x) >= 1e5 and x == round(x) else f"{x:.4g}"


def curves(given: RunGiven) -> str:
    """The curves as JSON that can stand inside a `<script>`: of each run its name, steps, seconds since its first step
    began, and metrics; null where a step has no finite number."""
    runs = [_curves(given.name, given.lines)]
    if given.compared:
        runs.append(_curves(given.compared.name, given.compared.lines))
    return script_json({"runs": runs})


def script_json(value: Any) -> str:
    """JSON without characters that could end the element around it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def averaged(given: RunGiven) -> int:
    """How many steps a point of a curve is the mean of."""
    return -(-len(given.lines) // POINTS) or 1


def _curves(name: str, lines: Lines) -> dict[str, Any]:
    size = -(-len(lines) // POINTS) or 1
    groups = [lines[i : i + size] for i in range(0, len(lines), size)]
    every = list(dict.fromkeys(n for line in lines for n in line if n != STEP))
    seconds, times = 0.0, []
    for group in groups:
        seconds += sum(x for line in group if math.isfinite(x := line.get(SECONDS, 0.0)))
        times.append(round(seconds, 3))
    return {"name": name, "steps": [int(group[-1][STEP]) for group in groups], "seconds": times,
            "metrics": {n: [_mean(group, n) for group in groups] for n in every}}


def _mean(lines: Lines, name: str) -> float | None:
    values = [line[name] for line in lines if name in line and math.isfinite(line[name])]
    if len(values) == 1:
        return values[0]
    found = sum(values) / len(values) if values else math.nan
    return found if math.isfinite(found) else None  # the sum of large numbers may not be finite


def samples(given: RunGiven) -> tuple[Sample, ...]:
    """Some of the samples, the newest step first."""
    found = []
    for batch, lines in (given.samples or {}).items():
        chosen = _spread(sorted({int(line["step"]) for line in lines}), SAMPLE_STEPS)
        for step in chosen:
            rows = [line for line in lines if line["step"] == step][:SAMPLE_ROWS]
            found += [_sample(batch, line) for line in rows]
    return tuple(sorted(found, key=lambda s: (-s.step, s.batch, s.row)))


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly, with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return sorted({steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)})


def _sample(batch: str, line: Mapping[str, Any]) -> Sample:
    numbers = [(n, float(x)) for n, x in line.items() if n not in (STEP, "row") and type(x) in (int, float)]
    numbers.sort(key=lambda pair: not pair[0].endswith("reward"))
    conversation = line.get("conversation")
    said = conversation.get("turns") if isinstance(conversation, dict) else None
    turns = [t for t in said if isinstance(t, dict)] if isinstance(said, list) else []
    stopped = str(conversation.get("stopped", "")) if isinstance(conversation, dict) else ""
    values = [(n, f"{x:.4g}") for n, x in numbers]
    values += [(n, "yes" if x else "no") for n, x in line.items() if isinstance(x, bool)]
    return Sample(batch, int(line["step"]), int(line["row"]), shortened(str(line.get("prompt", ""))),
                  shortened(str(line.get("completion", ""))), tuple(values),
                  tuple((n, x) for n, x in numbers if math.isfinite(x)), stopped, tuple(_turn(t) for t in turns))


def _turn(turn: Mapping[str, Any]) -> Turn:
    calls = json.dumps(turn["calls"], ensure_ascii=False) if turn.get("calls") else ""
    reward = turn.get("reward")
    return Turn(str(turn.get("role", "")), shortened(str(turn.get("content", ""))), calls,
                f"{reward:.4g}" if type(reward) in (int, float) else "")


def shortened(text: str) -> str:
    """A text of at most `LETTERS` characters, without its middle if it is longer."""
    left = len(text) - LETTERS
    half = LETTERS // 2
    return text if left <= 0 else f"{text[:half]}\n[{left:,} characters left out]\n{text[-half:]}"


def shown_counts(found: Iterable[Sample], given: RunGiven) -> str:
    """How many of the recorded sequences the page has."""
    every = sum(map(len, (given.samples or {}).values()))
    count = len(tuple(found))
    return f"{count:,} of {every:,} recorded sequences" if count < every else f"{count:,} recorded sequences"


def config(given: RunGiven) -> tuple[tuple[str, str], ...]:
    """How the run was started, and on what."""
    r = given.record
    devices = [str(d) for d in r.get("devices", ())]
    counted = [f"{devices.count(d)} × {d}" if devices.count(d) > 1 else d for d in dict.fromkeys(devices)]
    versions = r.get("versions", {})
    rows = (("command", " ".join(map(str, r.get("command", ())))), ("flow", r.get("flow", "")),
            ("seed", r.get("seed", "")), ("ranks", r.get("world", "")), ("host", r.get("host", "")),
            ("devices", ", ".join(counted)),
            ("versions", ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else ""),
            ("started", r.get("started", "")), ("resumed", ", ".join(map(str, r.get("resumed", ())))),
            ("ended", r.get("ended", "")), ("exact", "no: a time limit ended a conversation" if
                                           r.get("exact") is False else "yes" if r.get("exact") else ""))
    return tuple((name, str(value)) for name, value in rows if str(value))
