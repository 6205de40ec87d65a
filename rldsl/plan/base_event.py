"""What every kind of event has: participants, the buffers that it reads and writes, and what it means for others.

Buffers are written `value@spread` or `model@layout` (`plan/model.py`). The kinds are in `plan/events.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from rldsl.plan.references import Buffer, FrameId, LayoutId, MeshId, ModelName, Role, references
from rldsl.plan.traits import Traits

EVERY_ITERATION = -1  # `Event.ahead` of what belongs to no step: copies of parameters are refreshed, moved and freed
Copy = tuple[ModelName, LayoutId]  # the parameters of a model under a layout


@lru_cache(1 << 16)  # the same few names are asked for each event, and in each check of a plan
def split_buffer(buffer: str) -> tuple[str, str]:
    """ "gen.tokens@s2" -> ("gen.tokens", "s2")."""
    left, _, right = buffer.rpartition("@")
    return left, right


@dataclass(frozen=True, slots=True)
class Versions:
    """Model versions that an event uses and defines; dependencies follow from them: an event that uses a version comes
    after the one that makes it. Entries are names of models, or `optimizer_of` one."""

    uses: frozenset[str] = frozenset()  # whose current version the event needs, under any layout
    defs: frozenset[str] = frozenset()  # of which it makes a new version, under every layout


def optimizer_of(model: str) -> str:
    """The name under which `Versions` lists the optimizer state of a model."""
    return f"{model} optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What its participants (every rank of `mesh`) do together."""

    traits: ClassVar[Traits]  # what readers of a plan need to know about the kind
    kind: ClassVar[str]  # as the plan file writes it: "generate"

    id: int  # unique; events are numbered in the order of the plan
    mesh: MeshId  # its participants
    reads: tuple[Buffer, ...] = ()  # buffers that must exist when it begins
    writes: tuple[Buffer, ...] = ()  # buffers that exist when it ends
    at: str = ""  # the position in the program that asked for it: "ppo.rlf:22:3"
    because: str = ""  # why the compiler inserted it; "" for what the user wrote
    bytes: int = 0  # sent between ranks; -1 if it depends on the lengths of sequences
    ahead: int = 0  # steps by which it runs ahead of the step loop (`runs_in`), or EVERY_ITERATION

    @property
    def display_name(self) -> str:
        """Its name in messages: "actor.generate"."""
        return self.kind

    @property
    def verb(self) -> str:
        """What titles say that it does: "transfer" in "transfer gen.tokens"."""
        return self.kind

    @property
    def result_names(self) -> tuple[str, ...]:
        """The names that the program gives to what it returns."""
        return ()

    @property
    def frees(self) -> tuple[Buffer, ...]:
        """The buffers that end with it."""
        return ()

    @property
    def subject(self) -> str:
        """What it is about: "gen = actor.generate", "actor"."""
        return next((r.id for r in references(self) if r.role is Role.MODEL), "")

    @property
    def new_rows(self) -> tuple[FrameId, ...]:
        """The frames whose rows begin with it; selections and collections are made of rows that exist."""
        return ()

    @property
    def refreshes(self) -> bool:
        """Whether it only brings a copy of parameters up to date, or moves it between device and host memory."""
        return self.traits.family == "residency"

    @property
    def logged(self) -> tuple[tuple[str, Buffer], ...]:
        """What it writes to the log: (name, value)."""
        return ()

    @property
    def saves_to(self) -> str | None:
        """The directory that it writes, as the program names it; None for none."""
        return None

    def wanted_ahead(self, lag: int) -> int | None:
        """By how many steps it runs ahead in a run with this lag, as the program says; None where it does not say."""
        return None

    def copies(self) -> tuple[Copy, ...]:
        """The copies of parameters that it works on, as they are on the device."""
        return ()

    def versions(self) -> Versions:
        """The model versions that it uses and defines."""
        return Versions(frozenset(model for model, _ in self.copies()))
