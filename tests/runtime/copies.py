"""A rank that runs a plan in a folder of its own, as on a machine with copies of the files."""

from __future__ import annotations

import os
from pathlib import Path

from rldsl.runtime.interpreter.options import Options


def said_in_copy(rank: int, data: bytes, folders: list[str], options: Options | None = None) -> str:
    """The errors of the rank, "" if the run ends; "another rank" if only others had some. data: the plan. folders: of
    each rank; the run's own is in the first."""
    from rldsl.diag import Failure
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(folders[rank])
    try:
        execute(PlanFile.from_bytes(data, "p.plan"), Path(folders[0]) / "out", options=options or Options())
    except Failure as failure:
        return " ".join(f"{d.code} {d.place} {d.title}" for d in failure.diagnostics) or "another rank"
    return ""
