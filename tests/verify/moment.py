"""What an event finds when it happens, and what all of this simulator's parts read alike from loops and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from rldsl.plan.events import Event, Item, Loop, When, ahead_of, runs_in
from rldsl.plan.model import Plan, Value
from rldsl.plan.spaces import IndexedFrame
from tests.verify.arithmetic import need

# turns of the outermost loop that are looked at: an `every` is due in one of them and not in the other
STEPS = (2, 3)
TURNS = 6  # most turns of another

Key = tuple[int, ...]  # the turns of the loops around, outermost first, and the event


@dataclass(frozen=True, slots=True)
class Held:
    """stamp: the moment at which a value was made. of: id -> term."""

    stamp: int
    of: Mapping[int, int]
    truth: bool = False


@dataclass(frozen=True, slots=True)
class Lens:
    """Prompt and response length of each row of a frame, as they are since the moment `stamp`."""

    stamp: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]

    def totals(self) -> list[int]:
        return [p + r for p, r in zip(self.prompt, self.response)]


@dataclass(frozen=True, slots=True)
class Moment:
    """What an event finds: values, lengths, versions of models (stamp, term). turn: of the innermost loop, from 0.
    times: how often this event (a fetch: any of its source) has happened before, in the step (a fetch: the run)."""

    stamp: int
    step: int
    turn: int
    times: int
    values: Mapping[str, Held]
    lens: Mapping[str, Lens]
    models: Mapping[str, tuple[int, int]]


def due(every: When, turn: int) -> bool:
    return _often(every).runs(turn)


def _often(every: When) -> When:
    """A block that is due within the few turns that are looked at."""
    return replace(every, period=every.period if every.period < 4 else 2 + every.period % 2)


def turns(loop: Loop, outermost: bool) -> Iterator[int]:
    need(loop.first == 1 or outermost and -4 < loop.first < 1, "a loop that begins elsewhere")
    few = outermost and loop.first == 1 and loop.trips >= max(STEPS)
    yield from STEPS if few else range(loop.first, min(loop.trips, TURNS) + 1)


def is_due(item: Event | Loop, blocks: tuple[When, ...], loop: Loop, turn: int) -> bool:
    """Whether an item of the step loop runs in a turn. blocks: around it, outermost first."""
    if loop.first == 1:
        return all(due(b, turn) for b in blocks)
    return runs_in(turn, ahead_of(item), min(loop.trips, TURNS), tuple(map(_often, blocks)))


def placed(items: Iterable[Item], blocks: tuple[When, ...] = ()) -> Iterator[tuple[Event | Loop, tuple[When, ...]]]:
    """The items of the step loop with the blocks around each, outermost first."""
    for item in items:
        if isinstance(item, When):
            yield from placed(item.body, (*blocks, item))
        else:
            yield item, blocks


def enough(held: Held) -> bool:
    need(held.truth, "a repeat that ends by a number")
    return bool(held.of[0] & 1)


def space(frames: Mapping[str, IndexedFrame], v: Value) -> str:
    if v.level == "batch":
        return ""
    f = frames[v.frame]
    return {"token": f.id, "seq": f.row_space, "prompt": f.prompt_space}[v.level]


def kept(v: Value, rows: tuple[int, ...], f: IndexedFrame) -> tuple[int, ...]:
    """The ids of a value for some rows."""
    if v.extent in ("batch", "array"):
        return (0,)
    return tuple(sorted({r // f.per_prompt for r in rows})) if v.extent == "prompt" else rows


def lasting_models(plan: Plan) -> list[str]:
    """What the next step takes over from this one."""
    return [m.name for m in plan.models if m.train_layout or m.updated_from]
