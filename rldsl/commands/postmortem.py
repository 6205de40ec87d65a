"""`rlc postmortem`: why a run hung, from what its ranks left.

In: the directory of a run, or its `postmortem` folder; a plan, where it lies elsewhere. Out: text, or JSON.
Errors: RL0794 a file that is no dump, RL0795 no dumps, RL0796 dumps of several plans or starts, RL0797 their plan is
not there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rldsl.diag import fail
from rldsl.plan.codec import decode, plan_id
from rldsl.plan.json_output import json_output
from rldsl.plan.model import Plan
from rldsl.plan.naming import describe_event, labelled
from rldsl.plan.visible_plan import visible_plan
from rldsl.postmortem.analysis import Findings, analyze, rank_traces
from rldsl.postmortem.dumps import (
    FOLDER,
    LAST_HEARTBEATS,
    EventRun,
    Heartbeat,
    LastHeartbeats,
    RankDump,
    RankPosition,
    RingEntry,
    not_a_dump,
    read_dump,
    read_last_heartbeats,
)
from rldsl.postmortem.findings_text import report, title
from rldsl.postmortem.wait_order import WaitOrder
from rldsl.runtime.metrics.run_record import PLAN


def postmortem(directory: str, plan: str | None = None, as_json: bool = False) -> str:
    """What is known of the run's end. plan: a file, if the run's own is not next to the dumps."""
    folder = Path(directory)
    folder = folder / FOLDER if os.path.isdir(folder / FOLDER) else folder
    dumps, signs = _dumps(folder), _signs(folder)
    _same(folder, [*dumps.values(), *([signs] if signs else [])])
    found = _plan(folder, plan, next(iter(dumps.values())))
    _fits(folder, found, [*dumps.values(), *([signs] if signs else [])])
    last: dict[int, Heartbeat] = dict(signs.signs) if signs else {}
    shown = labelled(found) if as_json else visible_plan(found)
    findings = analyze(shown, rank_traces(found.header.world, dumps, last))
    return _json(shown, findings) if as_json else report(shown, findings)


def _dumps(folder: Path) -> dict[int, RankDump]:
    if not os.path.isdir(folder):
        raise fail("RL0795", f"no such directory: {folder}", place=str(folder),
                   help="`rlc runs DIR` lists the runs below a directory")
    dumps: dict[int, RankDump] = {}
    for file in sorted(folder.glob("rank-*.json")):
        dump = read_dump(_text(file), str(file))
        if file.name != _name(dump) or not 0 <= dump.rank < dump.world:
            raise not_a_dump(str(file), f"it is the dump of rank {dump.rank} of {dump.world}")
        dumps[dump.rank] = dump
    if not dumps:
        raise fail("RL0795", "no dumps found", place=str(folder),
                   help=f"ranks write dumps to DIR/{FOLDER} when a run fails; the next start deletes them")
    return dumps


def _signs(folder: Path) -> LastHeartbeats | None:
    file = folder / LAST_HEARTBEATS
    return read_last_heartbeats(_text(file), str(file)) if file.exists() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise not_a_dump(str(file), getattr(error, "strerror", None) or "not UTF-8 text") from None


def _same(folder: Path, left: Sequence[RankDump | LastHeartbeats]) -> None:
    """All of one start of one plan."""
    for what in ("plan", "start", "world"):
        groups: dict[object, list[str]] = {}
        for one in left:
            if hasattr(one, what):
                groups.setdefault(getattr(one, what), []).append(_name(one))
        if len(groups) > 1:
            more = {key: " ..." if len(names) > 6 else "" for key, names in groups.items()}
            raise fail("RL0796", f"these dumps are not from the same {what}", place=str(folder),
                       notes=tuple(f"{what} {key}: {', '.join(names[:6])}{more[key]}" for key, names in groups.items()),
                       help="keep only the dumps of one run")


def _plan(folder: Path, given: str | None, dump: RankDump) -> Plan:
    names = [Path(given)] if given else [folder.parent / PLAN, folder / PLAN]
    other = ""
    for file in names:
        try:
            data = file.read_bytes()
        except OSError:
            continue
        if plan_id(data) == dump.plan:
            return decode(data, str(file))
        other = f"; {file} is plan {plan_id(data)}"
    raise fail("RL0797", f"the plan {dump.plan} of these dumps was not found{other}", place=str(names[0]),
               help="pass it with `--plan FILE`")


def _fits(folder: Path, plan: Plan, left: Sequence[RankDump | LastHeartbeats]) -> None:
    """What the ranks speak of is in the plan."""
    events = WaitOrder(plan).events
    for one in left:
        entries: tuple[RingEntry, ...] = ()
        if isinstance(one, LastHeartbeats):
            positions, last = [sign.position for _, sign in one.signs], max((r for r, _ in one.signs), default=0)
        else:
            positions, entries, last = [one.position], one.ring, one.world - 1
        spoken_of: tuple[RankPosition | RingEntry, ...] = (*positions, *entries)
        spoken = [at for x in spoken_of for at in (x.at, x.awaits) if at is not None]
        if last >= plan.header.world or any(at.event not in events for at in spoken):
            raise not_a_dump(str(folder / _name(one)), "it refers to something that its plan does not have")


def _name(one: RankDump | LastHeartbeats) -> str:
    return LAST_HEARTBEATS if isinstance(one, LastHeartbeats) else f"rank-{one.rank}.json"


def _json(plan: Plan, findings: Findings) -> str:
    events = findings.order.events

    def moment(at: EventRun | None) -> dict[str, Any] | None:
        if at is None:
            return None
        event = events[at.event]
        return {"event": at.event, "turns": list(at.turns), "call": describe_event(event).title, "at": event.at,
                "because": event.because}

    def position_json(found: RankPosition | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return asdict(found) | {"at": moment(found.at), "awaits": moment(found.awaits)}

    ranks = [{"rank": t.rank, "position": position_json(t.position), "dump": t.dump, "silent": t.silent,
              "process": t.process, "first": t.first, "code": t.code, "reason": t.reason} for t in findings.traces]
    waits = [{"ranks": list(w.ranks), "on": list(w.on), "at": moment(w.at), "kind": w.kind} for w in findings.waits]
    culprits = [asdict(c) for c in findings.culprits]
    return json_output({"format": 1, "program": plan.header.program, "title": title(findings), "culprits": culprits,
                       "waits": waits, "ranks": ranks}) + "\n"
