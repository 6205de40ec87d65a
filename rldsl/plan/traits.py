"""What every reader of a plan needs to know about a kind of event, in one record next to the kind's fields.

In: the `Traits` that a class of `plan/events.py` is declared with. Out: `EVENTS`, every kind by the name that the plan
file gives it. Compiler, verifier, memory estimate, simulator, runtime, views and pages derive what they can from the
traits; where a kind needs its own code, a reader has a table `RULES` by kind, and `rule_for` refuses a kind that is
missing from it. Errors: TypeError, at import, for traits that do not fit the fields.
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
    "movement",  # values or parameters between ranks; the event itself waits for the buffers that it reads
    "residency",  # builds a copy of parameters, or moves it between device and host
    "disk",  # writes files
    "bookkeeping",  # logs and frees: of no interest to readers of a dataflow
]

# Which ranks a rank may wait for inside the event. Read by the post-mortem alone, which finds out who blocks whom in a
# run that hangs (`postmortem/wait_order.py`). To choose for a new kind: if its handler does not communicate, "none";
# if it posts operations that a later event waits for, "async"; if it ends with a collective of all participants,
# "barrier"; if it may run one and may leave it out, "collective".
Blocking = Literal[
    "none",  # no communication: waits for nobody
    "async",  # posted here; the first event that reads what it brings waits for it
    "gather",  # the first rank of each buffer's mesh sends to one rank; posted here, and no event waits for it
    "dp_rank",  # waits for the ranks of the same dp rank, and for those that share experts with them (ep)
    "collective",  # may wait for every participant, but a rank that has ended it proves nothing about the others
    "barrier",  # waits for every participant: a rank that has ended it proves that all have begun it
]

# How the dataflow picture shows the event (`pages/dataflow.py`).
Drawing = Literal[
    "call",  # a call of a model, with its placement
    "value",  # work on values, or data that is read or written
    "move",  # data that goes from ranks to ranks, with its bytes
    "none",  # not shown
]
Color = Literal["mesh", "transfer", "realloc"]  # of a bar in a timeline: that of its mesh, or of movement


@dataclass(frozen=True, slots=True)
class Buffers:
    """What an event reads and writes, as templates over its fields: "{model}@{layout}". A template with an empty field
    stands for no buffer."""

    reads: tuple[str, ...] = ()  # templates of the buffers that it reads
    writes: tuple[str, ...] = ()  # templates of the buffers that it writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What readers of a plan need to know about a kind of event. Fields of the kind are given by name. The first group
    says who takes part, the second what the event works on, the third which readers have a rule for the kind, the last
    how it is shown."""

    family: Family  # what the event is about
    blocking: Blocking  # which ranks a rank may wait for inside the event

    # The fields (or "reads", "writes") whose ranks take part: the event's mesh is the union of these ranks.
    participants: tuple[str, ...] = ()
    # All ranks of the world take part, whatever the fields say; each reads those buffers that it holds.
    all_ranks: bool = False
    # Fields of buffers: the first rank of each buffer's mesh takes part, and reads the buffer for all.
    first_rank_of: tuple[str, ...] = ()
    # A field of a spread: a buffer that is read in this spread must exist on the ranks of that spread only. Any other
    # buffer must exist on all participants.
    source_spread: str = ""
    # Process groups that start-up creates for the event: one per axis of its layout, or one of its mesh.
    communicators: Literal["none", "layout", "mesh"] = "none"
    forwards: bool = False  # of an "async" event: ranks that receive may send on what they have received

    # Implicit reads: the `FRAME.lengths` of the frames in these fields, or of the frames of the ragged values in them,
    # which every participant needs and which `reads` does not list.
    needs_lengths_of: tuple[str, ...] = ()
    buffers: Buffers | None = None  # exactly what it reads and writes; None: `verify/operations.py` has a rule
    # Whether it works on the rows of its spread, so that `verify/row_division.py` has a rule. A kind with a field of a
    # spread must say; None: it has no such field.
    divides_rows: bool | None = None

    backend_communicates: bool = False  # inside it the backend uses communicators: `verify/issue_order.py` has a rule
    # Bytes between ranks. "planned": `Event.bytes`, for which `verify/sizes.py` has a rule; "at run time": -1.
    bytes_moved: Literal["none", "planned", "at run time"] = "none"
    scratch: bool = False  # needs scratch memory while it runs: `memory/lifetimes.py` has a rule
    timed: bool = False  # takes longer than to issue it: `simulate/program.py` has a rule
    # How long it takes on the clock by which events are ordered.
    order_cost: int = 1

    # Whether a run that resumes reads what the event made for a later step from the checkpoint, since it depends on
    # parameters, states or buffers of the past. Everything else that runs ahead is recomputed:
    # calls of models that do not change, and what is computed from no state.
    stored_ahead: bool = False

    drawing: Drawing = "none"  # how the dataflow picture shows it
    color: Color = "mesh"  # of its bar in a timeline
    not_diffed: tuple[str, ...] = ()  # fields that `rlc diff` does not list: the event's title and place show them


