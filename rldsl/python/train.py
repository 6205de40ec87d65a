"""Train from Python: a program is compiled and run on this machine, while callbacks follow it.

In: a program, values, Python functions, callbacks. Out: a `Run`. The ranks are separate processes, as with
`rlc run`; callbacks get a copy of each line of metrics in this process, so they can stop a run and cannot change its
numbers.
Errors: those of compiling; RL0099 an argument of another kind; RL0760 there is no checkpoint to resume from; RL0763,
RL0781 the directory holds a run; `RunError` for a run that fails; `RunInterrupted`, a KeyboardInterrupt, after Ctrl-C.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rldsl.diag import Failure, fail
from rldsl.plan.metrics_file import METRICS, read
from rldsl.python.arguments import check_run_arguments
from rldsl.python.entry import Param, Program, compile
from rldsl.python.errors import reports_failures
from rldsl.python.origins import in_own_places
from rldsl.python.plan import Plan
from rldsl.python.redirect import Redirection, Rewards
from rldsl.python.runs import Run
from rldsl.python.start import EARLY, launch
from rldsl.runtime.metrics.default_output import free_output
from rldsl.runtime.metrics.run_record import (
    FINISHED,
    INTERRUPTED,
    PYTHON,
    PYTHON_CALL,
    STOPPED,
    claim_output,
    is_own_checkpoint,
    read_record,
    refuse_without_checkpoint,
)

LAST = 20  # lines of a run that failed without a message
COLORS = re.compile(r"\x1b\[[0-9;]*m")
Callback = Callable[[dict[str, float]], object]


class RunError(Exception):
    """A run that failed. Its text is what the ranks reported; IPython shows that text instead of a traceback."""

    def __init__(self, text: str, run: Run):
        super().__init__(text)
        self.run = run  # what is left of it: metrics, log files, checkpoints

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C, which has stopped a run. Its text says where, and how to resume; IPython shows that text alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@reports_failures
def train(program: Program, params: Mapping[str, Param] | None = None, /, *, place: Program | None = None,
          on: str | Sequence[str] = (), rewards: Rewards | None = None, out: str | os.PathLike[str] | None = None,
          resume: bool | str | os.PathLike[str] = False, overwrite: bool = False, nproc: int | None = None,
          callbacks: Sequence[Callback] = (), log_samples: int = 0, options: Sequence[str] = (), quiet: bool = False,
          **named: Param) -> Run:
    """Compile a program and run it on this machine, one process per rank. Returns when the run has ended.

    params, place, on, rewards, named: as for `compile`. The other arguments are those of `Plan.run`.
    Raises DiagnosticError for mistakes, RunError for a run that fails."""
    check_run_arguments(out, resume, nproc, callbacks, log_samples, options)
    plan = compile(program, params, place=place, on=on, rewards=rewards, **named)
    return start(plan, out=out, resume=resume, overwrite=overwrite, nproc=nproc, callbacks=callbacks,
                 log_samples=log_samples, options=options, quiet=quiet)


def start(plan: Plan, *, out: str | os.PathLike[str] | None = None, resume: bool | str | os.PathLike[str] = False,
          overwrite: bool = False, nproc: int | None = None, callbacks: Sequence[Callback] = (), log_samples: int = 0,
          options: Sequence[str] = (), quiet: bool = False) -> Run:
    """`Plan.run`, which documents the arguments."""
    check_run_arguments(out, resume, nproc, callbacks, log_samples, options)
    world = plan.ranks
    if nproc not in (None, world):
        raise fail("RL0096", f"the plan is for {world} rank{'s' * (world > 1)}, not {nproc}", place="nproc",
                   help=f"omit nproc, or pass nproc={world}; meshes and degrees of the program decide how many ranks "
                        "there are")
    if resume is True and out is None:
        raise fail("RL0783", "resume=True needs the directory of the run", place="resume",
                   help="pass out=DIR, or resume=DIR")
    folder = Path(out if out is not None else resume if isinstance(resume, str | os.PathLike) else
                  free_output(plan.name if plan.name.endswith((".rlf", ".plan")) else plan.record.header.program))
    origin = None if resume is False else folder if resume is True else Path(resume)
    if overwrite and origin and is_own_checkpoint(folder, origin):
        raise fail("RL0099", "resume continues the run in this directory, and overwrite=True deletes it",
                   place=str(folder), help="pass one of them")
    claim_output(folder, origin, overwrite=overwrite, options=PYTHON)
    refuse_without_checkpoint(origin, PYTHON)
    follower = _Follower(folder, callbacks, quiet, 0 if origin is None else _last_step(folder), plan.redirection)
    more = ["--plain", "--command", PYTHON_CALL, *([f"--resume={origin}"] if origin else []),
            *(["--overwrite"] if overwrite else []), *([f"--log-samples={log_samples}"] if log_samples else []),
            *options]
    with tempfile.TemporaryDirectory(prefix="rldsl-") as temporary:
        path = plan.save(Path(temporary) / f"{Path(plan.name).stem.strip('<>') or 'program'}.plan")
        try:
            status = launch(str(path), world, str(folder), more, follower=follower)
        except KeyboardInterrupt:
            raise RunInterrupted(follower.interruption() or f"interrupted {EARLY}") from None
    if follower.error is not None:
        raise follower.error
    run, state = Run(folder), (read_record(folder) or {}).get("state")
    if status and not (follower.stopped and state in (STOPPED, FINISHED)):
        raise RunError(follower.errors() or f"the run in {folder} failed with exit status {status}", run)
    return run


def _last_step(folder: Path) -> int:
    with suppress(FileNotFoundError):
        lines = read(folder / METRICS)
        return int(lines[-1]["step"]) if lines else 0
    return 0


def _is_true(answer: object) -> bool:
    """Whether a callback asks to stop: with True, also one of numpy or torch, which comparisons of their numbers give.
    Other answers mean nothing, since functions that log return all kinds of things."""
    if str(getattr(answer, "dtype", "")) in ("bool", "torch.bool") and getattr(answer, "shape", None) == ():
        return bool(answer)
    return answer is True


class _Follower:
    """Prints what the ranks print, and calls the callbacks with each new line of metrics."""

    def __init__(self, folder: Path, callbacks: Sequence[Callback], quiet: bool, seen: int,
                 redirection: Redirection):
        """seen: the last step whose line is there already. redirection: to functions of the caller, whose places
        messages name."""
        self._redirection = redirection
        self._file, self._callbacks, self._quiet, self._seen = folder / METRICS, callbacks, quiet, seen
        self._size = -1  # bytes of the file when it was read last
        self._output: list[str] = []
        self.stopped = False                     # whether a callback ended the run
        self.error: BaseException | None = None  # that a callback raised

    def line(self, text: str) -> None:
        text = in_own_places(text, self._redirection)
        self._output.append(text)
        if not self._quiet:
            print(text)

    def errors(self) -> str:
        """The messages of the ranks about their failure; without one, the last lines that they printed."""
        lines = [COLORS.sub("", text) for text in self._output]  # the kernel of a notebook asks for them
        first = next((i for i, text in enumerate(lines) if text.startswith(("error[", "internal error"))), -LAST)
        return "\n".join(lines[first:]).strip()

    def interruption(self) -> str:
        """Where the run was when Ctrl-C stopped it, as a rank has printed it; "" if none has."""
        return next((text for text in reversed(self._output) if text.startswith(f"{INTERRUPTED} ")), "")

    def tick(self) -> bool:
        try:
            size = self._file.stat().st_size
            if size == self._size or self.error is not None:
                return self.stopped
            self._size = size
            lines = [line for line in read(self._file) if line["step"] > self._seen]
        except (FileNotFoundError, Failure):  # not there yet, or being cut back to the checkpoint that the run resumes
            return self.stopped
        for line in lines:
            self._seen = int(line["step"])
            self._call(line)
        return self.stopped

    def _call(self, line: dict[str, float]) -> None:
        for callback in self._callbacks:
            try:
                if _is_true(callback(dict(line))):
                    self.stopped = True
            except Exception as error:  # the run ends in order first
                self.error, self.stopped = error, True
                return
