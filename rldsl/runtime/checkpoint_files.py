"""Which checkpoints a directory holds: nothing of them is read.

In: the directory of a run, or of one checkpoint. Out: checkpoints. Imports nothing heavy: who starts a run looks, too,
before it starts a rank.
Errors: RL0760 there is no checkpoint to resume from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rldsl.diag import Failure, fail

MANIFEST = "checkpoint.json"  # the last file that is written: a directory without it is no checkpoint


def checkpoints(out: Path) -> Sequence[Path]:
    """The checkpoints of a run, oldest first."""
    directories = (p for p in (out / "checkpoints").glob("step-*") if p.name[5:].isdecimal())
    return sorted((p for p in directories if (p / MANIFEST).is_file()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name[5:])


def candidates(resume: Path) -> tuple[bool, list[str]]:
    """Whether `resume` is one checkpoint; the checkpoints to try, the newest first."""
    is_checkpoint = (resume / MANIFEST).is_file()
    return is_checkpoint, [str(resume)] if is_checkpoint else [str(path) for path in reversed(checkpoints(resume))]


def none_there(resume: Path, option: str = "`--resume`") -> Failure:
    """RL0760; with the checkpoints of the run, where `resume` should be one of them. option: what the user calls it."""
    near = checkpoints(resume.parent.parent) if resume.parent.name == "checkpoints" else ()
    title = "no checkpoint to resume from" if resume.exists() else "there is no such directory to resume from"
    return fail("RL0760", title, place=str(resume),
                notes=(f"checkpoints of this run: {', '.join(p.name for p in near)}",) if near else (),
                help=f"`checkpoint every K` in the flow writes checkpoints; without {option} the run starts from the "
                     "beginning")
