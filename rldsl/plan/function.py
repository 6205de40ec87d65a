"""A user's Python function, as a plan names it. By itself, for the processes that call it load little else."""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.plan.expr import Level


@dataclass(frozen=True, slots=True)
class Function:
    """The compiler records the hashes and never imports the file."""

    id: str
    # of the file, relative to the working directory
    path: str
    # of the function in it
    name: str
    # of the file's bytes
    sha256: str
    returns: Level = "seq"
    # (name, path, sha256) of the local modules that the file imports (`plan/local_modules.py`)
    modules: tuple[tuple[str, str, str], ...] = ()
