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

    field: str  # of the record
    role: Role  # what the id names
    id: Any  # a str, and an int for a rank


def references(record: Any) -> Iterator[Reference]:
    """Every id in `record`, in the order of its fields. A field that may be left out ("" by default) and is, names
    nothing."""
    cls: type = type(record)
    for field in _fields_with_ids(cls):
        yield from _of_field(record, field)


def named(record: Any, *names: str) -> tuple[Reference, ...]:
    """The ids in some fields of `record`, field by field in the order given."""
    cls: type = type(record)
    return tuple(r for name in names for field in _fields_with_ids(cls) if field.name == name
                 for r in _of_field(record, field))


def roles(cls: type) -> Mapping[str, frozenset[Role]]:
    """Field -> the roles of the ids that it holds; fields without any are left out."""
    return {field.name: frozenset(field.ids.all_roles()) for field in _fields_with_ids(cls)}


def renamed(record: Any, new: Mapping[Role, Callable[[str], str]]) -> dict[str, Any]:
    """Field -> its value with the ids of the roles in `new` replaced, for `dataclasses.replace`."""
    changed = {}
    cls: type = type(record)
    for field in _fields_with_ids(cls):
        value = getattr(record, field.name)
        if not (field.optional and value == "") and not new.keys().isdisjoint(field.ids.all_roles()):
            changed[field.name] = _replaced(field.ids, value, new)
    return changed


class _Ids(NamedTuple):
    """The ids in the values of a type, which is taken apart once: of an id its roles, of a tuple what its entries
    hold."""

    roles: tuple[Role, ...] = ()  # of an id: what it may name
    entries: tuple[_Ids, ...] = ()  # of a tuple: the ids in its entries
    # any number of entries, which are all of the one type
    any_number: bool = False

    def all_roles(self) -> tuple[Role, ...]:
        return (*self.roles, *(role for entry in self.entries for role in entry.all_roles()))


class _Field(NamedTuple):
    """A field of a record that holds ids."""

    name: str  # of the record
    ids: _Ids  # what its values hold
    # whether it may be left out
    optional: bool


@cache
def _fields_with_ids(cls: Hashable) -> tuple[_Field, ...]:
    hints = get_type_hints(cls, include_extras=True)
    found = (_Field(f.name, _in_type(hints[f.name]), f.default is not MISSING) for f in fields(cast(Any, cls)))
    return tuple(field for field in found if field.ids.all_roles())


def _in_type(hint: Any) -> _Ids:
    if get_origin(hint) is Annotated:
        return _Ids(tuple(x for x in hint.__metadata__ if isinstance(x, Role)))
    args = get_args(hint)
    if args[1:] == (...,):
        return _Ids(entries=(_in_type(args[0]),), any_number=True)
    return _Ids(entries=tuple(map(_in_type, args)))


def _of_field(record: Any, field: _Field) -> list[Reference]:
    name, ids, optional = field
    value = getattr(record, name)
    if optional and value == "":
        return []
    return [Reference(name, role, id) for role, id in _found(ids, value)]


def _found(ids: _Ids, value: Any) -> list[tuple[Role, Any]]:
    own, entries, any_number = ids
    if own:
        return [(role, value) for role in own]
    if not isinstance(value, tuple) or not entries:
        return []
    if any_number:
        if len(entries[0].roles) == 1:  # most fields: ids side by side
            (role,) = entries[0].roles
            return [(role, id) for id in value]
        return [x for inner in value for x in _found(entries[0], inner)]
    return [x for entry, inner in zip(entries, value, strict=True) for x in _found(entry, inner)]


def _replaced(ids: _Ids, value: Any, new: Mapping[Role, Callable[[str], str]]) -> Any:
    if ids.roles:
        return new[ids.roles[0]](value) if ids.roles[0] in new else value
    if not isinstance(value, tuple) or not ids.entries:
        return value
    entries = ids.entries * len(value) if ids.any_number else ids.entries
    return tuple(_replaced(entry, inner, new) for entry, inner in zip(entries, value, strict=True))
