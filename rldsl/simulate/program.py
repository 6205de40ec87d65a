"""What every class of ranks does, act by act: the plan's body, walked as `runtime/executor.py` walks it.

In: a world. Out: for each class its acts over some steps. What `every` holds is no part of an ordinary step, and left
out unless it is asked for. Invariant: classes that share an event give its messages the same keys, since they go
through it equally often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from math import prod

from rldsl.plan.boxes import parameters
from rldsl.plan.events import (Checkpoint, Collect, Compute, Event, Every, Fetch, Free, Generate, Infer, Item, Lengths,
                               Log, Loop, Offload, Onload, Realloc, Save, Select, Train, Transfer)
from rldsl.plan.expr import REDUCTIONS
from rldsl.simulate.calls import generate, infer, train
from rldsl.simulate.cost import shard
from rldsl.simulate.engine import Act, Begin, Run, Wait
from rldsl.simulate.moves import realloc, transfer
from rldsl.simulate.world import World, meet

# What the runtime does in Python and small tensors, in rows divided and kernels started; from recorded runs.
FETCH_ROWS, FETCH_KERNELS = 90, 600  # a row to read and tokenize; a batch
CALL_ROWS = 110  # a row to hand to a Python function
MOMENTS = 8  # bytes of an element's two, in float32
MOVE_KERNELS = 150  # a value to divide, pack and join


def step_of(world: World) -> Loop:
    """The loop over the steps."""
    return next(item for item in world.plan.body if isinstance(item, Loop))


def programs(world: World, steps: int, also: Every | None = None) -> list[list[Act]]:
    """also: what happens besides in the last step."""
    body = step_of(world).body
    return [_Walk(world, c).whole(body, steps, also) for c in range(len(world.classes.ranks))]


def occasions(items: Sequence[Item]) -> Iterator[Every]:
    """Everything that happens now and then."""
    for item in items:
        if isinstance(item, Every) and item.period > 1:
            yield item
        elif not isinstance(item, Event):
            yield from occasions(item.body)


class _Walk:
    """One class on its way. pending: buffer -> messages on their way to it, and the work that then remains."""

    def __init__(self, world: World, c: int):
        self.world, self.c = world, c
        self.acts: list[Act] = []
        self.pending: dict[str, tuple[tuple[Hashable, ...], float]] = {}
        self.counts: Counter[int] = Counter()
        self.turns: Counter[int] = Counter()
        self.also: Every | None = None

    def whole(self, body: Sequence[Item], steps: int, also: Every | None) -> list[Act]:
        for step in range(steps):
            self.turns.clear()
            self.also = also if step == steps - 1 else None
            for event in self.events(body):
                self.acts.append(Begin(event.id, step, self.turns[event.id]))
                self.turns[event.id] += 1
                self.event(event, (event.id, self.counts[event.id]))
                self.counts[event.id] += 1
            self.acts.append(Begin(-1, step, 0))
        for buffer in list(self.pending):
            self.wait(buffer)
        return self.acts

    def events(self, body: Sequence[Item]) -> Iterator[Event]:
        for item in body:
            if isinstance(item, Loop):
                for _ in range(item.trips):
                    yield from self.events(item.body)
            elif isinstance(item, Every):
                if item.period == 1 or item is self.also:
                    yield from self.events(item.body)
            elif self.c in self.world.on(item.mesh):
                yield item

    def wait(self, buffer: str) -> None:
        keys, after = self.pending.pop(buffer, ((), 0.0))
        self.acts += [Wait(k) for k in keys]
        self.run(after if keys else 0.0)

    def run(self, seconds: float) -> None:
        if seconds > 0:
            self.acts.append(Run(seconds))

    def together(self, event: Event, key: Hashable, moved: float, times: int = 1) -> None:
        """Collectives over the event's mesh."""
        size = self.world.size(event.mesh)
        seconds = times * self.world.machine.all_reduce(moved, size, self.world.crosses(event.mesh))
        self.acts += meet((key, "mesh"), self.world.on(event.mesh), seconds)

    def event(self, event: Event, key: Hashable) -> None:
        world, machine = self.world, self.world.machine
        self.run(machine.event())
        if not isinstance(event, Lengths | Transfer | Realloc):
            for buffer in event.reads:
                self.wait(buffer)
        match event:
            case Generate():
                self.acts += generate(world, event, self.c, key)
            case Infer():
                self.acts += infer(world, event, self.c, key)
            case Train():
                self.acts += train(world, event, self.c, key)
            case Transfer():
                self.transfer(event, key)
            case Realloc():
                self.realloc(event, key)
            case Lengths():
                count = world.frames[event.frame].count
                self.together(event, key, 16.0 * count)
                self.run(machine.rows(count))
            case Compute():
                self.compute(event, key)
            case Fetch():
                rows = sum(world.frames[f].count for f in event.frames[:1])
                self.run(machine.rows(FETCH_ROWS * rows) + machine.kernels(FETCH_KERNELS))
            case Select() | Collect():
                self.run(machine.rows(world.frames[event.frame].count / max(1, world.size(event.mesh))))
            case Log():
                self.together(event, key, 16.0 * len(event.metrics))
            case Offload() | Onload():
                at = world.layouts[event.layout]
                held = shard(world.models[event.model], at, world.groups[at.id][self.c].stage)
                size = held.elements * held.item if event.what == "parameters" else held.elements * MOMENTS
                self.run(machine.host(size))
            case Checkpoint():
                self.together(event, key, 4.0)
            case Save():
                whole = sum(prod(p.spec.shape) for p in parameters(world.models[event.model])) * 4
                size = world.size(event.mesh)
                self.together(event, key, 0.0, 3)
                self.run(machine.link(whole / size, world.crosses(event.mesh)) + machine.disk(whole / size))
            case Free():
                for buffer in event.buffers:
                    self.wait(buffer)

    def transfer(self, event: Transfer, key: Hashable) -> None:
        for value in event.values:
            source, target = f"{value}@{event.src}", f"{value}@{event.dst}"
            self.wait(source)
            self.run(self.world.machine.kernels(MOVE_KERNELS))
            issued = transfer(self.world, event, value, self.c, key)
            self.acts += issued.acts
            self.wait(target)
            self.pending[target] = (issued.keys, issued.after)

    def realloc(self, event: Realloc, key: Hashable) -> None:
        source, target = f"{event.source or event.model}@{event.src}", f"{event.model}@{event.dst}"
        self.wait(source)
        self.wait(target)
        issued = realloc(self.world, event, self.c, key)
        self.acts += issued.acts
        self.pending[target] = (issued.keys, issued.after)
        if self.c not in self.world.on(self.world.layouts[event.dst].mesh):
            self.wait(target)

    def compute(self, event: Compute, key: Hashable) -> None:
        world, machine = self.world, self.world.machine
        program, spread = world.programs[event.program], world.spreads[event.spread]
        ranks = 1 if spread.unit == "all" else world.size(event.mesh)
        rows = max((world.frames[f].count / ranks for f in event.frames), default=1.0)
        entries = max((rows * world.row(f).response for f in event.frames), default=1.0)
        self.run(machine.rows(rows) + machine.compute(len(program.nodes), entries))
        self.run(machine.rows(CALL_ROWS * rows) * sum(n.op == "py" for n in program.nodes))
        reductions = sum(n.op in REDUCTIONS and n.level == "batch" for n in program.nodes)
        if reductions and world.size(event.mesh) > 1 and spread.unit != "all":
            self.together(event, key, 16.0, reductions)
