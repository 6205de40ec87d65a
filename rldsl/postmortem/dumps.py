"""What ranks write when a run fails: records, and their JSON.

A rank that still runs writes a `RankDump`; of a rank that cannot, the others know its last `Heartbeat`. Invariant:
`read_dump(dump_text(d)) == d`, and what does not have this form is refused, never half understood.
Errors: RL0794 the text is not a dump of this format.
"""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rldsl.diag import Failure, fail

FORMAT = 2
FOLDER, LAST_HEARTBEATS = "postmortem", "signs.json"  # under the directory of a run
Phase = Literal["start-up", "begins", "waits", "calls", "resumes", "ends", "over"]


@dataclass(frozen=True, slots=True)
class EventRun:
    """One run of an event."""

    event: int  # id
    turns: tuple[int, ...] = ()  # the iterations of the loops around it, from 1, the outermost (the step) first


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank is."""

    at: EventRun | None = None  # None before its first event
    # what it last did there: it began or ended the event; it waits for what the event `awaits` brings; it calls the
    # user's `function`; or it has ended its list
    phase: Phase = "start-up"
    seconds: float = 0.0  # since then
    awaits: EventRun | None = None  # the event whose result it waits for; None: it does not wait
    function: str = ""  # the user's function that it calls; "": none
    call: str = ""  # the operation between ranks that it is inside of; "" if there is none, or it is not known


@dataclass(frozen=True, slots=True)
class RingEntry:
    """What a rank did some time before its dump."""

    ago: float  # seconds before the dump
    at: EventRun | None  # as of a `RankPosition`
    phase: Phase  # as of a `RankPosition`
    awaits: EventRun | None = None  # as of a `RankPosition`
    function: str = ""  # as of a `RankPosition`


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The sign that a rank is alive, which it renews."""

    beat: int  # grows with each heartbeat
    machine: str  # name of the host and of its namespace of process ids
    pid: int  # process id on that machine
    time: float  # seconds since the epoch, on that host's clock
    position: RankPosition  # where the rank is
    silent: float = 0.0  # seconds for which it has not changed while others watched
    process: Literal["", "running", "stopped", "gone"] = ""  # what the system says of it; "" if nobody could ask


@dataclass(frozen=True, slots=True)
class RankDump:
    """What one rank writes when a run fails."""

    plan: str  # id
    start: str  # a word that all ranks of one start of a run share
    rank: int  # of the world
    world: int  # number of ranks
    machine: str  # as of a heartbeat
    pid: int  # as of a heartbeat
    time: float  # as of a heartbeat
    first: bool  # whether the run failed on this rank; the others followed
    code: str  # of the message with which this rank ended
    reason: str  # that message
    position: RankPosition  # where the rank was
    stack: tuple[str, ...] = ()  # the lines that its main thread was at, innermost last
    late: bool = False  # posted operations run after Python has returned (on GPUs), so `call` is not known
    ring: tuple[RingEntry, ...] = ()  # what it did last


@dataclass(frozen=True, slots=True)
class LastHeartbeats:
    """The last heartbeats of all ranks, as the first rank that failed found them."""

    plan: str  # id
    start: str  # as of a `RankDump`
    by: int  # the rank that wrote this
    time: float  # as of a heartbeat
    signs: tuple[tuple[int, Heartbeat], ...]  # (rank, its last heartbeat)


def heartbeat_text(sign: Heartbeat) -> str:
    return json.dumps(_plain(sign), separators=(",", ":"))


def dump_text(dump: RankDump | LastHeartbeats) -> str:
    return json.dumps({"format": FORMAT, **_plain(dump)}, separators=(",", ":")) + "\n"


def read_heartbeat(text: str) -> Heartbeat:
    found: Heartbeat = _read(Heartbeat, _object(text, "a heartbeat"), "a heartbeat")
    return found


def read_dump(text: str, place: str) -> RankDump:
    found: RankDump = _read(RankDump, _known(text, place), place)
    return found


def read_last_heartbeats(text: str, place: str) -> LastHeartbeats:
    found: LastHeartbeats = _read(LastHeartbeats, _known(text, place), place)
    return found


def _plain(value: Any) -> Any:
    """Without what is at its default, as plans are written."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != f.default}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _known(text: str, place: str) -> dict[str, Any]:
    found = _object(text, place)
    if found.pop("format", None) != FORMAT:
        raise not_a_dump(place, f"its format is not {FORMAT}")
    return found


def _object(text: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise not_a_dump(place, "it is not JSON") from None
    if not isinstance(found, dict):
        raise not_a_dump(place, "it is not a JSON object")
    return found


def _read(cls: type, found: dict[str, Any], place: str) -> Any:
    hints, known = _hints(cls), {f.name: f for f in fields(cls)}
    if extra := found.keys() - known.keys():
        raise not_a_dump(place, f"it has an unknown field {min(extra)!r}")
    for name, field in known.items():
        if name not in found and field.default is MISSING:
            raise not_a_dump(place, f"it lacks the field {name!r}")
    return cls(**{name: _value(hints[name], value, place, name) for name, value in found.items()})


def _value(hint: Any, value: Any, place: str, name: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        return _read(hint, value, place)
    if origin is tuple and isinstance(value, list):
        each = args[:1] * len(value) if args[1:] == (...,) else args
        if len(each) == len(value):
            return tuple(_value(h, v, place, name) for h, v in zip(each, value, strict=True))
    elif origin in (Union, types.UnionType):
        options = [option for option in args if option is not type(None)]
        return None if value is None and len(options) < len(args) else _value(options[0], value, place, name)
    elif origin is Literal and isinstance(value, str) and value in args:
        return value
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) is hint and hint in (int, str, bool):
        return value
    raise not_a_dump(place, f"its field {name!r} has the wrong type")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def not_a_dump(place: str, why: str) -> Failure:
    """RL0794, for a file that nothing can be concluded from."""
    return fail("RL0794", f"not the dump of a rank: {why}", place=place,
                help="the file is truncated, or was written by another version of rldsl; delete it to analyze the "
                     "others")
