"""The directory of a run says what the run is: `run.json`, `run.plan`, `sources/`.

In: a plan and how it was started. Out: files that another person can tell the run by, and begin it again from; for the
commands, what a directory holds. Imports nothing heavy, since the command line reads it too.
Invariant: a running or finished run, the metrics of one that was stopped, and the checkpoints of a run are never
overwritten unless the user asks for it.
Errors: RL0708 a link in the directory leads out of it, RL0760 there is no checkpoint to resume from, RL0763 the
directory holds checkpoints, RL0780 another process owns it, RL0781 it holds a run.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import Any

from rldsl.diag import fail
from rldsl.plan.disk_paths import shown
from rldsl.plan.metrics_file import METRICS
from rldsl.plan.model import Plan
from rldsl.runtime.checkpoint_files import candidates, checkpoints, none_there, step_of
from rldsl.runtime.files import refuse_links_out, replace_text, written
from rldsl.runtime.metrics.run_lock import born, is_alive, refuse_owned
from rldsl.runtime.plan_file import PlanFile
from rldsl.runtime.rewards.user_functions import function_path

RECORD, PLAN, SOURCES = "run.json", "run.plan", "sources"
RUNNING, FINISHED, FAILED, STOPPED = "running", "finished", "failed", "stopped"
INTERRUPTED, TERMINATED = "interrupted", "terminated"  # what Ctrl-C and SIGTERM do to a run
STATES = (RUNNING, FINISHED, FAILED, STOPPED)
DAMAGED = "damaged"  # of a record that cannot be read
# states of runs that are not overwritten unasked
KEPT = {RUNNING: "an active run", FINISHED: "a finished run", DAMAGED: "a run whose run.json is damaged"}
STOPPED_RUN = "a run that was stopped"  # kept, too, once a step has metrics: a callback may have ended it on purpose
# of the fields that are read again
TYPES: Mapping[str, type | UnionType] = {
    "program": str, "flow": str, "step": int, "steps": int, "started": str, "ended": str, "resumed": list,
    "host": str, "pid": int, "born": str | None, "params": dict, "seed": int, "world": int}
# what a run writes, besides models, which may lie anywhere and are replaced by the next save, and logs, which each rank
# begins anew
RUN_FILES = (RECORD, PLAN, SOURCES, "metrics.jsonl", "histograms.jsonl", "tables", "summary.json", "samples",
             "tensorboard", "wandb",
             "trackers", "profile", "checkpoints/step-[0-9]*", "checkpoints/.step-[0-9]*.partial",
             "failed-batch-step-[0-9]*")
# everything that a run writes in its directory, besides checkpoints and models, which replace whole directories; a file
# that replaces another is first written next to it, as .NAME.partial
WRITTEN = (RECORD, PLAN, f"{SOURCES}/*", "metrics.jsonl", "histograms.jsonl", "tables/*", "summary.json", "samples/*",
           "tensorboard", "wandb/id", "trackers/*", "profile/*", "log/*", "postmortem/*", "failed-batch-step-*/*",
           ".*.partial")
LOG = re.compile(r"rank-(\d+)\.log")
CONTRADICTION = "--resume continues the existing run and --overwrite deletes it: use one of them"
PACKAGES = ("rldsl", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How whoever starts a run writes the options that decide about an earlier one."""

    out: str        # chooses the directory
    resume: str     # continues the run
    overwrite: str  # deletes it


COMMAND_LINE = RunOptions("`--out`", "`--resume`", "`--overwrite`")
PYTHON = RunOptions("`out=`", "`resume=True`", "`overwrite=True`")
PYTHON_CALL = "rldsl.Plan.run"  # the command of a run that was started from Python


def read_record(out: Path, owned: bool = False) -> dict[str, Any] | None:
    """The record of the run in a directory; None where there is none, and of a damaged one only the state `DAMAGED`.
    A run whose process is gone has failed. owned: this process holds the directory's lock, so that no process on
    another host runs there."""
    try:
        record = json.loads((out / RECORD).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError):
        return {"state": DAMAGED}
    if not isinstance(record, dict) or record.get("state") not in STATES:
        return {"state": DAMAGED}
    if any(name in record and not isinstance(record[name], kind) for name, kind in TYPES.items()):
        return {"state": DAMAGED}
    if record["state"] == RUNNING:
        on_this_host = record.get("host") == socket.gethostname()
        if not is_alive(record.get("pid", 0), record.get("born")) if on_this_host else owned:
            return record | {"state": FAILED}
    return record


