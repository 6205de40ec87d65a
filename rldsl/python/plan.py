"""A plan as a value of Python: what it will do, as text, pictures and numbers.

In: a `Compiled` (the records of `rldsl/plan/model.py`, their proof, the memory of each rank). Out: `Plan`, whose views
are made when they are asked for. All of its methods raise `DiagnosticError` for what is wrong with their arguments.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rldsl.clusters.model import MOST
from rldsl.diag import fail
from rldsl.files import write
from rldsl.memory import curves
from rldsl.passes.pipeline import Compiled
from rldsl.plan.codec import decode, encode, plan_id
from rldsl.plan.expr import Scalar
from rldsl.plan.spaces import indexed_frames
from rldsl.python.compare import Difference, compared
from rldsl.python.errors import ELSEWHERE, reports_failures
from rldsl.python.html import terminal
from rldsl.python.machines import Machines, assumed, machine_of
from rldsl.python.redirect import Redirection
from rldsl.python.sources import event_quote, sources_of
from rldsl.python.views import Graph, Memory, Report, Simulation
from rldsl.verify import verify

if TYPE_CHECKING:
    from rldsl.plan.model import Plan as Record
    from rldsl.python.runs import Run


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """A verified plan. In a notebook it shows what `rlc compile` prints."""

    compiled: Compiled                       # the plan as records, its proof, the memory of its ranks
    name: str                                # the program's or the plan's, for people
    folder: Path                             # where to look for sources that are given relative to the plan
    texts: tuple[tuple[str, str], ...] = ()  # (path, text) of sources that are not read from files
    redirection: Redirection = field(default=Redirection(), compare=False)  # to functions of the caller, for messages

    @property
    def record(self) -> Record:
        """All of it, as the records of `rldsl.plan.model`; docs/plans.md describes them."""
        return self.compiled.plan

    @property
    def id(self) -> str:
        """What `rlc` calls it: the first 12 hex digits of the sha256 of its file."""
        return plan_id(bytes(self))

    @property
    def ranks(self) -> int:
        """How many processes run it."""
        return self.record.header.world

    @property
    def params(self) -> dict[str, Scalar]:
        """The program's `param`s with the values that it was compiled for."""
        return dict(self.record.header.params)

    @property
    def checks(self) -> tuple[str, ...]:
        """What was proved of it, in order; docs/verifier.md says what each means."""
        return self.compiled.proof.checks

    @property
    def ages(self) -> dict[str, tuple[int, int]]:
        """How many steps old the tokens are that a step trains on, at least and at most, by the name of the generated
        sequences; only those of which some are older than the step."""
        return {age.generated: (age.least, age.most) for age in self.compiled.proof.ages}

    @property
    def graph(self) -> Graph:
        """The dataflow of a step, with movements and places."""
        return Graph(self.record)

    @property
    def memory(self) -> Memory:
        """What each rank holds, and its peak."""
        return Memory(self.record, self.compiled.curves)

    def __bytes__(self) -> bytes:
        """The bytes of its file; equal plans have equal bytes."""
        return encode(self.record)

    @reports_failures
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan file, which `rlc run`, `torchrun -m rldsl.run` and `rldsl.load` take. Raises RL0094."""
        write(os.fspath(path), bytes(self), ELSEWHERE)
        return Path(path)

    def preview(self, target: str = "") -> str:
        """What will happen: layouts, movements and why, memory, the proof. target: where the plan went."""
        from rldsl.preview import preview

        return preview(self.compiled, self.name, target, bytes(self))

    @reports_failures
    def text(self, *, rank: int | None = None, event: int | None = None) -> str:
        """The whole plan, what one rank does, or one event in full. Raises RL0608 for one that is not there."""
        from rldsl.inspect.show import show
        from rldsl.plan.visible_plan import visible_plan

        source = event_quote(self.record, event, self.sources) if event is not None else ""
        return show(visible_plan(self.record), rank, event, source)

    @property
    def sources(self) -> dict[str, str]:
        """Path -> text of the program and what it uses, as far as they are still what was compiled."""
        return sources_of(self.record, self.folder) | dict(self.texts)

    @reports_failures
    def simulate(self, cluster: Machines, *, prompt_tokens: float = 0.0, response_tokens: float = 0.0,
                 longest: float = 0.0, like: str | os.PathLike[str] | None = None,
                 durations: Mapping[str, float] | None = None) -> Simulation:
        """How long a step takes on a cluster, and why. Nothing is run.

        cluster: a preset ("h100x64"), a file, or a `rldsl.clusters.Cluster`. prompt_tokens, response_tokens: means;
        longest: tokens of the longest response of a batch; 0 is the most that the program allows. like: a run's
        directory, to take the means from. durations: seconds that calls are known to take, such as {"actor.generate":
        321.0}, of which nothing is predicted. Raises RL0205 for lengths and durations that are none, RL0091, RL0205,
        ... for the cluster, RL0096 where the plan does not fit on it."""
        from rldsl.simulate import Lengths, check_lengths, observed_lengths, simulate

        machine = machine_of(cluster)
        given = {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens, "longest": longest}
        _check(given, like is not None)
        if like is not None:
            lengths = observed_lengths(self.record, os.fspath(like))
        else:
            lengths = Lengths(*given.values())
            check_lengths(lengths, indexed_frames(self.record).values(), self.name)
        _check_durations(durations or {})
        return Simulation(self.record, simulate(self.record, machine, lengths, durations), machine, lengths, self.name,
                          durations=dict(durations or {}), peak_bytes=self.memory.bytes)

    @reports_failures
    def report(self, cluster: Machines | None = None, *, trace: str | os.PathLike[str] | None = None) -> Report:
        """The plan as a page: dataflow, time, memory, and why each event is there.

        cluster: what a step is simulated on; None takes as many nodes of h100x8 as the plan needs. trace: a recorded
        timeline of the plan (`rlc run --trace`)."""
        from rldsl.pages import Given, page
        from rldsl.pages.recorded import read
        from rldsl.simulate import simulate

        machine = assumed(self.ranks, self.record.header.devices_per_node) if cluster is None else machine_of(cluster)
        recorded = read(trace_text(os.fspath(trace)), os.fspath(trace), self.record) if trace is not None else None
        given = Given(self.record, self.id, self.compiled.proof, self.compiled.curves, machine, cluster is None,
                      simulate(self.record, machine), recorded=recorded, sources=self.sources)
        return Report(page(given), self.record.header.program)

    @reports_failures
    def run(self, *, out: str | os.PathLike[str] | None = None, resume: bool | str | os.PathLike[str] = False,
            overwrite: bool = False, nproc: int | None = None,
            callbacks: Sequence[Callable[[dict[str, float]], object]] = (), log_samples: int = 0,
            options: Sequence[str] = (), quiet: bool = False) -> Run:
        """Run it on this machine, one process per rank, and return when it has ended.

        out: the directory of the run; None: a new one below `runs`. resume: True continues from the newest checkpoint
        in `out`; a directory is that of a run, or of one of its checkpoints. overwrite: delete an earlier run in
        `out`. nproc: the number of ranks, checked against the plan. callbacks: each is called with the metrics of every
        step, a dict; if it returns True, the run stops after its running step. log_samples: how many sequences of each
        step are kept as text. options: more options of `rldsl.run`, such as "--tensorboard". quiet: print nothing.
        Raises RL0763, RL0781 where `out` holds a run, RunError for a run that fails, and what a callback raised."""
        from rldsl.python.train import start

        return start(self, out=out, resume=resume, overwrite=overwrite, nproc=nproc, callbacks=callbacks,
                     log_samples=log_samples, options=options, quiet=quiet)

    @reports_failures
    def diff(self, after: Plan, cluster: Machines | None = None) -> Difference:
        """What changed from this plan to another. cluster: to predict the time of a step on, too."""
        machine = machine_of(cluster) if cluster is not None else None
        return compared(self.record, after.record, (self.name, after.name), (self.id, after.id), machine)

    def __str__(self) -> str:
        return self.preview()

    def __repr__(self) -> str:
        return f"<rldsl.Plan {self.id}: {self.name}, {self.ranks} ranks, {self.compiled.proof.events} events>"

    def _repr_html_(self) -> str:
        return terminal(self.preview())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows in a terminal."""
        printer.text(self.preview().rstrip("\n"))


