"""A user's Python function, as a plan names it. By itself, for the processes that call it load little else."""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.plan.expr import Level


@dataclass(frozen=True, slots=True)
class Function:
    """The compiler records the hash and never imports the file."""

    id: str
    path: str
    name: str
    sha256: str
    returns: Level = "seq"
