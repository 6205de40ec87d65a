"""Plan <-> bytes. In: a `Plan`. Out: canonical JSON lines that end in their own digest, and back.

One record a line: the header, then the tables in the order of `Plan`'s fields, the body, the classes, the digest.
`{"kind": ...}` names the record, so no record has a field of that name; the body of a loop is between its line and
`{"kind":"end"}`. Keys are sorted, separators have no spaces, and a field at its default is left out. So one
plan has exactly one encoding, and `decode(encode(p)) == p`. No pickle: reading a plan runs nothing of it.

A reader may walk the blocks and list the ranks of any plan that it gets: blocks nest no deeper than
`MAX_NESTED_BLOCKS`, and the world has no more than `MAX_RANKS` ranks.

Codes: RL0601 not a plan of this format, RL0602 edited after it was compiled, RL0603 not canonical JSON,
RL0604 unknown or misplaced record, RL0605 unknown or missing field, RL0606 wrong type, RL0607 broken nesting,
RL0612 ranks that cannot be.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from hashlib import sha256
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rldsl.diag import Failure, fail
from rldsl.plan.events import EVENTS, Item, Loop, When
from rldsl.plan.expr import Program
from rldsl.plan.function import Function
from rldsl.plan.model import (
    FORMAT,
    MAX_NESTED_BLOCKS,
    MAX_RANKS,
    Data,
    Frame,
    Group,
    Header,
    Layout,
    Mesh,
    Model,
    Plan,
    RankClass,
    ReplayBuffer,
    Space,
    Spread,
    State,
    Value,
)

# kind of line -> (record, the field of Plan it belongs to), in the order of the file; body lines follow the groups.
TABLES: Mapping[str, tuple[type, str]] = {
    "header": (Header, "header"),
    "mesh": (Mesh, "meshes"),
    "layout": (Layout, "layouts"),
    "spread": (Spread, "spreads"),
    "model": (Model, "models"),
    "data": (Data, "data"),
    "space": (Space, "spaces"),
    "frame": (Frame, "frames"),
    "value": (Value, "values"),
    "function": (Function, "functions"),
    "program": (Program, "programs"),
    "group": (Group, "groups"),
    "state": (State, "states"),
    "buffer": (ReplayBuffer, "buffers"),
    "body": (Loop, "body"),
    "class": (RankClass, "classes"),
}
RECORDS: Mapping[str, type] = {k: r for k, (r, _) in TABLES.items() if k != "body"}
BLOCKS: Mapping[str, type] = {"loop": Loop, "when": When}
SECTIONS = tuple(TABLES)
PLACES: Mapping[str, int] = {name: i for i, name in enumerate(SECTIONS)}  # where the lines of a section are
AnyRecord = TypeVar("AnyRecord")
EDITED = "compile the program again; plans cannot be edited, because they would have to be verified again"


def plan_id(data: bytes) -> str:
    """What a person calls this plan: the first 12 hex digits of the sha256 of its file."""
    return sha256(data).hexdigest()[:12]


# ------------------------------------------------------------------------------------------------ writing


def encode(plan: Plan) -> bytes:
    """Errors: RL0606 for a number that is not finite, which JSON cannot hold."""
    lines = [_line("header", plan.header)]
    for kind, (_, name) in TABLES.items():
        if kind == "body":
            lines += _body(plan.body)
        elif kind != "header":
            lines += [_line(kind, record) for record in getattr(plan, name)]
    text = ("\n".join(lines) + "\n").encode()
    return text + (_dump({"kind": "digest", "sha256": sha256(text).hexdigest()}) + "\n").encode()


def plain_record(record: Any) -> dict[str, Any]:
    """A dataclass as an object that JSON can hold, without the fields that have their defaults."""
    return _plain(record)


def _body(items: tuple[Item, ...]) -> list[str]:
    lines: list[str] = []
    for item in items:
        if isinstance(item, Loop | When):
            lines += [_line(type(item).__name__.lower(), item, skip="body"), *_body(item.body), _dump({"kind": "end"})]
        else:
            lines.append(_line(item.kind, item))
    return lines


def _line(kind: str, record: Any, skip: str = "") -> str:
    try:
        return _dump({"kind": kind, **_plain(record, skip)})
    except ValueError:
        raise fail(
            "RL0606",
            f"a {kind} of the plan contains a number that is not finite",
            place=f"{kind} record",
            help="a plan may contain only finite numbers",
        ) from None


def _plain(record: Any, skip: str = "") -> dict[str, Any]:
    cls: type = type(record)
    hints, out = _hints(cls), {}
    for field in _fields(cls):
        value = getattr(record, field.name)
        value = float(value) if hints[field.name] is float else value
        if field.name != skip and not _is_default(field, value):
            out[field.name] = _json(value, hints[field.name])
    return out


def _json(value: Any, hint: Any) -> Any:
    if is_dataclass(value):
        return _plain(value)
    if isinstance(value, tuple):
        args = get_args(hint)
        each = args[:1] * len(value) if args[1:] == (...,) else args
        return [_json(v, h) for v, h in zip(value, each, strict=True)]
    return float(value) if hint is float else value


# made once: `json.dumps` makes one for each line
_dump = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


# ------------------------------------------------------------------------------------------------ reading


def decode(data: bytes, name: str) -> Plan:
    """The plan in `data`; `name` is the file as the user knows it. Raises Failure (codes in the module docstring)."""
    lines = _checked_lines(data, name)
    tables: dict[str, list[Any]] = {table: [] for _, table in TABLES.values()}
    open_blocks: list[tuple[type, dict[str, Any], str, list[Item]]] = []
    items: list[Item] = tables["body"]
    section = 0
    for number, line in enumerate(lines, 1):
        place = f"{name}:{number}"
        obj = _object(line, place)
        kind = obj.pop("kind", None)
        if not (isinstance(kind, str) and (kind in RECORDS or kind in BLOCKS or kind in EVENTS or kind == "end")):
            raise fail("RL0604", f"unknown kind of record: {kind!r}", place=place, help=EDITED)
        at = PLACES[kind if kind in RECORDS else "body"]
        if at < section or (kind == "header") != (number == 1):
            raise fail(
                "RL0604",
                f"misplaced {kind} record",
                place=place,
                help="the order of records is " + ", ".join(SECTIONS),
            )
        if at != PLACES["body"] and open_blocks:
            raise fail(
                "RL0607",
                f"the {open_blocks[-1][0].__name__.lower()} at {open_blocks[-1][2]} has no end",
                place=place,
                help=EDITED,
            )
        section = at
        if kind in RECORDS:
            record = _record(RECORDS[kind], obj, place)
            _bounded(record, tables["header"], place)
            tables[TABLES[kind][1]].append(record)
        elif kind in BLOCKS:
            if len(open_blocks) == MAX_NESTED_BLOCKS:
                raise fail("RL0607", f"blocks are nested more than {MAX_NESTED_BLOCKS} deep", place=place, help=EDITED)
            open_blocks.append((BLOCKS[kind], obj, place, items))
            items = []
        elif kind == "end":
            if not open_blocks or obj:
                raise fail(
                    "RL0607", "an end record without a block" if not obj else "an end record with fields",
                    place=place, help=EDITED
                )
            block, head, head_place, outer = open_blocks.pop()
            outer.append(_record(block, head, head_place, body=tuple(items)))
            items = outer
        else:
            items.append(_record(EVENTS[kind], obj, place))
    if open_blocks:
        raise fail(
            "RL0607", f"the {open_blocks[-1][0].__name__.lower()} has no end", place=open_blocks[-1][2], help=EDITED
        )
    return Plan(header=tables.pop("header")[0], **{table: tuple(rows) for table, rows in tables.items()})


def _bounded(record: Any, header: list[Header], place: str) -> None:
    """Ranks that can be: those of a mesh or class are of the world, and each once."""
    if isinstance(record, Header) and not 1 <= record.world <= MAX_RANKS:
        raise fail("RL0612", f"{record.world} ranks: a plan must have 1 to {MAX_RANKS:_} ranks", place=place,
                   help=EDITED)
    if isinstance(record, Mesh | RankClass):
        world = header[0].world
        if any(not 0 <= a < b <= world for a, b in record.ranks) or sum(b - a for a, b in record.ranks) > world:
            raise fail("RL0612", f"ranks outside the world of {world} ranks", place=place, help=EDITED)


def _checked_lines(data: bytes, name: str) -> list[str]:
    """The lines before the digest, after the format and the digest have been found right."""
    if not data:
        raise fail("RL0601", "not a plan: the file is empty", place=name,
                   help="`rlc compile` writes a plan; was the disk full when this one was written or copied?")
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError:
        raise fail(
            "RL0601", "not a plan: the file is not UTF-8 text", place=name, help="use `rlc compile` to write a plan"
        ) from None
    head = _parse(lines[0])
    if not isinstance(head, dict) or head.get("kind") != "header":
        raise fail(
            "RL0601",
            "not a plan: the first line is not a plan header",
            place=f"{name}:1",
            help="use `rlc compile` to write a plan",
        )
    if type(head.get("format")) is not int or head["format"] != FORMAT:
        raise fail(
            "RL0601",
            f"plan format {head.get('format')!r}, but this version reads format {FORMAT}",
            place=f"{name}:1",
            help="compile the program again with this version of rlc",
        )
    last = _parse(lines[-2]) if len(lines) > 1 and not lines[-1] else None
    if not isinstance(last, dict) or last.get("kind") != "digest":
        raise fail(
            "RL0602", "the plan is truncated: its last line is not the digest",
            place=f"{name}:{len(lines)}", help=EDITED
        )
    covered = "\n".join(lines[:-2]) + "\n"
    if last != {"kind": "digest", "sha256": sha256(covered.encode()).hexdigest()} or lines[-2] != _dump(last):
        raise fail(
            "RL0602",
            "the plan was modified after it was compiled: its digest does not match",
            place=f"{name}:{len(lines) - 1}",
            help=EDITED,
        )
    return lines[:-2]


def _parse(line: str) -> Any:
    """JSON, or None for what is not."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _object(line: str, place: str) -> dict[str, Any]:
    """One line as an object; canonical, so neither spaces nor a doubled key nor nan get through."""
    obj = _parse(line)
    try:
        canonical = isinstance(obj, dict) and _dump(obj) == line
    except (ValueError, RecursionError):
        canonical = False
    if not canonical or not isinstance(obj, dict):
        raise fail("RL0603", "not a JSON object in canonical form", place=place, help=EDITED)
    return obj


