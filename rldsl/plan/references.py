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
    for name, hint, optional in _typed(cls):
        value = getattr(record, name)
        if not (optional and value == ""):
            yield from (Reference(name, role, id) for role, id in _ids(hint, value))


def named(record: Any, *names: str) -> tuple[Reference, ...]:
    """The ids in some fields of `record`, field by field in the order given."""
    return tuple(r for name in names for r in references(record) if r.field == name)


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
    return tuple((f.name, hints[f.name], f.default is not MISSING) for f in own if any(_roles(hints[f.name])))


def _roles(hint: Any) -> Iterator[Role]:
    if get_origin(hint) is Annotated:
        yield from (x for x in hint.__metadata__ if isinstance(x, Role))
    else:
        for arg in get_args(hint):
            yield from _roles(arg)


def _ids(hint: Any, value: Any) -> Iterator[tuple[Role, Any]]:
    if get_origin(hint) is Annotated:
        yield from ((role, value) for role in _roles(hint))
    elif isinstance(value, tuple):
        for each, inner in zip(_each(hint, len(value)), value, strict=True):
            yield from _ids(each, inner)


def _replaced(hint: Any, value: Any, new: Mapping[Role, Callable[[str], str]]) -> Any:
    if get_origin(hint) is Annotated:
        role = next(_roles(hint), None)
        return new[role](value) if role is not None and role in new else value
    if isinstance(value, tuple):
        return tuple(_replaced(h, v, new) for h, v in zip(_each(hint, len(value)), value, strict=True))
    return value


def _each(hint: Any, count: int) -> tuple[Any, ...]:
    """The types of the `count` entries of a tuple."""
    args = get_args(hint)
    return args[:1] * count if args[1:] == (...,) else args