EVENTS: dict[str, type[Event]] = {}
E = TypeVar("E", bound="type[Event]")
RANKED = {Role.LAYOUT, Role.SPREAD, Role.BUFFER, Role.RANK, Role.MESH}  # roles of ids that have ranks


# The roles of the fields in `participants` of a kind with this `blocking`, if they decide who waits for whom.
ROLES_BY_BLOCKING: Mapping[str, tuple[frozenset[Role], ...]] = {
    "async": (frozenset({Role.LAYOUT, Role.SPREAD}),) * 2, "dp_rank": (frozenset({Role.LAYOUT}),),
    "gather": (frozenset({Role.RANK}),),
}


def event_kind(traits: Traits) -> Callable[[E], E]:
    """Declare a class of events with its traits; the plan file calls it by its class name in lower case."""

    def declare(cls: E) -> E:
        known, own = roles(cls), {f.name for f in fields(cls)}
        for name in (*traits.participants, *traits.first_rank_of, *filter(None, (traits.source_spread,))):
            if not known.get(name, frozenset()) & RANKED:
                raise TypeError(f"{cls.__name__}: the ranks of {name!r} are not known: it is no field with ranks")
        for name in traits.needs_lengths_of:
            if not known.get(name, frozenset()) & {Role.FRAME, Role.VALUE}:
                raise TypeError(f"{cls.__name__}: {name!r} is no field of frames or values")
        if not (traits.participants or traits.all_ranks):
            raise TypeError(f"{cls.__name__}: nothing says which ranks take part")
        wanted = ROLES_BY_BLOCKING.get(traits.blocking)
        if wanted and not (len(wanted) == len(traits.participants) and all(
                known[name] & roles for name, roles in zip(traits.participants, wanted, strict=True))):
            texts = (" or ".join(sorted(role.value for role in roles)) for roles in wanted)
            raise TypeError(f"{cls.__name__}: an event that is {traits.blocking!r} has these participants, and no "
                            f"others: {', '.join(f'a {text}' for text in texts)}")
        if traits.communicators == "layout" and Role.LAYOUT not in known.get((*traits.participants, "")[0], ()):
            raise TypeError(f"{cls.__name__}: the first field of participants must be the layout of its communicators")
        if traits.forwards and traits.blocking != "async":
            raise TypeError(f"{cls.__name__}: only an event that is 'async' can forward")
        if (traits.divides_rows is None) == any(Role.SPREAD in found for found in known.values()):
            raise TypeError(f"{cls.__name__}: `divides_rows` must be True or False for a kind with a field of a "
                            "spread, and None for any other")
        if unknown := set(traits.not_diffed) - own:
            raise TypeError(f"{cls.__name__} has no fields {', '.join(sorted(unknown))}")
        cls.traits, cls.kind = traits, cls.__name__.lower()
        EVENTS[cls.kind] = cls
        return cls

    return declare


R = TypeVar("R")


def rule_for(table: Mapping[type[Event], R], event: Event, reader: str) -> R:
    """The entry of `reader`'s table for the kind of `event`. Errors: RL0699 if there is none."""
    if type(event) not in table:
        raise internal_error(f"{reader} has no rule for events of the kind {event.kind!r}", place=f"event {event.id}")
    return table[type(event)]


def expand(event: Event, templates: tuple[str, ...]) -> tuple[str, ...]:
    """The buffers that templates of `Buffers` stand for: "{model}@{layout}" -> "actor@L0"."""
    values: dict[str, Any] = {f.name: getattr(event, f.name) for f in fields(event)}
    buffers = []
    for template in templates:
        buffer = template.format_map(values)
        if all(buffer.split("@")):  # a field of the template is empty: no buffer
            buffers.append(buffer)
    return tuple(buffers)