def refuse_existing_run(out: Path, owned: bool = False, options: RunOptions = COMMAND_LINE) -> None:
    """Where a new run must not begin. owned: as for `read_record`."""
    record = read_record(out, owned)
    state_text = KEPT.get(record["state"], STOPPED_RUN if _keeps_metrics(out, record) else "") if record else ""
    if record and state_text:
        ways = f"use {options.resume} to continue from its last checkpoint" if last_checkpoint(out) is not None else ""
        raise fail("RL0781", f"this directory contains {state_text}", place=str(out), notes=(_run_description(record),),
                   help="; ".join(x for x in (f"use {options.out} to choose another directory", ways,
                                              f"use {options.overwrite} to delete it") if x))
    refuse_checkpoints(out, options)


def _keeps_metrics(out: Path, record: Mapping[str, Any]) -> bool:
    """Whether this is a run that was stopped after a step."""
    file = out / METRICS
    return record["state"] == STOPPED and file.is_file() and file.stat().st_size > 0


def refuse_checkpoints(out: Path, options: RunOptions = COMMAND_LINE) -> None:
    """Refuse a directory with checkpoints that the run does not resume from."""
    step = last_checkpoint(out)
    if step is not None:
        program = (read_record(out) or {}).get("program", "of an unknown program")
        raise fail("RL0763", f"this directory contains checkpoints ({program}, step {step})", place=str(out),
                   help=f"use {options.resume} to continue from the last one, {options.out} to choose another "
                        f"directory, or {options.overwrite} to delete them")


def refuse_without_checkpoint(resume: Path | None, options: RunOptions = COMMAND_LINE) -> None:
    """Check that a run finds a checkpoint before its ranks start; they look again, since torchrun starts them without
    this, and read it. resume: None: the run begins anew."""
    if resume is not None and not candidates(resume)[1]:
        raise none_there(resume, options.resume)


def _run_description(record: dict[str, Any]) -> str:
    return shown(f"{record.get('program', 'unknown')}, started {record.get('started', 'at an unknown time')}")


def last_checkpoint(out: Path) -> int | None:
    """The step of the newest checkpoint; None if there is none."""
    return max(map(step_of, checkpoints(out)), default=None)


def interruption_text(out: Path, step: int, steps: int, command: Sequence[str], what: str = INTERRUPTED) -> str:
    """Where a run was when a signal stopped it, and the command that resumes it. command: what the user typed; of
    several words where that is not known, as under torchrun. what: `TERMINATED`: a run that writes no checkpoints,
    by SIGTERM."""
    where, saved = f"{what} in step {max(step, 1)} of {steps}", last_checkpoint(out)
    in_python = tuple(command) == (PYTHON_CALL,)
    overwrite = PYTHON.overwrite.strip("`") if in_python else COMMAND_LINE.overwrite.strip("`")
    again = f"start again with {overwrite}" if _keeps_metrics(out, {"state": STOPPED}) else "start again"
    if saved is None and what == TERMINATED:
        return (f"{where}; no checkpoint was saved, because the flow has no `checkpoint every K`: add it to resume "
                f"from such a stop, and {again}")
    if saved is None:
        return f"{where}; there is no checkpoint to resume from (`checkpoint every K` writes them): {again}"
    if in_python:
        again = f'the same call with out="{out}", resume=True'
    else:
        again = resume_command(command[0], out) if len(command) == 1 else "the same command with --resume"
    return f"{where}; to resume after step {saved}: {again}"


def resume_command(typed: str, out: Path) -> str:
    """`rlc run ...` as typed, resuming the run in `out`."""
    words: list[str] = []
    before = ""
    for word in shlex.split(typed):
        value = before == "--out" or before == "--resume" and not word.startswith("-") and not is_program(word)
        if not value and not word.startswith(("--out", "--resume", "--overwrite")):
            words.append(word)
        before = word
    return shlex.join([*words, "--out", str(out), "--resume"])


def is_program(word: str) -> bool:
    return word.endswith((".rlf", ".plan"))


def is_own_checkpoint(out: Path, resume: Path) -> bool:
    """Whether the run resumes from the run in `out`, or from a checkpoint of it."""
    place, own = Path(os.path.realpath(resume)), Path(os.path.realpath(out))
    return place in (own, own / "checkpoints") or place.parent == own / "checkpoints"


@dataclass(frozen=True, slots=True)
class OutputClaim:
    """How a run takes its directory."""

    resume: Path | None  # the checkpoint that the run resumes from, if any
    # True: what is in the directory belongs to this run and stays. False: the run starts anew there, and what an
    # earlier run left is removed
    continues: bool


def claim_output(out: Path, resume: Path | None, again: bool = False, overwrite: bool = False,
                 owned: bool = False, options: RunOptions = COMMAND_LINE) -> OutputClaim:
    """Check that a run may write in `out`. resume: what the user wants to resume from. again: torchrun has started the
    run before, and it has had its directory. owned: as for `read_record`. options: what messages call the options.
    Errors: RL0708, RL0763, RL0780, RL0781."""
    refuse_links_out(out, WRITTEN)
    if again:
        return OutputClaim(resume if last_checkpoint(out) is None else out, True)
    if not owned:
        refuse_owned(out)
    record = read_record(out, owned)
    continues = resume is not None and is_own_checkpoint(out, resume)
    if record is not None and record["state"] == RUNNING and record.get("host") == socket.gethostname() and \
            (continues or overwrite):
        raise fail("RL0781", "this directory contains an active run", place=str(out), notes=(_run_description(record),),
                   help="wait until it has finished; `kill -TERM` stops a run with checkpoints after the current step")
    if not continues and not overwrite:
        refuse_existing_run(out, owned, options)
    return OutputClaim(resume, continues)