def read_record(cls: type[AnyRecord], obj: Any, place: str) -> AnyRecord:
    """The dataclass that `plain_record` wrote. Errors: RL0605, RL0606."""
    return cast(AnyRecord, _value(_shape(cls), obj, place, cls.__name__.lower()))


def _record(cls: type, obj: dict[str, Any], place: str, path: str = "", **given: Any) -> Any:
    """A dataclass from its JSON object. `given`: fields that do not come from it."""
    known = _known(cls)
    where = path or cls.__name__.lower()
    values = dict(given)
    for key, value in obj.items():
        if key not in known or key in given:
            names = ", ".join(name for name in known if name not in given)
            raise fail("RL0605", f"{where} has an unknown field {key!r}", place=place, help=f"fields: {names}")
        field, shape = known[key]
        values[key] = _value(shape, value, place, f"{where}.{key}")
        if _is_default(field, values[key]):
            raise fail("RL0603", f"{where}.{key} is present although it has its default value",
                       place=place, help=EDITED)
    if lacking := next((name for name in _required(cls) if name not in values), None):
        raise fail("RL0605", f"{where} lacks the field {lacking!r}", place=place, help=EDITED)
    return cls(**values)


def _value(shape: _Shape, value: Any, place: str, path: str) -> Any:
    hint, origin, args, any_number, is_record = shape
    if hint is type(value) and _finite(value):
        return value
    if is_record and isinstance(value, dict):
        return _record(hint, value, place, path)
    if origin is tuple and isinstance(value, list):
        each = args[:1] * len(value) if any_number else args
        if len(each) == len(value):
            return tuple(_value(s, v, place, f"{path}[{i}]") for i, (s, v) in enumerate(zip(each, value, strict=True)))
    elif origin is Literal:
        if any(type(value) is type(a) and value == a for a in get_args(hint)):
            return value
    elif origin in (Union, types.UnionType):
        for option in args:
            if option.hint is type(value) and _finite(value):
                return value
            if option.is_record and isinstance(value, dict):
                return _record(option.hint, value, place, path)
    raise _wrong(hint, value, place, path)


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _wrong(hint: Any, value: Any, place: str, path: str) -> Failure:
    wanted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    found = json.dumps(value)
    return fail(
        "RL0606",
        f"{path} must be {wanted}, not {found if len(found) <= 60 else found[:57] + '...'}",
        place=place,
        help=EDITED,
    )


