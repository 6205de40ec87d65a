"""What a run did as a whole: parameters moved, checkpoints written. For a program (`summary.json`) and for a person."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rldsl.diag import counted
from rldsl.plan.events import Loop, Realloc, Save
from rldsl.plan.model import Plan
from rldsl.plan.notation import layout_text
from rldsl.plan.projection import Path as Blocks
from rldsl.plan.projection import event_paths, last_step, times, walk
from rldsl.runtime.files import replace_text, written

SUMMARY = "summary.json"


def summarize(plan: Plan, out: Path, steps: int, made: int, seconds: float) -> dict[str, Any]:
    """steps: done in all; made: of these in this start, which took `seconds` and had the reallocs of `plan`: an earlier
    start may have had another placement. Worked out from the plan, since the rank that writes it need not have taken
    part."""
    meshes, layouts = {m.id: m for m in plan.meshes}, {x.id: x for x in plan.layouts}

    def text(layout: str) -> str:
        return layout_text(layouts[layout], meshes[layouts[layout].mesh])

    moved = [{"model": e.model, "src": text(e.src), "dst": text(e.dst), "bytes": e.bytes, "messages": e.messages,
              "because": e.because, "times": _times(path, steps, made)}
             for e, path in event_paths(plan) if isinstance(e, Realloc)]
    return {"reallocs": moved, "saved": _saved(plan, out, steps), "steps": steps, "made": made,
            "seconds": round(seconds, 3)}


def _times(path: Blocks, steps: int, made: int) -> int:
    """How often an event inside these blocks was executed in the last `made` of `steps` steps. The outermost block is
    the loop of steps; an event outside of it is executed once."""
    if not path or not isinstance(path[0], Loop):
        return times(path)
    outer, within = path[0], path[1:]
    return times((replace(outer, trips=steps), *within)) - times((replace(outer, trips=steps - made), *within))


def _saved(plan: Plan, out: Path, steps: int) -> list[str]:
    """The last directory that each save event wrote; of a run that was stopped, those that are there."""
    last = sorted({item.path.replace("{out}", str(out)).replace("{step}", str(last_step(path)))
                   for item, path in walk(plan.body) if isinstance(item, Save) and last_step(path)})
    return last if steps == plan.header.steps else [path for path in last if Path(path).exists()]


def write_summary(plan: Plan, out: Path, summary: dict[str, Any]) -> None:
    with written(out / SUMMARY):
        replace_text(out / SUMMARY, json.dumps(summary, indent=2) + "\n")
    print(f"{plan.header.flow}: {counted(summary['made'], 'step')} in {summary['seconds']:.1f} s", file=sys.stderr)
    for move in summary["reallocs"]:
        print(f"  realloc {move['model']}  {move['src']} -> {move['dst']}  {move['times']} x {move['bytes']:,} bytes: "
              f"{move['because']}", file=sys.stderr)
    for path in summary["saved"]:
        print(f"  saved {path}", file=sys.stderr, flush=True)
