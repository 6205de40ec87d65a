"""On every rank, each buffer is written, then read, then freed, once a step.

In: tables with sound references, classes and operations. Out: diagnostics RL0513 (read before written), RL0514
(overwritten), RL0515 (freed though it does not exist), RL0516 (never freed), RL0517 (a block ends with other buffers
than it began with), RL0518 (lengths that a division of rows needs are missing). Ranks on the same meshes have the same
reads, writes and frees, so one of them is checked. Parameters are checked by `versions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rldsl.diag import Diagnostic
from rldsl.plan.events import (
    Collect,
    Compute,
    Derive,
    Event,
    Item,
    Loop,
    Store,
    Update,
    When,
    ahead_of,
    runs_in,
    split_buffer,
)
from rldsl.plan.projection import walk
from rldsl.plan.references import Role, references
from rldsl.sharding.rank_sets import Ranks, group_equal_ranks, union
from rldsl.verify.tables import Tables, name, problem

# The name of a set of ranks is the id of a mesh, "first of MESH" for its first rank, or this, for those of the event.
ALL_PARTICIPANTS = ""
AHEAD = " of a later step: +"  # between the name of a buffer and how many iterations later its step begins


@dataclass(frozen=True, slots=True)
class Effects:
    """What an event does to the buffers of its participants: (buffer, the set of ranks that it concerns)."""

    event: Event  # the event
    reads: tuple[tuple[str, str], ...]  # what must exist
    writes: tuple[tuple[str, str], ...]  # what exists afterwards
    frees: tuple[tuple[str, str], ...]  # what must exist, and no longer does afterwards
    lengths: tuple[tuple[str, tuple[str, ...]], ...]  # (frame, the buffers of its lengths, one of which must exist)


def check_dataflow(t: Tables) -> Iterator[Diagnostic]:
    rank_sets = {**t.ranks, **{f"first of {m.id}": Ranks.one(m.ranks[0][0]) for m in t.plan.meshes}}
    effects = {event.id: _effects(t, event) for event, _ in t.events}
    states = set(t.plan.lasting)
    meshes = {b: t.spreads[split_buffer(b)[1]].mesh for b in _kept_by_blocks(t)}
    problems: dict[tuple[str, str, int], tuple[Event, list[Ranks]]] = {}
    for members, ranks in group_equal_ranks(rank_sets, t.plan.header.world).items():
        trace = _BufferTrace(members | {ALL_PARTICIPANTS}, effects, meshes, states)
        trace.run(t.plan.body)
        trace.live -= states
        if trace.live and trace.last is not None:
            trace.report("RL0516", f"{', '.join(sorted(trace.live))} is never freed", trace.last)
        for code, title, event in trace.problems:
            problems.setdefault((code, title, event.id), (event, []))[1].append(ranks)
    for (code, title, _), (event, sets) in problems.items():
        yield problem(code, title, event, ranks=union(sets))


def _kept_by_blocks(t: Tables) -> Iterator[str]:
    """Buffers that begin or end with a loop or the run, and not by an event."""
    yield from t.plan.lasting
    for _, path in t.events:
        for block in path:
            if isinstance(block, Loop):
                yield from (*block.collects, *filter(None, (block.until,)))


class _BufferTrace:
    """The buffers of one rank along its schedule, and what is wrong with them.

    member_of: the sets of ranks that the rank is in. effects: by event id. meshes: of the buffers that loops and states
    keep. states: the buffers of states, which exist from the start to the end of a run."""

    def __init__(self, member_of: frozenset[str], effects: Mapping[int, Effects], meshes: Mapping[str, str],
                 states: set[str]):
        self.member_of, self.effects, self.meshes = member_of, effects, meshes
        self.live: set[str] = {b for b in states if meshes[b] in member_of}
        self.kept = states  # from step to step
        self.overwritable = set(states)  # buffers that may be written while they exist
        self.iterations_ahead: dict[int, int] = {}  # ahead of an event -> by how many iterations that are not left out
        # with a lag: the blocks that run in some steps, by number, around what runs now, outermost first; and of what
        # exists, those around the event that made it
        self.blocks: tuple[int, ...] = ()
        self.made_in: dict[str, tuple[int, ...]] = {}
        self.last: Event | None = None  # of the rank, so far
        self.problems: list[tuple[str, str, Event]] = []

    def report(self, code: str, title: str, event: Event) -> None:
        self.problems.append((code, title, event))

    def run(self, body: tuple[Item, ...]) -> None:
        for item in body:
            if isinstance(item, Loop) and item.first < 1:
                self._check_scopes(item.body)
                self._turns(item)
            elif isinstance(item, Loop):
                self._loop(item)
            elif isinstance(item, When):
                before = set(self.live)
                self.run(item.body)
                self._check_balanced(before, item)
            elif item.mesh in self.member_of:
                self._event(self.effects[item.id])

    def _loop(self, loop: Loop) -> None:
        ahead = ahead_of(loop)
        collected = {self._at(b, ahead) for b in loop.collects if self.meshes[b] in self.member_of}
        if collected & self.live and self.last is not None:
            existing = ", ".join(sorted(collected & self.live))
            self.report("RL0514", f"loop {loop.id} collects into {existing}, which already exists", self.last)
        self.live |= collected
        self.made_in |= dict.fromkeys(collected, self.blocks)
        self.overwritable |= collected
        before = set(self.live)
        last = self.last
        self.run(loop.body)
        if loop.until and self.last is not None and self.last is not last:  # a rank without events is not in the loop
            self._ends_on(loop, self.last, ahead)
        self._check_balanced(before, loop)
        self.overwritable -= collected

    def _ends_on(self, loop: Loop, last: Event, ahead: int = 0) -> None:
        """A loop reads its condition after an iteration, and frees it."""
        if self._at(loop.until, ahead) not in self.live:
            self.report("RL0513", f"loop {loop.id} ends on {loop.until}, which does not exist", last)
        self.live.discard(self._at(loop.until, ahead))

    def _turns(self, loop: Loop) -> None:
        """A step loop whose events run ahead: buffers of later steps live from iteration to iteration. Between the
        first iterations and the last, which lack some events, all iterations are alike if two of them begin with the
        same buffers. What an event finds depends only on which events of the same step come before it. So iterations in
        which nothing happens to the values of a step are left out, and the work does not grow with the lag. Blocks that
        run in some steps are taken as if they ran in all: nothing outside depends on whether they do, since they free
        what they make (`_check_scopes`), and nothing outside uses it (`_exists`)."""
        aheads = sorted({x.event.ahead for x in self.effects.values() if x.event.ahead > 0})
        self.iterations_ahead = {ahead: i for i, ahead in enumerate(aheads, 1)}
        lag = len(aheads)
        steps = min(loop.trips, 2 * lag + 2)
        at_start: list[set[str]] = []
        for iteration in range(1 - lag, steps + 1):
            if 1 <= iteration <= steps - lag:
                at_start.append(set(self.live))
            for item, self.blocks in without_blocks(loop.body):
                ahead = ahead_of(item)
                if runs_in(iteration, self.iterations_ahead.get(ahead, ahead), steps):
                    self.run((item,))
            self.blocks = ()
            if loop.until and iteration >= 1 and self.last is not None:
                self._ends_on(loop, self.last)
            left = {b for b in self.live if AHEAD not in b} - self.overwritable
            if left and self.last is not None:
                self.report("RL0516", f"{', '.join(sorted(left))} is not freed in the step that writes it", self.last)
            self.made_in = {_next_iteration(b): self.made_in.get(b, ()) for b in self.live - left}
            self.live = {_next_iteration(b) for b in self.live - left}
        if any(x != at_start[0] for x in at_start) and self.last is not None:
            changed = ", ".join(sorted(at_start[0] ^ at_start[-1]))
            self.report("RL0517",
                        f"{changed}: an iteration of loop {loop.id} ends with other buffers than it begins with",
                        self.last)

    def _check_scopes(self, items: tuple[Item, ...]) -> None:
        """With a lag, a block that runs in some steps frees the values that its events write, and no others."""
        for block in (i for i in items if isinstance(i, When)):
            own = [x for e, _ in walk(block.body) if e.mesh in self.member_of for x in (self.effects[e.id],)]
            wrote = {b for x in own for b, ranks in x.writes if ranks in self.member_of} - self.kept
            freed = {b for x in own for b, ranks in x.frees if ranks in self.member_of} - self.kept
            wrote |= {b for loop in _loops(block.body) for b in loop.collects if self.meshes[b] in self.member_of}
            wrote -= {loop.until for loop in _loops(block.body)}
            last = own[-1].event if own else None
            if last is not None and wrote - freed:
                self.report("RL0516", f"{', '.join(sorted(wrote - freed))} is not freed inside the block that writes "
                                      "it", last)
            if last is not None and freed - wrote:
                self.report("RL0517", f"{', '.join(sorted(freed - wrote))} is freed inside the block, but written "
                                      "outside", last)
            self._check_scopes(block.body)

    def _exists(self, buffer: str, event: Event) -> bool:
        """Whether a buffer is there for an event. Reports one that is not in every step in which the event runs."""
        held = self._at(buffer, event.ahead)
        if held in self.live and not self._is_in_reach(held):
            self.report("RL0513", f"{name(event)} uses {buffer}, which exists only in a block that does not run in "
                                  "every step", event)
        return held in self.live

    def _is_in_reach(self, held: str) -> bool:
        """Whether a live buffer is there in every step in which what now runs does: all blocks around what made it are
        around this, too."""
        around = self.made_in.get(held, ())
        return self.blocks[: len(around)] == around

    def _at(self, buffer: str, ahead: int) -> str:
        """A buffer by the step whose values it holds: what runs ahead uses those of a later step."""
        ahead = self.iterations_ahead.get(ahead, ahead)
        return f"{buffer}{AHEAD}{ahead}" if ahead > 0 and buffer not in self.kept else buffer

    def _check_balanced(self, before: set[str], block: Loop | When) -> None:
        """A block ends with the buffers that it began with."""
        if self.live == before or self.last is None:
            return
        what = "loop" if isinstance(block, Loop) else "block"
        if leaked := self.live - before:
            self.report("RL0516", f"{', '.join(sorted(leaked))} is not freed inside the {what} that writes it",
                        self.last)
        if lost := before - self.live:
            self.report("RL0517", f"{', '.join(sorted(lost))} is freed inside the {what}, but written outside",
                        self.last)
        self.live = before

    def _event(self, effects: Effects) -> None:
        event, member_of, live = effects.event, self.member_of, self.live
        self.last = event
        for buffer, rank_set in effects.reads:
            if rank_set in member_of and not self._exists(buffer, event):
                self.report("RL0513", f"{name(event)} reads {buffer}, which does not exist", event)
        for frame, buffers in effects.lengths:
            known = live.intersection(self._at(b, event.ahead) for b in buffers)
            if not any(map(self._is_in_reach, known)):
                self.report("RL0518",
                            f"{name(event)} divides the rows of frame {frame}, but their lengths are not known yet",
                            event)
        for buffer, rank_set in effects.frees:
            if rank_set in member_of:
                if not self._exists(buffer, event):
                    self.report("RL0515", f"{name(event)} frees {buffer}, which does not exist", event)
                live.discard(self._at(buffer, event.ahead))
        for buffer, rank_set in effects.writes:
            if rank_set in member_of:
                held = self._at(buffer, event.ahead)
                if held in live and not (held in self.overwritable and _may_overwrite(event)):
                    self.report("RL0514", f"{name(event)} writes {buffer} again before it is freed", event)
                live.add(held)
                self.made_in[held] = () if buffer in self.kept else self.blocks


def without_blocks(items: tuple[Item, ...], around: tuple[int, ...] = ()) -> Iterator[tuple[Event | Loop,
                                                                                            tuple[int, ...]]]:
    """The items of the step loop, those of blocks that run in some steps in their place, each with the numbers of the
    blocks around it."""
    for number, item in enumerate(items):
        if isinstance(item, When):
            yield from without_blocks(item.body, (*around, number))
        else:
            yield item, around


def _loops(items: tuple[Item, ...]) -> Iterator[Loop]:
    for item in items:
        if isinstance(item, Loop | When):
            yield from (item,) if isinstance(item, Loop) else ()
            yield from _loops(item.body)


def _next_iteration(buffer: str) -> str:
    """The name of a buffer in the next iteration, which is one step closer to the step of its values."""
    value, _, ahead = buffer.partition(AHEAD)
    return f"{value}{AHEAD}{int(ahead) - 1}" if ahead not in ("", "1") else value


def _may_overwrite(e: Event) -> bool:
    """Collect appends to what a loop collects; a computation on every rank sets a state anew, an update parts; a store
    adds rows to a replay buffer."""
    return isinstance(e, Collect | Compute | Store | Update)


def _effects(t: Tables, e: Event) -> Effects:
    def mesh(buffer: str) -> str:
        return t.spreads[split_buffer(buffer)[1]].mesh

    reads = [b for b in e.reads if split_buffer(b)[0] in t.values]
    writes = tuple((b, mesh(b)) for b in e.writes if split_buffer(b)[0] in t.values)
    frees = tuple((b, mesh(b)) for b in e.frees if split_buffer(b)[0] in t.values)
    readers = {b: _readers(t, e, b) for b in reads if b not in e.frees}
    lengths = tuple((f, _lengths_buffers(t, f)) for f in sorted(_frames_with_needed_lengths(t, e)))
    return Effects(e, tuple(readers.items()), writes, frees, lengths)


def _readers(t: Tables, e: Event, buffer: str) -> str:
    """The ranks that must hold `buffer` when the event runs: all participants; with the trait `source_spread`, the
    ranks of that spread alone; with `first_rank_of`, the first rank of the buffer's mesh; with `all_ranks`, those that
    hold the buffer, since some ranks of the world may hold nothing."""
    spread = split_buffer(buffer)[1]
    if e.traits.all_ranks:
        return t.spreads[spread].mesh
    if e.traits.first_rank_of:
        return f"first of {t.spreads[spread].mesh}"
    source = e.traits.source_spread
    return t.spreads[spread].mesh if source and spread == getattr(e, source) else ALL_PARTICIPANTS


def _frames_with_needed_lengths(t: Tables, e: Event) -> set[str]:
    """The frames whose lengths every participant needs: to compute a division, or to divide ragged rows."""
    if not e.traits.needs_lengths_of:
        return set()
    frames = set[str]()
    for field, role, id in references(e):
        if field in e.traits.needs_lengths_of and role is Role.FRAME:
            frames.add(id)
        elif field in e.traits.needs_lengths_of and t.values[id].frame:
            value = t.values[id]
            frames |= {t.frames[value.frame].present_in} - {""}  # which of its rows there are
            frames |= {value.frame} if value.ragged else set()
    if isinstance(e, Derive) and e.makes_rows:
        frames.discard(e.frame)
    spreads = [id for _, role, id in references(e) if role is Role.SPREAD]
    frames |= {f for s in spreads if t.spreads[s].balance_by == "tokens" for f in t.spreads[s].frames}
    return frames | {p for s in spreads if t.spreads[s].balance_by != "slot"  # slots are there whatever is in them
                     for f in t.spreads[s].frames if (p := t.frames[f].present_in)}


def _lengths_buffers(t: Tables, frame: str) -> tuple[str, ...]:
    return tuple(f"{frame}.lengths@{s.id}" for s in t.plan.spreads if s.granularity == "all")