class _Shape(NamedTuple):
    """A type, taken apart once."""

    hint: Any  # the type itself
    origin: Any  # `typing.get_origin` of it
    # of the entries of a tuple, or the options of a union
    args: tuple[_Shape, ...]
    # a tuple of any number of entries, which are all of the one type
    any_number: bool
    is_record: bool  # whether it is a dataclass


def _shape(hint: Any) -> _Shape:
    origin, args = get_origin(hint), get_args(hint)
    parts = () if origin is Literal else tuple(_shape(a) for a in args if a is not ...)
    return _Shape(hint, origin, parts, args[1:] == (...,), isinstance(hint, type) and is_dataclass(hint))


@cache
def _known(cls: Hashable) -> dict[str, tuple[Field[Any], _Shape]]:
    """The fields of a record, with their shapes."""
    hints = _hints(cls)
    return {f.name: (f, _shape(hints[f.name])) for f in _fields(cls)}


@cache
def _required(cls: Hashable) -> tuple[str, ...]:
    """The fields without a default."""
    return tuple(f.name for f in _fields(cls) if f.default is MISSING)


@cache
def _fields(cls: Hashable) -> tuple[Field[Any], ...]:
    return fields(cast(Any, cls))


@cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return get_type_hints(cls)


def _is_default(field: Field[Any], value: Any) -> bool:
    """Equal in type too: True is not 1."""
    return field.default is not MISSING and type(field.default) is type(value) and field.default == value