def opened(data: bytes, name: str) -> Plan:
    """A plan file's bytes -> the plan, verified again."""
    record = decode(data, name)
    return Plan(Compiled(record, verify(record), curves(record)), name, Path(name).parent)


def _check(lengths: Mapping[str, float], like: bool) -> None:
    """Check the lengths of a simulation. like: they are taken from a run. Errors: RL0205."""
    for name, value in lengths.items():
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise fail("RL0205", f"`{name}` must be a number of tokens, not {value!r}", place=name,
                       help="0 means the maximum that the program allows")
        if like and value:
            raise fail("RL0205", f"`like` takes the lengths from a run; it cannot be combined with `{name}`",
                       place=name, help=f"omit `{name}` or `like`")


def _check_durations(durations: Mapping[str, float]) -> None:
    """Errors: RL0205."""
    for name, seconds in durations.items():
        if not isinstance(seconds, int | float) or not 0 <= seconds <= MOST:
            raise fail("RL0205", f"the duration of `{name}` must be a number of seconds, not {seconds!r}",
                       place=f"duration of {name}", help=f"from 0, which leaves what starting it takes, to {MOST:g}")


def trace_text(trace: str) -> str:
    """Errors: RL0091, RL0092 no such file, RL0098 not text."""
    try:
        return Path(trace).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise fail("RL0091", f"no such file: {trace}", place=trace,
                   help="write one with `rlc run --trace FILE`") from None
    except UnicodeDecodeError:
        raise fail("RL0098", "not a trace file", place=trace, notes=("not UTF-8 text",)) from None
    except OSError as error:
        raise fail("RL0092", f"cannot read {trace}: {error.strerror}", place=trace) from None
