"""The files of a post-mortem, under `OUT/postmortem`.

In: dumps and heartbeats. Out: one small JSON file per rank, complete or not there. A dump that the disk refuses is
lost: it must not keep a rank from ending.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rldsl.postmortem.dumps import FOLDER, LAST_HEARTBEATS, LastHeartbeats, RankDump, dump_text


def write_dump(out: Path, left: RankDump | LastHeartbeats) -> bool:
    """Write a dump under another name, then rename it. Whether the disk took it."""
    name = LAST_HEARTBEATS if isinstance(left, LastHeartbeats) else f"rank-{left.rank}.json"
    partial = out / FOLDER / f".{name}.partial"
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(dump_text(left), encoding="utf-8")
        os.replace(partial, out / FOLDER / name)
    except OSError:
        return False
    return True


def remove_dumps(out: Path) -> None:
    """Remove what an earlier start left."""
    shutil.rmtree(out / FOLDER, ignore_errors=True)
