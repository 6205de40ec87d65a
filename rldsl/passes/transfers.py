"""Transfers: where an event needs a value divided in another way than it was made.

In: the events of the nodes. Out: the same with a Transfer before the first reader of each such buffer, one for all
values of a frame that one event made and that go between the same two spreads. Invariant: every value is written in the
spread in which it is read, earlier in the same block or in an enclosing one.
"""

from __future__ import annotations

from dataclasses import replace

from rldsl.diag import internal_error
from rldsl.passes.draft import Draft, union
from rldsl.plan.events import Collect, Event, Item, Loop, Transfer, When, split_buffer
from rldsl.plan.model import Mesh
from rldsl.plan.naming import without_line

Defs = dict[str, tuple[str, int]]  # value -> (spread it was made in, number of the event that made it)


def transfers(draft: Draft) -> Draft:
    worker = _Transfers(draft)
    body = worker.block(draft.body, {}, draft.lasting)
    return replace(draft, body=body).with_meshes(*worker.meshes)


class _Transfers:
    def __init__(self, draft: Draft):
        self.draft, self.values, self.models = draft, draft.values, {m.name for m in draft.placed.models}
        self.labels = draft.labels
        self.meshes: list[Mesh] = []
        self.num_events = 0  # walked so far; blocks count too

    def block(self, items: tuple[Item, ...], defs: Defs, live_in: frozenset[str]) -> tuple[Item, ...]:
        """The items with their transfers. defs, live_in: values and buffers that exist at the start of the block."""
        defs, available, out = dict(defs), set(live_in), []
        readers = _readers(items)
        for item in items:
            if isinstance(item, When | Loop):
                if isinstance(item, Loop):  # what a repeat only reads comes once, before it
                    for event in _own_events(item.body):
                        out += self._bring(event, defs, available, readers)
                collected = item.collects if isinstance(item, Loop) else ()
                out.append(replace(item, body=self.block(item.body, defs, frozenset(available).union(collected))))
                available.update(collected)
                self.num_events += 1
                defs |= {value: (spread, self.num_events) for value, spread in map(split_buffer, collected)}
                continue
            out += self._bring(item, defs, available, readers)
            out.append(item)
            self.num_events += 1
            for buffer in item.writes:
                value, spread = split_buffer(buffer)
                if value not in self.models:
                    defs[value] = (spread, self.num_events)
                    available.add(buffer)
        return tuple(out)

    def _bring(self, event: Event, defs: Defs, available: set[str], readers: list[Event]) -> list[Item]:
        """Transfers for what `event` lacks, which become `available`. Coalesced: one transfer takes all values of a
        frame that the same event made and that some reader of this block wants in that spread."""
        out: list[Item] = []
        for buffer in event.reads:
            value, dst = split_buffer(buffer)
            if value in self.models or buffer in available or value not in defs:
                continue
            frame = self.values[value].frame
            group: list[str] = []
            for wanted in (b for e in readers for b in e.reads if b not in available):
                other, spread = split_buffer(wanted)
                if spread == dst and defs.get(other) == defs[value] and self.values[other].frame == frame \
                        and other not in group:
                    group.append(other)
            values, src = tuple(group) or (value,), defs[value][0]
            out.append(self._transfer(values, src, dst, event))
            available.update(f"{v}@{dst}" for v in values)
        return out

    def _transfer(self, values: tuple[str, ...], src: str, dst: str, reader: Event) -> Transfer:
        spreads = self.draft.spreads
        mesh = union(self.draft, (spreads[src].mesh, spreads[dst].mesh))
        self.meshes.append(mesh)
        wanted = ", ".join(map(self.labels.name, values))
        text = without_line(f"{self.labels.event(reader).display_name} reads {wanted}", reader.at)
        because = f"{text} on mesh {spreads[dst].mesh}"
        if spreads[src].mesh == spreads[dst].mesh:
            because += " with a different sharding"
        lacking = len(self.draft.ranks(spreads[dst].mesh) - self.draft.ranks(spreads[src].mesh))
        fixed = all(self.values[v].level == "batch" for v in values)
        return Transfer(id=0, mesh=mesh.id, reads=tuple(f"{v}@{src}" for v in values),
                        writes=tuple(f"{v}@{dst}" for v in values), at=reader.at, because=because,
                        bytes=8 * lacking * len(values) if fixed else -1, values=values, src=src, dst=dst)


def _own_events(items: tuple[Item, ...]) -> list[Event]:
    return [i for i in items if isinstance(i, Event)]


def _readers(items: tuple[Item, ...]) -> list[Event]:
    """The events of a block and of the repeats in it."""
    out: list[Event] = []
    for item in items:
        if isinstance(item, Loop):
            out += _readers(item.body)
        elif isinstance(item, Event):
            out.append(item)
    return out


def check_transfers(draft: Draft) -> None:
    """Everything that is read has been written, in that spread."""
    models = {m.name for m in draft.placed.models}

    def block(items: tuple[Item, ...], live_in: set[str]) -> None:
        available = set(live_in)
        for item in items:
            if isinstance(item, When | Loop):
                available.update(item.collects if isinstance(item, Loop) else ())
                block(item.body, available)
                continue
            for buffer in item.reads:
                value = split_buffer(buffer)[0]
                exchanged = isinstance(item, Collect) and value.endswith(".lengths")  # by the next pass
                if not (value in models or buffer in available or exchanged):
                    raise internal_error(f"{item.display_name} reads {buffer} before it exists", "pass transfers")
            available.update(item.writes)

    block(draft.body, set(draft.lasting))
