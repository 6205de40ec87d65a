"""The directory of a run says what the run is: `run.json`, `run.plan`, `sources/`.

In: a plan and how it was started. Out: files that another person can tell the run by, and begin it again from; for the
commands, what a directory holds. Imports nothing heavy, since the command line reads it too.
Invariant: a run that is going on or finished, and a run's checkpoints, are never overwritten unasked.
Errors: RL0763 the directory holds checkpoints, RL0781 it holds a run.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rldsl.diag import fail
from rldsl.plan.codec import plan_id
from rldsl.plan.model import Plan
from rldsl.runtime.files import written
from rldsl.runtime.reward import located

RECORD, PLAN, SOURCES = "run.json", "run.plan", "sources"
RUNNING, FINISHED, FAILED, STOPPED = "running", "finished", "failed", "stopped"
# what a run writes, besides models, which may lie anywhere and are replaced by the next save, and logs, which each rank
# begins anew
OWN = (RECORD, PLAN, SOURCES, "metrics.jsonl", "summary.json", "samples", "tensorboard", "wandb", "checkpoints")
PACKAGES = ("rldsl", "torch", "transformers")


def read(out: Path) -> dict[str, Any] | None:
    """The record of the run in a directory; None where there is none. A process that is gone has failed."""
    try:
        held = json.loads((out / RECORD).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(held, dict) or "state" not in held:
        return None
    gone = held["state"] == RUNNING and held.get("host") == socket.gethostname() and not _alive(held.get("pid", 0))
    return held | {"state": FAILED} if gone else held


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError, TypeError, ValueError):  # another user's, or no process number at all
        return True
    return True


def refuse(out: Path) -> None:
    """Where a new run must not begin."""
    held = read(out)
    if held is not None and held["state"] in (RUNNING, FINISHED):
        what = "a run that is going on" if held["state"] == RUNNING else "a finished run"
        ways = "`--resume` goes on from its last checkpoint" if has_checkpoints(out) else ""
        raise fail("RL0781", f"this directory holds {what}", place=str(out), notes=(_told(held),), help="; ".join(
            x for x in ("`--out` names another directory", ways, "`--overwrite` removes it") if x))
    if has_checkpoints(out):
        raise fail("RL0763", "this directory holds the checkpoints of an earlier run", place=str(out),
                   help="`--resume` goes on from the last one; `--out` names another directory; "
                   "`--overwrite` removes them")


def _told(held: dict[str, Any]) -> str:
    return f"{held.get('program', 'unknown')}, begun {held.get('started', 'at an unknown time')}"


def has_checkpoints(out: Path) -> bool:
    return any((out / "checkpoints").glob("step-*/checkpoint.json"))


def claim(out: Path, resume: str | Path | None, again: bool, overwrite: bool) -> bool:
    """That a run may write in `out`. resume: where it goes on from. again: torchrun has started it before. Whether it
    goes on in `out`."""
    if again:
        return True
    goes_on = resume is not None and Path(resume).resolve().is_relative_to(out.resolve())
    held = read(out)
    if goes_on and held is not None and held["state"] == RUNNING and held.get("host") == socket.gethostname():
        raise fail("RL0781", "this directory holds a run that is going on", place=str(out), notes=(_told(held),),
                   help="wait until it has ended; `kill -TERM` ends one with checkpoints after its step")
    if not goes_on and not overwrite:
        refuse(out)
    return goes_on


def clear(out: Path) -> None:
    """Remove the files of an earlier run; models that it saved stay."""
    with written(out):
        for name in OWN:
            path = out / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


class Record:
    """`run.json` of the run under way, kept by rank 0."""

    def __init__(self, out: Path, plan: Plan, data: bytes, devices: Sequence[str], command: Sequence[str], again: bool):
        """data: the bytes of the plan file. devices: of this rank's machine. again: the run goes on from before."""
        self._file = out / RECORD
        earlier = (read(out) or {}) if again else {}
        header, now = plan.header, _now()
        self._held = {
            "program": header.program, "flow": header.flow, "state": RUNNING, "step": 0, "steps": header.steps,
            "started": earlier.get("started", now), "ended": "",
            "resumed": [*earlier.get("resumed", []), *([now] if earlier else [])],
            "plan": plan_id(data), "seed": header.seed, "params": dict(header.params),
            "world": header.world, "devices": list(devices), "host": socket.gethostname(), "pid": os.getpid(),
            "command": list(command),
            "versions": versions(), "sources": _copied(out / SOURCES, _files(plan)),
        }
        with written(out / PLAN):
            (out / PLAN).write_bytes(data)
        self._write()

    def end(self, state: str, step: int) -> None:
        self._held |= {"state": state, "step": step, "ended": _now()}
        self._write()

    def _write(self) -> None:
        """Beside its name and renamed, so that a reader finds a whole one."""
        with written(self._file):
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(self._held, indent=1) + "\n")
            os.replace(partial, self._file)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _files(plan: Plan) -> dict[str, tuple[str, Path]]:
    """Name in the plan -> sha256 and place, of programs and Python files. The library's own come with its version."""
    named = [*plan.header.sources, *((f.path, f.sha256) for f in plan.functions)]
    return {path: (digest, located(path)) for path, digest in named}


def _copied(folder: Path, files: dict[str, tuple[str, Path]]) -> list[dict[str, str]]:
    """Copy the files that are still those of the plan. Of each: its path, its hash, and its name under sources/ (""
    where it has changed or is not here)."""
    found = []
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
        found.append({"path": path, "sha256": digest, "copy": name})
    return found


def runs(folder: Path) -> Iterable[tuple[Path, dict[str, Any]]]:
    """Every run below a directory, the one that began last first."""
    found = [(file.parent, held) for file in sorted(folder.rglob(RECORD)) if (held := read(file.parent)) is not None]
    return sorted(found, key=lambda x: str(x[1].get("started", "")), reverse=True)
