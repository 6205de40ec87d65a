"""On every rank, each buffer is written, then read, then freed, once a step.

In: tables with sound references, classes and operations. Out: diagnostics RL0513 (read before written), RL0514
(overwritten), RL0515 (freed though not there), RL0516 (never freed), RL0517 (a block ends with other buffers than it
began with), RL0518 (lengths that a division of rows needs are missing). Ranks that are on the same meshes see the same
story, so one of them is enough. Parameters are not looked at here (`versions.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rldsl.diag import Diagnostic
from rldsl.plan.events import Collect, Compute, Event, Every, Item, Loop, Select, split
from rldsl.plan.references import Role, references
from rldsl.verify.rank_sets import Ranks, alike, union
from rldsl.verify.tables import Tables, name, problem

ANYONE = ""


@dataclass(frozen=True, slots=True)
class Step:
    """What one event does to the buffers of its participants; each with the place (a set of ranks) that it holds for.
    lengths: frame -> the buffers of which one must be there."""

    event: Event
    reads: tuple[tuple[str, str], ...]
    writes: tuple[tuple[str, str], ...]
    frees: tuple[tuple[str, str], ...]
    lengths: tuple[tuple[str, tuple[str, ...]], ...]


def check_dataflow(t: Tables) -> Iterator[Diagnostic]:
    places = {**t.ranks, **{f"first of {m.id}": Ranks.one(m.ranks[0][0]) for m in t.plan.meshes}}
    steps = {event.id: _step(t, event) for event, _ in t.events}
    lasting = {f"{s.value}@{s.spread}" for s in t.plan.states}
    held = {b: t.spreads[split(b)[1]].mesh for b in _held(t)}
    found: dict[tuple[str, str, int], tuple[Event, list[Ranks]]] = {}
    for mine, ranks in alike(places, t.plan.header.world).items():
        story = _Story(mine | {ANYONE}, steps, held, lasting)
        story.run(t.plan.body)
        story.live -= lasting
        if story.live and story.last is not None:
            story.say("RL0516", f"{', '.join(sorted(story.live))} is never freed", story.last)
        for code, title, event in story.found:
            found.setdefault((code, title, event.id), (event, []))[1].append(ranks)
    for (code, title, _), (event, sets) in found.items():
        yield problem(code, title, event, ranks=union(sets))


def _held(t: Tables) -> Iterator[str]:
    """Buffers that come to life, or end, otherwise than by events."""
    yield from (f"{s.value}@{s.spread}" for s in t.plan.states)
    for _, path in t.events:
        for block in path:
            if isinstance(block, Loop):
                yield from (*block.collects, *filter(None, (block.until,)))


class _Story:
    """One rank's buffers along its schedule. places: buffers that loops and states look after -> their mesh. lasting:
    those of states."""

    def __init__(self, mine: frozenset[str], steps: Mapping[int, Step], places: Mapping[str, str], lasting: set[str]):
        self.mine, self.steps, self.places = mine, steps, places
        self.live: set[str] = {b for b in lasting if places[b] in mine}
        self.rewritten = set(lasting)
        self.last: Event | None = None
        self.found: list[tuple[str, str, Event]] = []

    def say(self, code: str, title: str, event: Event) -> None:
        self.found.append((code, title, event))

    def run(self, body: tuple[Item, ...]) -> None:
        for item in body:
            if isinstance(item, Loop):
                self._loop(item)
            elif isinstance(item, Every):
                before = set(self.live)
                self.run(item.body)
                self._same(before, item)
            elif item.mesh in self.mine:
                self._event(self.steps[item.id])

    def _loop(self, loop: Loop) -> None:
        mine = {b for b in loop.collects if self.places[b] in self.mine}
        if mine & self.live and self.last is not None:
            again = ", ".join(sorted(mine & self.live))
            self.say("RL0514", f"loop {loop.id} collects into {again}, which already exists", self.last)
        self.live |= mine
        self.rewritten |= mine
        before = set(self.live)
        last = self.last
        self.run(loop.body)
        if loop.until and self.last is not None and self.last is not last:  # a rank without events is not in the loop
            if loop.until not in self.live:
                self.say("RL0513", f"loop {loop.id} ends on {loop.until}, which does not exist", self.last)
            self.live.discard(loop.until)
        self._same(before, loop)
        self.rewritten -= mine

    def _same(self, before: set[str], block: Loop | Every) -> None:
        if self.live == before or self.last is None:
            return
        what = "loop" if isinstance(block, Loop) else "every"
        if leaked := self.live - before:
            self.say("RL0516", f"{', '.join(sorted(leaked))} is not freed inside the {what} that writes it", self.last)
        if lost := before - self.live:
            self.say("RL0517", f"{', '.join(sorted(lost))} is freed inside the {what}, but written outside", self.last)
        self.live = before

    def _event(self, step: Step) -> None:
        event, mine, live = step.event, self.mine, self.live
        self.last = event
        for buffer, place in step.reads:
            if place in mine and buffer not in live:
                self.say("RL0513", f"{name(event)} reads {buffer}, which does not exist", event)
        for frame, buffers in step.lengths:
            if live.isdisjoint(buffers):
                self.say("RL0518",
                         f"{name(event)} divides the rows of frame {frame}, but their lengths are not known yet", event)
        for buffer, place in step.frees:
            if place in mine:
                if buffer not in live:
                    self.say("RL0515", f"{name(event)} frees {buffer}, which does not exist", event)
                live.discard(buffer)
        for buffer, place in step.writes:
            if place in mine:
                if buffer in live and not (buffer in self.rewritten and _may_rewrite(event)):
                    self.say("RL0514", f"{name(event)} writes {buffer} again before it is freed", event)
                live.add(buffer)


def _may_rewrite(e: Event) -> bool:
    """Collect appends; a computation on every rank sets a state anew."""
    return isinstance(e, Collect | Compute)


def _step(t: Tables, e: Event) -> Step:
    def mesh(buffer: str) -> str:
        return t.spreads[split(buffer)[1]].mesh

    reads = [b for b in e.reads if split(b)[0] in t.values]
    writes = tuple((b, mesh(b)) for b in e.writes if split(b)[0] in t.values)
    frees = tuple((b, mesh(b)) for b in e.frees if split(b)[0] in t.values)
    where = {b: _reader(t, e, b) for b in reads if b not in e.frees}
    lengths = tuple((f, _lengths(t, f)) for f in sorted(_weighed(t, e)))
    return Step(e, tuple(where.items()), writes, frees, lengths)


def _reader(t: Tables, e: Event, buffer: str) -> str:
    """The place whose ranks read a buffer of the event: of what is moved, those that have it."""
    spread = split(buffer)[1]
    if e.traits.first_ranks:
        return f"first of {t.spreads[spread].mesh}"
    alone = e.traits.read_by != "" and spread == getattr(e, e.traits.read_by)
    return t.spreads[spread].mesh if alone else ANYONE


def _weighed(t: Tables, e: Event) -> set[str]:
    """The frames whose lengths every participant needs: to compute a division, or to cut ragged rows."""
    if not e.traits.weighs:
        return set()
    frames = set[str]()
    for field, role, id in references(e):
        if field in e.traits.weighs and role is Role.FRAME:
            frames.add(id)
        elif field in e.traits.weighs and t.values[id].extent in ("tokens", "response"):
            frames.add(t.values[id].frame)
    if isinstance(e, Select):
        frames = {t.frames[e.frame].selected_from} | (set() if e.condition else frames)
    spreads = [id for _, role, id in references(e) if role is Role.SPREAD]
    frames |= {f for s in spreads if t.spreads[s].balance_by == "tokens" for f in t.spreads[s].frames}
    return frames | {p for s in spreads for f in t.spreads[s].frames if (p := t.frames[f].present_in)}


def _lengths(t: Tables, frame: str) -> tuple[str, ...]:
    return tuple(f"{frame}.lengths@{s.id}" for s in t.plan.spreads if s.granularity == "all")