def remove_earlier_run(out: Path, world: int) -> None:
    """Remove the files of an earlier run, if one was here; models that it saved stay. world: ranks of the run that
    begins; their logs are begun anew by themselves."""
    if not (out / RECORD).exists() and last_checkpoint(out) is None:
        return  # `samples/` or `sources/` may be the user's own
    with written(out):
        for path in (path for name in RUN_FILES for path in out.glob(name)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        with suppress(OSError):  # a link, or something else is in it
            (out / "checkpoints").rmdir()
        for path in (out / "log").glob("rank-*.log"):
            if (rank := LOG.fullmatch(path.name)) and int(rank[1]) >= world:
                path.unlink(missing_ok=True)


class RunRecord:
    """`run.json` of the current run, written by rank 0."""

    def __init__(self, out: Path, file: PlanFile, plan: Plan, devices: Sequence[str], command: Sequence[str],
                 continues: bool):
        """plan: as it is executed, which `--allow-changed-python` may have changed. devices: of this rank's machine.
        continues: the run continues the one that is there."""
        self._file = out / RECORD
        self._lock = threading.Lock()  # the watchdog ends a record too, from its own thread
        earlier = (read_record(out) or {}) if continues else {}
        header, now = plan.header, _now()
        self._held = {
            "program": header.program, "flow": header.flow, "state": RUNNING, "step": 0, "steps": header.steps,
            "started": earlier.get("started", now), "ended": "",
            "resumed": [*earlier.get("resumed", []), *([now] if earlier else [])],
            "plan": file.id, "seed": header.seed, "params": dict(header.params),
            "world": header.world, "devices": list(devices), "host": socket.gethostname(), "pid": os.getpid(),
            "born": born(os.getpid()), "command": list(command),
            "versions": dict(versions()), "sources": _copied(out / SOURCES, _files(plan)),
        }
        with written(out / PLAN):
            (out / PLAN).write_bytes(file.data)
        self._write()

    def end(self, state: str, step: int, exact: bool | None = True) -> None:
        """Of a run that a signal stops, the main thread may see that other ranks are gone, which is no failure: the
        state "stopped" stays. exact: False if the clock decided anything of what was computed; None if that is not
        known."""
        with self._lock:
            if self._held["state"] != STOPPED:
                self._held |= {"state": state, "step": step, "ended": _now(), "exact": exact}
                self._write()

    def _write(self) -> None:
        """Under another name, then renamed, so that a reader finds a complete file."""
        with written(self._file):
            replace_text(self._file, json.dumps(self._held, indent=1) + "\n")


@cache
def versions() -> Mapping[str, str]:
    """Of Python and of the packages that a run depends on."""
    result = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            result[name] = "unknown"
    return result


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _files(plan: Plan) -> dict[str, tuple[str, Path]]:
    """Name in the plan -> sha256 and place, of programs and Python files. The library's own come with its version."""
    named = [*plan.header.sources, *((f.path, f.sha256) for f in plan.functions)]
    modules = {path: (digest, Path(os.path.realpath(path))) for f in plan.functions for _, path, digest in f.modules}
    return {path: (digest, function_path(path)) for path, digest in named} | modules


def _copied(folder: Path, files: dict[str, tuple[str, Path]]) -> list[dict[str, str]]:
    """Copy the files that are still those of the plan. Of each: its path, its hash, and its name under sources/ (""
    where it has changed or is not here)."""
    result = []
    for path, (digest, place) in files.items():
        try:
            text = place.read_bytes() if place.is_file() and place.suffix in (".rlf", ".py") else b""
        except OSError:
            text = b""
        same = sha256(text).hexdigest() == digest
        name = f"{digest[:12]}-{place.name}" if same else ""
        if same:
            with written(folder / name):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(text)
        result.append({"path": path, "sha256": digest, "copy": name})
    return result


def runs(folder: Path) -> Iterable[tuple[Path, dict[str, Any]]]:
    """Every run below a directory, the one that began last first."""
    # os.walk passes over directories that cannot be read or that vanish while it looks; rglob raises
    places = sorted(Path(place) for place, _, files in os.walk(folder) if RECORD in files)
    records = [(place, record) for place in places if (record := read_record(place)) is not None]
    return sorted(records, key=lambda x: str(x[1].get("started", "")), reverse=True)
