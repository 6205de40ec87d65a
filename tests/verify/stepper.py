"""Every rank of a plan by itself: it steps through its list, meets the others, and holds what it holds.

In: a plan. Out: a `Verdict`. An event happens when all ranks of its mesh are at it (rendezvous); which of those that
can happen comes first is drawn. What a rank then uses must be there, on it, be of the moment that the story means
(`story.py`), and cover the rows that it works on by the divisions that the runtime would compute from the lengths that
this rank knows. It knows nothing of `rldsl.verify`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, takewhile

from rldsl.diag import InternalError
from rldsl.plan.events import Event, Generate, Infer, Item, Loop, When, ahead_of, split_buffer
from rldsl.plan.model import Plan, Spread, Value
from rldsl.plan.spaces import IndexedFrame
from rldsl.sharding import partition
from rldsl.sharding.layout import AxisName, axis_ranks, coordinate
from tests.verify.arithmetic import Garbage, need, term
from tests.verify.moment import Key, Lens, Moment, due, enough, is_due, kept, turns
from tests.verify.story import Story

Block = Loop | When


@dataclass(frozen=True, slots=True)
class Verdict:
    """ends: every rank comes to its end and never uses garbage; why: what is wrong otherwise. meaning: what a person
    would see of the run; equal for plans that compute the same."""

    ends: bool
    why: str = ""
    meaning: int = 0


def simulate(plan: Plan, draw: random.Random) -> Verdict:
    """Whatever a malformed plan makes this program choke on would choke a rank too."""
    try:
        story = Story(plan).tell()
        World(story, draw).run()
    except Garbage as wrong:
        return Verdict(False, str(wrong))
    except (LookupError, ValueError, TypeError, AssertionError, ArithmeticError, StopIteration, AttributeError,
            RecursionError, InternalError) as wrong:
        return Verdict(False, f"malformed: {type(wrong).__name__} {wrong}")
    return Verdict(True, meaning=term(repr(story.seen)))


@dataclass
class Rank:
    """buffers: of values. shards: (model, layout) -> stamp of the version, -2 when nothing was loaded yet. away: those
    in host memory. lens: frame -> the moment that made its lengths, and the rows known (None: all)."""

    number: int
    buffers: dict[str, tuple[int, frozenset[int]]] = field(default_factory=dict)
    shards: dict[tuple[str, str], int] = field(default_factory=dict)
    away: set[tuple[str, str]] = field(default_factory=set)
    parked: set[tuple[str, str]] = field(default_factory=set)
    one: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)  # copies that are another's too
    lens: dict[str, tuple[int, frozenset[int] | None]] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    lasting: frozenset[str] = frozenset()  # buffers that are the same in every step
    step: int = 0  # that `buffers` and `lens` are of
    steps: dict[int, tuple[dict[str, tuple[int, frozenset[int]]], dict[str, tuple[int, frozenset[int] | None]]]] = field(
        default_factory=dict)  # the same of others

    def of_step(self, step: int) -> None:
        """Look at what the rank holds of a step."""
        if step == self.step:
            return
        self.steps[self.step] = {b: x for b, x in self.buffers.items() if b not in self.lasting}, self.lens
        buffers, self.lens = self.steps.pop(step, ({}, {}))
        self.buffers = {b: x for b, x in self.buffers.items() if b in self.lasting} | buffers
        self.step = step


class World:
    def __init__(self, story: Story, draw: random.Random):
        self.story, self.plan, self.draw = story, story.plan, draw
        p = story.plan
        self.members = {m.id: m.members() for m in p.meshes}
        lasting = frozenset(f"{s.value}@{s.spread}" for s in (*p.states, *p.buffers))
        self.ranks = [Rank(r, lasting=lasting) for r in range(p.header.world)]
        self.groups = self._created()
        self.divided: dict[object, tuple[dict[str, tuple[int, ...]], ...]] = {}
        self.placed: dict[tuple[str, int], int] = {}  # layout, rank -> its place in dp
        self.lined: dict[tuple[str, str], tuple[tuple[int, ...], ...]] = {}  # layout, axis -> its groups
        self.sound: set[tuple[type[Event], str, str]] = set()  # events that run a model, their meshes and layouts
        self.wanted: dict[object, frozenset[int]] = {}
        for s in (*p.states, *p.buffers):
            need(story.spreads[s.spread].granularity == "all", "a state that is divided")
            for r in self.members[story.spreads[s.spread].mesh]:
                self.ranks[r].buffers[f"{s.value}@{s.spread}"] = (-1, frozenset({0}))

    # ---------------------------------------------------------------------------------------------- stepping

    def run(self) -> None:
        from tests.verify.acts import act

        events = {e.id: (e, path) for e, path in _walk(self.plan.body, ())}
        lists: dict[int, list[tuple[Event, tuple[Block, ...]]]] = {}
        for c in self.plan.classes:
            for start, stop in c.ranks:
                for r in range(start, stop):
                    need(r not in lists and r < len(self.ranks), f"rank {r} has two classes, or does not exist")
                    lists[r] = [events[id] for id in c.events]
        need(len(lists) == len(self.ranks), "a rank without a class")
        programs = {r: self._program(self.ranks[r], entries, (), 1) for r, entries in lists.items()}
        waiting: dict[tuple[Key, int], set[int]] = defaultdict(set)
        ready: list[tuple[Key, Event]] = []

        def advance(r: int) -> None:
            step = next(programs[r], None)
            if step is None:
                del programs[r]
                return
            key, event = step
            need(r in self.members[event.mesh], f"rank {r} is at event {event.id}, which is not on its mesh")
            waiting[key, event.id].add(r)
            if len(waiting[key, event.id]) == len(self.members[event.mesh]):
                ready.append((key, event))

        for r in sorted(programs):
            advance(r)
        while ready:
            at = self.draw.randrange(len(ready))
            ready[at], ready[-1] = ready[-1], ready[at]
            key, event = ready.pop()
            now = self.story.moments[*key, event.id]
            for r in self.members[event.mesh]:
                self.ranks[r].of_step(now.step)
            act(self, event, now)
            order = sorted(waiting.pop((key, event.id)))
            self.draw.shuffle(order)
            for r in order:
                advance(r)
        stuck = sorted(programs)
        need(not stuck, f"ranks {stuck} wait for ever")

    def _program(self, rank: Rank, entries: list[tuple[Event, tuple[Block, ...]]], key: Key, turn: int,
                 depth: int = 0, chosen: bool = False) -> Iterator[tuple[Key, Event]]:
        """The events of a rank's list, inside `depth` blocks, with the turns of the loops around each. chosen: whether
        they are those that run, whatever the blocks around them say of the turn."""
        for number, group in groupby(entries, lambda x: id(x[1][depth]) if len(x[1]) > depth else 0):
            inside = list(group)
            if not number:
                yield from ((key, e) for e, _ in inside)
                continue
            block = inside[0][1][depth]
            if isinstance(block, When):
                if chosen or due(block, turn):
                    yield from self._program(rank, inside, key, turn, depth + 1, chosen)
                continue
            yield from self._loop(rank, block, inside, key, depth)

    def _loop(self, rank: Rank, loop: Loop, inside: list[tuple[Event, tuple[Block, ...]]], key: Key,
              depth: int) -> Iterator[tuple[Key, Event]]:
        step = key[0] + max(ahead_of(loop), 0) if key else 0
        if key:
            rank.of_step(step)
        for buffer in loop.collects:
            value, spread = split_buffer(buffer)
            if rank.number in self.members[self.story.spreads[spread].mesh]:
                record = self.story.records[value]
                if record.extent == "lengths":
                    rank.lens[record.frame] = (-1, None)
                else:
                    need(record.extent == "columns" or record.dtype != "text", "text in a tensor")
                    rank.buffers[buffer] = (-1, frozenset())
        for turn in turns(loop, not key):
            here = inside
            if not key:
                here = [(e, path) for e, path in inside if is_due(*_unit(e, path[depth + 1:]), loop, turn)]
            yield from self._program(rank, here, (*key, turn), turn, depth + 1, not key)
            if loop.until and (key or turn >= 1):
                rank.of_step(step if key else turn)
                stamp, _ = rank.buffers.pop(loop.until)
                if enough(self.story.made[split_buffer(loop.until)[0], stamp]):
                    break

    # ------------------------------------------------------------------------------------------------ looking

    def _created(self) -> set[tuple[int, ...]]:
        """The communicators that the runtime creates, by their ranks."""
        layouts, meshes = self.story.layouts, self.story.meshes
        found: set[tuple[int, ...]] = set()
        for g in self.plan.groups:
            if g.axis == "mesh":
                found.add(meshes[g.mesh or layouts[g.layout].mesh].members())
            else:
                found.update(axis_ranks(layouts[g.layout], meshes[layouts[g.layout].mesh], g.axis))
        need(all(0 <= r < len(self.ranks) and len({*x}) == len(x) for x in found for r in x), "a group of no ranks")
        return found

    def communicates(self, ranks: tuple[int, ...]) -> None:
        need(len(ranks) == 1 or ranks in self.groups, f"no communicator of ranks {ranks}")

    def on_layout(self, e: Event, layout: str) -> None:
        """An event that runs a model: exactly the ranks of its layout, with their communicators."""
        if (kind := (type(e), e.mesh, layout)) in self.sound:
            return
        x = self.story.layouts[layout]
        mesh = self.story.meshes[x.mesh]
        need(set(self.members[e.mesh]) == set(mesh.members()), "ranks that are not those of the layout")
        need(x.backend == "torch" and x.dp % x.ep == 0 and 1 in (x.ep, x.cp), "what the backend does not do")
        need(not x.zero or not isinstance(e, Generate | Infer), "parameters that are whole in training alone")
        need(x.cp == 1 or not isinstance(e, Generate), "a new token cannot be divided")
        for axis in ("tp", "pp", "dp", "cp", "mesh", *(("ep", "expert_dp") if x.ep > 1 else ())):
            for ranks in self.lines(layout, axis):
                self.communicates(ranks)
        self.sound.add(kind)

    def lines(self, layout: str, axis: AxisName) -> tuple[tuple[int, ...], ...]:
        """The groups of an axis."""
        if (layout, axis) not in self.lined:
            x = self.story.layouts[layout]
            self.lined[layout, axis] = axis_ranks(x, self.story.meshes[x.mesh], axis)
        return self.lined[layout, axis]

    def shares(self, spread: Spread, now: Moment) -> tuple[dict[str, tuple[int, ...]], ...]:
        """[shard][frame] -> rows, as the runtime finds it from the lengths."""
        if (spread.id, now.stamp) in self.divided:
            return self.divided[spread.id, now.stamp]
        frames = self._divided_frames(spread, now.lens)
        totals = self._weighing(spread, frames, now.lens)
        key = (spread.id, now.step, *((f, now.lens[f].stamp) for f in totals), *(f.id for f in frames))
        if key not in self.divided:
            dp = self.story.layouts[spread.layout].dp if spread.layout else 1
            self.divided[key] = partition.rows_by_dp(spread, dp, frames, {f: now.lens[f].totals() for f in totals},
                                                     self.plan.header.seed, now.step)
        self.divided[spread.id, now.stamp] = self.divided[key]
        return self.divided[key]

    def _divided_frames(self, spread: Spread, lens: Mapping[str, Lens]) -> list[IndexedFrame]:
        of = self.story.frames[spread.frames[0]] if spread.frames else None
        mine = (f for f in self.story.frames.values()
                if of is None or f.root_origin == of.root_origin or f.among(of) is not None)
        return [f for f in mine if not f.present_in or f.present_in in lens or f.id in spread.frames]

    def _weighing(self, spread: Spread, frames: list[IndexedFrame], lens: Mapping[str, Lens]) -> list[str]:
        partial = {f.present_in for f in frames if f.present_in in lens}
        return sorted(partial | (set(spread.frames) if spread.balance_by == "tokens" else set()))

    def knows_division(self, rank: Rank, spread: Spread, frame: str, now: Moment, own: bool = False) -> None:
        """That the rank can compute the same division: lengths that weigh and that tell which rows there are. own: of
        its own rows alone."""
        known, weigh = self.story.frames, {*spread.frames} if spread.balance_by == "tokens" else set()
        tell = {known[f].present_in for f in spread.frames} - {""} if spread.balance_by != "slot" else set()
        for f in weigh | tell:
            self.knows(rank, f, None, now)
        if tells := known[frame].present_in:
            mine = None
            if own:  # rows that it lacks the lengths of have none, so they are absent to it
                here = self.shares(spread, now)[self.shard(spread, rank.number)]
                mine = frozenset(here[tells]) if tells in here else None  # what tells may lie in another tree
            self.knows(rank, tells, mine, now)

    def knows(self, rank: Rank, frame: str, rows: frozenset[int] | None, now: Moment) -> None:
        """That the rank knows the lengths of some rows (None: all) as they are now."""
        stamp, known = rank.lens[frame]
        need(stamp == now.lens[frame].stamp, f"rank {rank.number} has other lengths of {frame}")
        need(known is None or rows is not None and rows <= known, f"rank {rank.number} lacks lengths of {frame}")

    def shard(self, spread: Spread, rank: int) -> int:
        if not spread.layout or spread.granularity == "all":
            return 0
        if (spread.layout, rank) not in self.placed:
            layout = self.story.layouts[spread.layout]
            self.placed[spread.layout, rank] = coordinate(layout, self.story.meshes[layout.mesh], rank).dp
        return self.placed[spread.layout, rank]

    def my_rows(self, rank: Rank, spread: Spread, frame: str, now: Moment) -> frozenset[int]:
        self.knows_division(rank, spread, frame, now, own=True)
        shard = self.shard(spread, rank.number)
        if (key := ("of a frame", spread.id, shard, frame, now.stamp)) not in self.wanted:
            self.wanted[key] = frozenset(self.shares(spread, now)[shard][frame])
        return self.wanted[key]

    def all_below(self, rank: Rank, frame: str, space: str, rows: frozenset[int], now: Moment,
                  ids: set[int] | None = None) -> None:
        """That a rank's rows of a frame are all of those that lie in some rows of a space (None: those of its own)."""
        f = self.story.frames[frame]
        each = next((f.count // s.count for s, o in zip(f.chain, f.origins) if space in (s.id, o)), 0)
        need(each, f"{frame} does not lie in {space}")
        ids = {r // each for r in rows} if ids is None else ids
        need(rows >= {r for r in self.story.rows(frame, now.lens) if r // each in ids}, f"rank {rank.number} lacks rows that "
             f"belong together in {space}")

    def ids(self, rank: int, spread: Spread, value: Value, now: Moment) -> frozenset[int]:
        """What a rank of the spread's mesh is to hold of a value."""
        if value.level == "batch":
            return frozenset({0})
        shard = self.shard(spread, rank)
        if (key := ("of a value", spread.id, shard, value.id, now.stamp)) not in self.wanted:
            rows = self.shares(spread, now)[shard][value.frame]
            self.wanted[key] = frozenset(kept(value, rows, self.story.frames[value.frame]))
        return self.wanted[key]

    def holds(self, rank: Rank, buffer: str, ids: frozenset[int], now: Moment) -> None:
        value = split_buffer(buffer)[0]
        need(buffer in rank.buffers, f"rank {rank.number} does not hold {buffer}")
        stamp, mine = rank.buffers[buffer]
        need(stamp == now.values[value].stamp, f"rank {rank.number} holds another {value} than is meant")
        need(ids <= mine, f"rank {rank.number} lacks rows of {buffer}")

    def reads(self, rank: Rank, e: Event, value: str, ids: frozenset[int], now: Moment) -> None:
        record = self.story.records.get(value)
        need(record is None or record.extent != "array", "work on what only the log reads")
        self.holds(rank, next(b for b in e.reads if split_buffer(b)[0] == value), ids, now)

    def uses(self, rank: Rank, model: str, layout: str, now: Moment, anywhere: bool = False) -> None:
        key = rank.one.get((model, layout), (model, layout))
        need(key in rank.shards, f"rank {rank.number} has no {model}@{layout}")
        need(rank.shards[key] == now.models[model][0], f"rank {rank.number} has another version of {model}@{layout}")
        need(anywhere or key not in rank.away, f"{model}@{layout} is in host memory on rank {rank.number}")


def _unit(e: Event, path: tuple[Block, ...]) -> tuple[Event | Loop, tuple[When, ...]]:
    """What runs as a whole in a turn: an event or the loop around it; and the blocks around that."""
    blocks = tuple(takewhile(lambda b: isinstance(b, When), path))
    return (path[len(blocks)] if len(path) > len(blocks) else e), blocks  # type: ignore[return-value]


def _walk(items: tuple[Item, ...], path: tuple[Block, ...]) -> Iterator[tuple[Event, tuple[Block, ...]]]:
    for item in items:
        if isinstance(item, Event):
            yield item, path
        else:
            yield from _walk(item.body, (*path, item))
