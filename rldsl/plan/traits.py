"""What every reader of a plan needs to know about a kind of event, in one record next to the kind's fields.

In: the `Traits` that a class of `plan/events.py` is declared with. Out: `EVENTS`, every kind by the name that the plan
file gives it. Compiler, verifier, memory estimate, simulator, runtime, views and pages derive what they can from the
traits; where a kind needs code of its own, a reader has a table by kind, and `rule` refuses a kind that is missing
from it. Errors: TypeError, at import, for traits that do not fit the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rldsl.diag import internal_error
from rldsl.plan.references import Role, roles

if TYPE_CHECKING:
    from rldsl.plan.events import Event

Family = Literal[
    "call",  # of a model: generate, infer, train
    "compute",  # works on values: every rank on its own rows, with reductions
    "data",  # brings rows into the run
    "movement",  # values or parameters from ranks to ranks; waits for what it reads by itself
    "residency",  # builds a copy of parameters, or moves it between device and host
    "disk",  # writes files
    "bookkeeping",  # logs and frees: of no interest to whoever reads a dataflow
]
Blocking = Literal[
    "alone",  # waits for nobody
    "posted",  # issued here, waited for by the first event that reads what it brings
    "replica",  # waits for the ranks that work on the same rows, and on the same experts
    "gather",  # the first rank of each buffer's mesh sends to one rank; issued here, and awaited by no event
    "mesh",  # may wait for every rank of its mesh
    "together",  # no rank ends it before all have begun it
]
Drawing = Literal["call", "value", "move", "none"]  # a node of the dataflow picture, what it looks like
Color = Literal["mesh", "transfer", "realloc"]  # of a bar in a timeline: that of its mesh, or of movement


@dataclass(frozen=True, slots=True)
class Buffers:
    """What an event reads and writes, as templates over its fields: "{model}@{layout}". A template with an empty field
    stands for no buffer."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Of a kind of event. Fields are given by name."""

    family: Family
    blocking: Blocking
    participants: tuple[str, ...] = ()  # fields (or "reads", "writes"): the union of their ranks is the event's mesh
    everyone: bool = False  # all ranks of the world take part, whatever the fields
    first_ranks: tuple[str, ...] = ()  # fields of buffers: of their meshes, the first rank has to take part
    read_by: str = ""  # field of a spread: what is read in it is needed on its ranks alone, not on all participants
    communicators: Literal["none", "layout", "mesh"] = "none"  # created at start-up: of the layout's axes, or one
    forwards: bool = False  # of "posted": ranks that receive may send on what they have received
    protocol: bool = False  # the backend communicates in it, in an order that `verify/issue_order.py` knows
    weighs: tuple[str, ...] = ()  # fields of frames (or ragged values) whose row lengths every participant needs
    buffers: Buffers | None = None  # exactly what it reads and writes; None: the verifier has a rule for the kind
    moves: Literal["nothing", "rule", "at run time"] = "nothing"  # bytes between ranks; rule: as the plan says
    order_cost: int = 1  # how long it takes against other events; the order of events follows a clock of these
    scratch: bool = False  # needs memory while it runs: the memory estimate has a rule for the kind
    timed: bool = False  # takes longer than to issue it: the simulator has a rule for the kind
    drawing: Drawing = "none"
    color: Color = "mesh"
    summarized: tuple[str, ...] = ()  # fields that a comparison of plans leaves out: name and place tell them


EVENTS: dict[str, type[Event]] = {}
E = TypeVar("E", bound="type[Event]")
RANKED = {Role.LAYOUT, Role.SPREAD, Role.BUFFER, Role.RANK, Role.MESH}  # roles of ids that have ranks


# The participants of a kind with this `blocking`, where it decides who waits for whom (`postmortem/wait_order.py`).
PARTICIPANTS: Mapping[str, tuple[frozenset[Role], ...]] = {
    "posted": (frozenset({Role.LAYOUT, Role.SPREAD}),) * 2, "replica": (frozenset({Role.LAYOUT}),),
    "gather": (frozenset({Role.RANK}),),
}


def event_kind(traits: Traits) -> Callable[[E], E]:
    """Declare a class of events with its traits; the plan file calls it by its class name in lower case."""

    def declare(cls: E) -> E:
        known, own = roles(cls), {f.name for f in fields(cls)}
        for name in (*traits.participants, *traits.first_ranks, *filter(None, (traits.read_by,))):
            if not known.get(name, frozenset()) & RANKED:
                raise TypeError(f"{cls.__name__}: the ranks of {name!r} are not known: it is no field with ranks")
        for name in traits.weighs:
            if not known.get(name, frozenset()) & {Role.FRAME, Role.VALUE}:
                raise TypeError(f"{cls.__name__}: {name!r} is no field of frames or values")
        if not (traits.participants or traits.everyone):
            raise TypeError(f"{cls.__name__}: nothing says which ranks take part")
        wanted = PARTICIPANTS.get(traits.blocking)
        if wanted and not (len(wanted) == len(traits.participants) and all(
                known[name] & roles for name, roles in zip(traits.participants, wanted, strict=True))):
            texts = (" or ".join(sorted(role.value for role in roles)) for roles in wanted)
            raise TypeError(f"{cls.__name__}: an event that is {traits.blocking!r} has these participants, and no "
                            f"others: {', '.join(f'a {text}' for text in texts)}")
        if traits.communicators == "layout" and Role.LAYOUT not in known.get((*traits.participants, "")[0], ()):
            raise TypeError(f"{cls.__name__}: the first field of participants must be the layout of its communicators")
        if traits.forwards and traits.blocking != "posted":
            raise TypeError(f"{cls.__name__}: only what is posted can be forwarded")
        if unknown := set(traits.summarized) - own:
            raise TypeError(f"{cls.__name__} has no fields {', '.join(sorted(unknown))}")
        cls.traits, cls.kind = traits, cls.__name__.lower()
        EVENTS[cls.kind] = cls
        return cls

    return declare


R = TypeVar("R")


def rule(table: Mapping[type[Event], R], event: Event, reader: str) -> R:
    """What `reader` does with the kind of `event`. Errors: RL0699, where its table does not have the kind."""
    if type(event) not in table:
        raise internal_error(f"{reader} has no rule for events of the kind {event.kind!r}", place=f"event {event.id}")
    return table[type(event)]


def expand(event: Event, templates: tuple[str, ...]) -> tuple[str, ...]:
    """The buffers that templates of `Buffers` stand for: "{model}@{layout}" -> "actor@L0"."""
    values: dict[str, Any] = {f.name: getattr(event, f.name) for f in fields(event)}
    return tuple(text for t in templates if all((text := t.format_map(values)).split("@")))
