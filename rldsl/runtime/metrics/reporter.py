"""What a rank reports during the run. In: its events and the metrics of each step. Out: lines, curves,
samples, a view of the progress.

Only the rank that logs measures and writes; a rank that has samples writes these.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rldsl.plan.arrays import Histogram
from rldsl.plan.events import Event
from rldsl.plan.metrics_file import METRICS, PHASES, SAMPLES, TABLES
from rldsl.plan.naming import Labels, describe_event
from rldsl.plan.projection import event_paths
from rldsl.plan.references import Role, references
from rldsl.runtime.files import check_writable
from rldsl.runtime.metrics.array_files import ArrayFiles
from rldsl.runtime.metrics.builtin_metrics import Measured, Meter
from rldsl.runtime.metrics.json_lines import LineFiles
from rldsl.runtime.metrics.names import computed, display_order
from rldsl.runtime.metrics.samples import Samples, sample_sources, samples_file
from rldsl.runtime.metrics.writers import MetricWriter, RunLabels, Tables, TensorBoard, Wandb
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.logged_numbers import LoggedNumbers
from rldsl.runtime.state.step import StepState

if TYPE_CHECKING:
    from rldsl.runtime.metrics.live import LiveView


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What the user wants to see."""

    tensorboard: bool = False      # write event files of TensorBoard
    wandb: str = ""                # "", "offline" or "online"
    samples: int = 0               # sequences of each step that are written as text
    plain: bool = False            # print lines, even on a terminal
    command: tuple[str, ...] = ()  # how the run was started, for its record
    project: str = ""              # to which trackers add the run; "": the flow
    run_name: str = ""             # what they call it; "": its directory
    tags: tuple[str, ...] = ()     # by which they find it
    trackers: tuple[str, ...] = ()  # more of them (`trackers.STARTS`)


@dataclass(frozen=True, slots=True)
class _Line:
    """A step that has ended."""

    step: int                          # its number, from 1
    logged: tuple[LoggedNumbers, ...]  # what the program logs, perhaps still on its way to this rank
    began: float                       # when this rank ended the step before, by `time.monotonic`
    ended: float                       # when this rank ended it
    tokens: int                        # of its sequences
    measured: Measured                 # what this rank measured

    def ended_everywhere(self) -> float:
        """When its numbers had arrived, too: with a lag, a rank that generates ends a step before those that train."""
        return max([self.ended, *(numbers.arrival.at for numbers in self.logged)])

    def arrays(self) -> dict[str, list[float]]:
        """Histograms and tables. Of what was logged several times, the last."""
        return {name: numbers for logged in self.logged for name, numbers in logged.arrays().items()}

    def numbers(self, since: float) -> dict[str, float]:
        """The line of metrics.jsonl. What was logged several times (a train in a `repeat`) counts by its mean. since:
        when the step before had ended."""
        found: dict[str, list[float]] = {}
        for numbers in self.logged:
            for name, number in numbers.numbers().items():
                found.setdefault(name, []).append(number)
        seconds = max(self.ended_everywhere() - since, self.ended - self.began, 1e-9)
        line: dict[str, float] = {"step": self.step, **{name: sum(x) / len(x) for name, x in found.items()}}
        line["seconds"] = round(seconds, 4)
        if self.tokens:
            line["tokens_per_second"] = round(self.tokens / seconds, 1)
        line |= self.measured.numbers()
        line["time/rest"] = round(max(seconds - sum(line.get(f"time/{p}", 0.0) for p in PHASES), 0.0), 4)
        return line


