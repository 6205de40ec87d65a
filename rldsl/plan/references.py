"""What a field of a record refers to, written once, as the field's type: `layout: LayoutId`.

In: a record of the plan. Out: the ids in it with their roles, however deep they lie in tuples. The verifier looks them
up, the compiler renames them, and neither knows any kind of event. For a type checker every id is a `str`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from typing import Annotated, Any, NamedTuple, cast, get_args, get_origin, get_type_hints


class Role(Enum):
    """What an id names; the value is the word that messages use."""

    MESH = "mesh"
    LAYOUT = "layout"
    SPREAD = "spread"
    MODEL = "model"
    DATA = "data source"
    FRAME = "frame"
    VALUE = "value"
    PROGRAM = "program"
    BUFFER = "buffer"  # value@spread or model@layout
    RANK = "rank"


MeshId = Annotated[str, Role.MESH]
LayoutId = Annotated[str, Role.LAYOUT]
SpreadId = Annotated[str, Role.SPREAD]
ModelName = Annotated[str, Role.MODEL]
DataName = Annotated[str, Role.DATA]
FrameId = Annotated[str, Role.FRAME]
ValueId = Annotated[str, Role.VALUE]
ProgramId = Annotated[str, Role.PROGRAM]
Buffer = Annotated[str, Role.BUFFER]
Rank = Annotated[int, Role.RANK]


class Reference(NamedTuple):
    """One id in a record."""

    field: str
    role: Role
    id: Any  # a str, and an int for a rank


def references(record: Any) -> Iterator[Reference]:
    """Every id in `record`, in the order of its fields. A field that may be left out ("" by default) and is, names
    nothing."""
    cls: type = type(record)
    for field in _typed(cls):
        yield from _of_field(record, *field)


def named(record: Any, *names: str) -> tuple[Reference, ...]:
    """The ids in some fields of `record`, field by field in the order given."""
    cls: type = type(record)
    return tuple(r for name in names for field in _typed(cls) if field[0] == name for r in _of_field(record, *field))


def _of_field(record: Any, name: str, hint: Any, optional: bool) -> list[Reference]:
    value = getattr(record, name)
    if optional and value == "":
        return []
    return [Reference(name, role, id) for role, id in _ids(hint, value)]


def roles(cls: type) -> Mapping[str, frozenset[Role]]:
    """Field -> the roles of the ids that it holds; fields without any are left out."""
    return {name: found for name, hint, _ in _typed(cls) if (found := frozenset(_roles(hint)))}


def renamed(record: Any, new: Mapping[Role, Callable[[str], str]]) -> dict[str, Any]:
    """Field -> its value with the ids of the roles in `new` replaced, for `dataclasses.replace`."""
    changed = {}
    cls: type = type(record)
    for name, hint, optional in _typed(cls):
        value = getattr(record, name)
        if not (optional and value == "") and not new.keys().isdisjoint(_roles(hint)):
            changed[name] = _replaced(hint, value, new)
    return changed


@cache
def _typed(cls: Hashable) -> tuple[tuple[str, Any, bool], ...]:
    """(field, its type, whether it may be empty) of the fields that hold ids."""
    hints, own = get_type_hints(cls, include_extras=True), fields(cast(Any, cls))
    return tuple((f.name, hints[f.name], f.default is not MISSING) for f in own if _roles(hints[f.name]))


@cache
def _roles(hint: Hashable) -> tuple[Role, ...]:
    """Of all ids in a type."""
    if get_origin(hint) is Annotated:
        return tuple(x for x in cast(Any, hint).__metadata__ if isinstance(x, Role))
    return tuple(role for arg in get_args(hint) for role in _roles(arg))


@cache
def _is_id(hint: Hashable) -> bool:
    return get_origin(hint) is Annotated


def _ids(hint: Any, value: Any) -> list[tuple[Role, Any]]:
    if _is_id(hint):
        return [(role, value) for role in _roles(hint)]
    if not isinstance(value, tuple):
        return []
    each, more = _entries(hint)
    if more:
        return [found for inner in value for found in _ids(each[0], inner)] if _roles(each[0]) else []
    return [found for one, inner in zip(each, value, strict=True) if _roles(one) for found in _ids(one, inner)]


def _replaced(hint: Any, value: Any, new: Mapping[Role, Callable[[str], str]]) -> Any:
    if _is_id(hint):
        role = next(iter(_roles(hint)), None)
        return new[role](value) if role is not None and role in new else value
    if isinstance(value, tuple):
        each, more = _entries(hint)
        return tuple(_replaced(h, v, new) for h, v in zip(each * len(value) if more else each, value, strict=True))
    return value


@cache
def _entries(hint: Hashable) -> tuple[tuple[Any, ...], bool]:
    """The types of the entries of a tuple. True: any number of entries, all of the one type."""
    args = get_args(hint)
    return (args[:1], True) if args[1:] == (...,) else (args, False)
