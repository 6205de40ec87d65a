"""When a rank holds what: parameters from their load on, values from the event that makes them to their free.

In: a plan and some ranks that hold the same. Out: their `Curve`. In a step in the middle of the run, copies of
parameters and the optimizer's moments are there from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rldsl.memory.calls import gradient_bytes, needs, optimizer_bytes
from rldsl.memory.curve import Curve, Holding
from rldsl.memory.holder_classes import Alike
from rldsl.memory.parameters import FLOAT, Copy, elements, largest, new_bytes, resting
from rldsl.memory.reshard_buffers import realloc_bytes, saved_bytes
from rldsl.memory.values import Tables, buffer_bytes
from rldsl.plan.events import (
    AnyCall,
    Checkpoint,
    Event,
    Generate,
    Infer,
    Item,
    Load,
    Loop,
    Offload,
    Onload,
    Realloc,
    Save,
    Train,
    Transfer,
    split,
)
from rldsl.plan.model import Layout, Plan
from rldsl.plan.notation import degrees_of
from rldsl.plan.traits import rule
from rldsl.reshard.records import Routes
from rldsl.sharding.boxes import num_shards

Ways = Mapping[tuple[str, str, str], Routes]


def lifetimes(plan: Plan, ranks: Alike, device: str, ways: Ways) -> Curve:
    """ways: of `moves.ways`."""
    return _Walk(plan, ranks, device, ways).curve()


@dataclass
class _Walk:
    plan: Plan
    ranks: Alike
    device: str
    ways: Ways
    events: list[Event] = field(default_factory=list)  # of these ranks, in order
    found: list[Holding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.t = Tables.of(self.plan)
        self.models = {m.name: m for m in self.plan.models}
        self.layouts: dict[str, Layout] = {x.id: x for x in self.plan.layouts}
        self.spans = list(self._flat(self.plan.body))
        steps = [2 * first for loop, first, _ in self.spans if any(loop is x for x in self.plan.body)]
        self.end = 2 * len(self.events)
        self.top = steps[0] if steps else self.end  # the moment at which a step begins

    def curve(self) -> Curve:
        self._parameters()
        self._values()
        for i, e in enumerate(self.events):
            self._during(i, e)
        return Curve(self.ranks.ranks, tuple(e.id for e in self.events), tuple(self.found))

    def _flat(self, items: Iterable[Item]) -> Iterator[tuple[Loop, int, int]]:
        """Every loop with its first event and the one behind its last, among those of these ranks."""
        for item in items:
            if isinstance(item, Event):
                if item.mesh in self.ranks.meshes:
                    self.events.append(item)
                continue
            first = len(self.events)
            inner = list(self._flat(item.body))
            if isinstance(item, Loop):
                yield item, first, len(self.events)
            yield from inner

    def _hold(self, what: str, size: int, start: int, stop: int, host: bool = False) -> None:
        if start <= stop and (size or what.startswith("parameters")):
            self.found.append(Holding(what, size, start, stop, host and self.device != "cpu"))

    # ------------------------------------------------------------------------------------------- parameters

    def _parameters(self) -> None:
        """Hold parameters. A copy made inside the step loop is counted from the start of the step, because it survives
        from the step before."""
        first: dict[str, int] = {}
        steps: dict[str, int] = {}
        for i, e in enumerate(self.events):
            for buffer in e.writes:
                if split(buffer)[0] in self.models and not (isinstance(e, Load) and e.of):  # that is another's memory
                    first.setdefault(buffer, i)
            if isinstance(e, Train):
                steps.setdefault(f"{e.model}@{e.layout}", i)
        moved = {f"{e.model}@{e.layout}" for e in self.events if isinstance(e, Offload) and e.what == "parameters"}
        parked = {f"{e.model}@{e.layout}" for e in self.events if isinstance(e, Offload) and e.what == "optimizer"}
        freed = {b for e in self.events for b in e.frees}
        there: list[Copy] = []
        copies = [(b, self._copies(b)) for b in first]
        # models with a base first: what others share with them is counted as theirs
        for buffer, mine in sorted(copies, key=lambda x: not self.models[split(x[0])[0]].base):
            if not mine:
                continue
            start = min(2 * first[buffer] + 1, self.top)
            if buffer in moved:
                self._away(buffer, mine)
            elif buffer in freed:
                self._for_a_while(buffer, mine)
            else:
                self._copy(mine, there, start)
            if buffer in parked:
                self._parked(buffer, mine, steps)
            elif mine[0].trained:
                name = mine[0].model.name
                self._hold(f"gradients of {name}", max(map(gradient_bytes, mine)), start, self.end)
                if buffer in steps:
                    begins = self.top if self._again() else 2 * steps[buffer] + 1
                    self._hold(f"optimizer state of {name}", max(map(optimizer_bytes, mine)), begins, self.end)

    def _copy(self, mine: tuple[Copy, ...], there: list[Copy], start: int) -> None:
        """there: one of each of the copies whose slices these ranks have already."""
        model, layout = mine[0].model, mine[0].layout
        own = max(c.stored * resting(c) for c in mine)
        if mine[0].shared:
            alone = max(new_bytes(Copy(model, layout, cells[layout.id]),
                                  [replace(c, cell=cells[c.layout.id]) for c in there]) for cells in self.ranks.cells)
            there.append(mine[0])
            if model.base:
                self._hold(f"base of {_name(mine[0])}", alone, start, self.end)
            else:
                own = alone
        self._hold(f"parameters of {_name(mine[0])}", own, start, self.end)

    def _away(self, buffer: str, mine: tuple[Copy, ...]) -> None:
        """A copy that is on the device from an onload (or its load) to the offload after it, and else on the host."""
        what, model = f"parameters of {_name(mine[0])}", mine[0].model
        size = max(c.stored * resting(c) + c.compute * elements(model.base, c) for c in mine)
        for here, start, stop in self._sides(buffer, "parameters"):
            self._hold(what, size, start, stop, host=not here)

    def _parked(self, buffer: str, mine: tuple[Copy, ...], steps: Mapping[str, int]) -> None:
        """Moments that are on the device from an onload to the offload behind it, and gradients that are then there;
        moments from the first training on. steps: the first training of each copy."""
        name = mine[0].model.name
        begins = self.top if self._again() else 2 * steps.get(buffer, len(self.events)) + 1
        for here, start, stop in self._sides(buffer, "optimizer"):
            if here:
                self._hold(f"gradients of {name}", max(map(gradient_bytes, mine)), start, stop)
            if stop >= begins:
                self._hold(f"optimizer state of {name}", max(map(optimizer_bytes, mine)), max(start, begins), stop,
                           host=not here)

    def _sides(self, buffer: str, what: str) -> Iterator[tuple[bool, int, int]]:
        """From when to when a part of a copy is on the device (true), or in host memory."""
        here, since = False, -1
        for i, e in enumerate(self.events):
            brings = isinstance(e, Load) and not e.of or isinstance(e, Onload) and e.what == what
            if not (brings or isinstance(e, Offload) and e.what == what) or f"{e.model}@{e.layout}" != buffer:
                continue
            if here != brings:
                if since >= 0:
                    yield here, since, 2 * i + 1
                here, since = not here, 2 * i + 1
        yield here, since, self.end

    def _for_a_while(self, buffer: str, mine: tuple[Copy, ...]) -> None:
        """A copy that is there from each realloc to the free behind it."""
        what, size, since = f"parameters of {_name(mine[0])}", max(c.stored * resting(c) for c in mine), -1
        for i, e in enumerate(self.events):
            if buffer in e.writes and since < 0:
                since = 2 * i + 1
            elif since >= 0 and buffer in e.frees:
                self._hold(what, size, since, 2 * i + 1)
                since = -1

    def _again(self) -> bool:
        """Whether the run has more than one step."""
        return self.plan.header.steps > 1

    def _copies(self, buffer: str) -> tuple[Copy, ...]:
        """A model under a layout at each cell where these ranks stand; none where they are not part of it."""
        name, layout = split(buffer)
        return tuple(Copy(self.models[name], self.layouts[layout], cell) for cell in self.ranks.at(layout))

    # ----------------------------------------------------------------------------------------------- values

    def _values(self) -> None:
        """From the event that makes a buffer to its free; what a loop collects, from the loop's beginning."""
        lasting = {f"{s.value}@{s.spread}" for s in self.plan.states}
        collected = {b: 2 * first for loop, first, _ in self.spans for b in loop.collects}
        until = {loop.until: 2 * last for loop, _, last in self.spans if loop.until}
        for buffer in sorted(lasting):
            self._value(buffer, 0, self.end)
        made = {b: start for b, start in collected.items() if self._holds(b)}
        for i, e in enumerate(self.events):
            for b in e.writes:
                if b not in made and b not in lasting and self._holds(b):
                    made[b] = 2 * i + 1
            for b in e.frees:
                if b in made:
                    self._value(b, made.pop(b), 2 * i + 1)
        for b, start in made.items():
            self._value(b, start, until.get(b, self.end))

    def _holds(self, buffer: str) -> bool:
        value, spread = split(buffer)
        return value in self.t.values and self.t.spreads[spread].mesh in self.ranks.meshes

    def _value(self, buffer: str, start: int, stop: int) -> None:
        value, spread = split(buffer)
        self._hold(value, buffer_bytes(self.t, value, spread), start, stop)

    # ----------------------------------------------------------------------------------------------- events

    def _during(self, i: int, e: Event) -> None:
        if e.traits.scratch:
            rule(RULES, e, "the memory estimate")(self, i, e)

    def _call(self, i: int, e: AnyCall) -> None:
        now = 2 * i + 1
        each = [needs(self.t, e, c, self.device) for c in self._copies(f"{e.model}@{e.layout}")]
        for what, size in max(each, key=lambda found: sum(found.values())).items():
            self._hold(what, size, now, now)

    def _load(self, i: int, e: Load) -> None:
        if not e.of:
            now, size = 2 * i + 1, FLOAT * max(map(largest, self._copies(f"{e.model}@{e.layout}")))
            self._hold(f"weights of {e.model} being loaded", size, now, now, host=True)

    def _save(self, i: int, e: Save) -> None:
        now, copies = 2 * i + 1, self._copies(f"{e.model}@{e.layout}")
        self._hold(f"parameters gathered to save {e.model}", max(map(saved_bytes, copies)), now, now)

    def _transfer(self, i: int, e: Transfer) -> None:
        """What is sent is kept until it is received, which a rank finds out when it first reads; then the rows that
        came are put together in one piece."""
        what, there = f"transfer of {', '.join(e.values)}", [f"{v}@{e.dst}" for v in e.values]
        sends = sum(buffer_bytes(self.t, v, e.src) for v in e.values if self._holds(f"{v}@{e.src}"))
        joined = sum(buffer_bytes(self.t, *split(b)) for b in there if self._holds(b))
        self._until_read(what, sends, i, 2 * i + 1, there)
        reader = self._reader(i + 1, there)
        self._hold(what, joined, *(2 * [self.end if reader is None else reader]))

    def _realloc(self, i: int, e: Realloc) -> None:
        """The last rounds live until the new copy is first used; a rank that only sends waits at once."""
        model = self.models[e.model]
        room = realloc_bytes(self.plan, self.ways[e.model, e.src, e.dst], e, self.ranks)
        what, now = f"realloc of {e.called if e.source else e.model}", 2 * i + 1
        mean = 3 * FLOAT * max((largest(c) for c in self._copies(f"{model.name}@{e.dst}")), default=0)  # of old and new
        self._hold(what, room + (mean if e.decay else 0), now, now)
        if self.ranks.at(e.dst):
            self._until_read(what, room, i, now + 1, [f"{model.name}@{e.dst}"], before=1)

    def _until_read(self, what: str, size: int, i: int, start: int, buffers: list[str], before: int = 0) -> None:
        """Held from event i until one of some buffers is first read or freed, or until `before` moments earlier;
        perhaps in the next step, or when the event comes again."""
        reader = self._reader(i + 1, buffers)
        if reader is not None:
            self._hold(what, size, start, reader - before)
            return
        self._hold(what, size, start, self.end)
        if self._again():
            reader = self._reader(self.top // 2, buffers)
            self._hold(what, size, self.top, min(start - 1, start if reader is None else reader - before))

    def _reader(self, first: int, buffers: list[str]) -> int | None:
        """The moment of the first event, from event `first` on, that reads or frees one of some buffers."""
        wanted = set(buffers)
        for j, e in enumerate(self.events[first:], first):
            if wanted.intersection((*e.reads, *e.frees)):
                return 2 * j + 1
        return None

    def _checkpoint(self, i: int, e: Checkpoint) -> None:
        """A share of each model: those who hold the same write it in turns. It is written while the next steps run."""
        size = 0
        for buffer in e.reads:
            if split(buffer)[0] in self.models and (copies := self._copies(buffer)):
                parts = 3 if copies[0].trained else 1
                whole = max(c.stored * resting(c) * num_shards(c.layout) for c in copies)
                size += parts * whole // (copies[0].layout.dp * copies[0].layout.cp)
        if size:
            start = self.top if self._again() else 2 * i + 1
            self._hold("checkpoint being written", size, start, self.end, host=True)


def _name(copy: Copy) -> str:
    return f"{copy.model.name} ({degrees_of(copy.layout)})"


# What a kind of event needs while it runs, of the kinds whose traits say `scratch`.
RULES: Mapping[type[Event], Callable[[_Walk, int, Any], None]] = {
    Generate: _Walk._call, Infer: _Walk._call, Train: _Walk._call, Transfer: _Walk._transfer, Realloc: _Walk._realloc,
    Load: _Walk._load, Save: _Walk._save, Checkpoint: _Walk._checkpoint,
}