class Reporter:
    """The reporter of one rank. Leaving its `with` block closes its files and restores the terminal."""

    def __init__(self, context: RunContext, step: StepState, data: DataReader, options: ReportOptions,
                 stream: TextIO | None = None):
        """stream: where progress is shown (default: stderr). Everything that can be refused is refused here."""
        header = context.plan.header
        logs = {r.id for e, _ in event_paths(context.plan) if e.logged
                for r in references(e) if r.role is Role.RANK} or {0}
        self._out, self._step = context.out, step
        self._steps, self._stream = header.steps, stream or sys.stderr
        self._labels = Labels.of(context.plan.values, context.plan.frames)
        self.meter = Meter(context.plan) if context.rank in logs else None
        self._since = self._ended = time.monotonic()  # when the last step had ended everywhere, and on this rank
        self._done = step.number
        self._files = LineFiles()
        self._lines: deque[_Line] = deque()  # of steps that have ended, whose metrics are on their way
        self._view: LiveView | None = None
        self._writers: list[MetricWriter] = []
        self._samples = Samples(context, data, options.samples) if options.samples else None
        if self._samples is not None:
            for source in sample_sources(context.plan):
                if source.rank == context.rank:
                    check_writable(samples_file(context.out, source.frame))
        if self.meter is None:
            return
        check_writable(context.out / METRICS)
        self._arrays = ArrayFiles(context, data)
        if options.tensorboard:
            self._writers.append(TensorBoard(context.out, step.number + 1))
        labels = RunLabels(options.project or header.flow, options.run_name or context.out.name, options.tags,
                           dict(header.params))
        if options.wandb:
            self._writers.append(Wandb(context.out, step.number + 1, options.wandb, labels))
        if options.trackers:
            from rldsl.runtime.metrics.trackers import Accelerate

            self._writers += [Accelerate(name, context.out, step.number + 1, labels) for name in options.trackers]
        if not options.plain and self._stream.isatty():
            from rldsl.runtime.metrics.live import LiveView, usable

            if usable(self._stream):
                self._view = LiveView(self._stream, header.flow, header.steps, step.number)

    def __enter__(self) -> Reporter:
        self._since = self._ended = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # what has arrived is worth reading, whatever ended the run
            with suppress(Exception):
                self.write_lines()
        if self._view is not None:
            self._view.close()
        for writer in self._writers:
            writer.close(kind is None)

    def begins(self, step: StepState, event: Event) -> None:
        """step: the one for which the event runs."""
        if self.meter is not None:
            self.meter.begins(step, event)
        if self._lines:
            self.write_lines()
        if self._samples is not None and event.frees:
            self._samples.frees(step, event)
        if self._view is not None and not event.frees:
            self._view.doing(f"{describe_event(self._labels.event(event)).title} {event.at}".strip())

    def took(self, step: StepState, event: Event, seconds: float) -> None:
        """step: the one for which the event ran."""
        if self.meter is not None:
            self.meter.took(step, event, seconds)

    def entered(self, loop: str) -> None:
        if self.meter is not None:
            self.meter.entered(loop)

    def iterated(self, loop: str) -> None:
        if self.meter is not None:
            self.meter.iterated(loop)

    def end_step(self, logged: Sequence[LoggedNumbers]) -> None:
        """Once a step, however often it is called. logged: metrics in the order of their events, perhaps still on
        their way."""
        step = self._step
        if step.number == self._done:
            return
        self._done = step.number
        if self._samples is not None:
            self._samples.end_step(step)
        if self.meter is None:
            if self._samples is not None:
                self._samples.take(step.number)  # trackers belong to the rank that logs
            return
        measured = self.meter.finish(step)
        began, self._ended = self._ended, time.monotonic()
        self._lines.append(_Line(step.number, tuple(logged), began, self._ended, step.tokens, measured))
        self.write_lines()

    def write_lines(self, wait: bool = False) -> None:
        """The lines of all steps whose metrics have arrived, in their order. wait: of all steps that have ended."""
        while self._lines:
            line = self._lines[0]
            for numbers in line.logged:
                if wait:
                    numbers.wait()
                elif not numbers.arrival.arrived():
                    return
            if not (wait or line.measured.times.known()):
                return
            values = line.numbers(self._since)
            self._since = max(self._since, line.ended_everywhere())
            arrays = self._arrays.write(line.step, line.arrays())
            self._write(values)
            self._lines.popleft()  # before anything else can fail: a line is written once
            self._show(values, *arrays)

    def _write(self, line: Mapping[str, float]) -> None:
        """To the file of metrics."""
        target, step = self._out / METRICS, int(line["step"])
        if damaged := self._files.append(target, step, [line]):
            print(f"warning: {target}: {len(damaged)} damaged line{'s' * (len(damaged) > 1)} dropped (first: line "
                  f"{damaged[0]})", file=sys.stderr, flush=True)

    def _show(self, line: Mapping[str, float], histograms: Mapping[str, Histogram], tables: Tables) -> None:
        """To people and trackers."""
        step = int(line["step"])
        samples = self._samples.take(step) if self._samples is not None else {}
        rows = {f"{kind}/{name}": lines for kind, found in ((SAMPLES, samples), (TABLES, tables))
                for name, lines in found.items() if lines}
        for writer in self._writers:
            if rows:
                writer.write_tables(step, rows)
            if histograms:
                writer.write_histograms(step, histograms)
            writer.write(step, {name: value for name, value in line.items() if name != "step"})
        if self._view is not None:
            self._view.line(line, histograms)
        else:
            print_line(self._stream, line, self._steps)


def print_line(stream: TextIO, line: Mapping[str, float], steps: int) -> None:
    """One line for each step."""
    names = sorted(computed(line), key=display_order)
    text = f"step {line['step']:>{len(str(steps))}}/{steps}  " + "  ".join(f"{n} {line[n]:.4g}" for n in names[:7])
    if "tokens_per_second" in line:
        text += f"  tokens/s {line['tokens_per_second']:.0f}"
    print(text, file=stream, flush=True)
