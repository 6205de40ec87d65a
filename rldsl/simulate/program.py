"""What every class of ranks does, act by act: the plan's body, walked as `runtime/interpreter/interpreter.py` walks it.

In: a world. Out: for each class its acts over some steps. What an `every` of steps holds is no part of an ordinary
step, and left out unless it is asked for; one inside a `repeat` counts its turns (`turns.py`). Invariant: classes
that share an event give its messages the same keys, since they go through it equally often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import lcm, prod

from rldsl.memory.parameters import Copy, elements, moment_bytes, resting
from rldsl.plan.events import (
    Checkpoint,
    Collect,
    Compute,
    Event,
    Every,
    Fetch,
    Free,
    Generate,
    Infer,
    Item,
    Lengths,
    Log,
    Loop,
    Offload,
    Onload,
    Realloc,
    Save,
    Select,
    Train,
    Transfer,
)
from rldsl.plan.expr import REDUCTIONS
from rldsl.sharding.boxes import cell_of, parameters
from rldsl.simulate.calls import generate, infer, train
from rldsl.simulate.engine import Act, Again, Begin, Mark, Post, Run, Wait
from rldsl.simulate.moves import realloc, transfer
from rldsl.simulate.turns import kinds
from rldsl.simulate.world import World, meet

# What the runtime does in Python and small tensors, in rows divided and kernels started; from recorded runs.
FETCH_ROWS, FETCH_KERNELS = 90, 600  # a row to read and tokenize; a batch
CALL_ROWS = 110  # a row to hand to a Python function
MOVE_KERNELS = 150  # a value to divide, pack and join


def step_of(world: World) -> Loop:
    """The loop over the steps."""
    return next(item for item in world.plan.body if isinstance(item, Loop))


def programs(world: World, steps: int, also: Sequence[Every] = ()) -> list[list[Act]]:
    """also: what happens besides in the last step."""
    body = step_of(world).body
    return [_Walk(world, c).whole(body, steps, also) for c in range(len(world.classes.ranks))]


def occasions(items: Sequence[Item], around: tuple[Every, ...] = ()) -> Iterator[tuple[Every, ...]]:
    """Everything that happens in some steps alone: each `every` of steps, behind those around it."""
    for item in items:
        if isinstance(item, Every):
            if item.period > 1:
                yield (*around, item)
            yield from occasions(item.body, (*around, item) if item.period > 1 else around)


class _Walk:
    """One class on its way. pending: buffer -> messages on their way to it, and the work that then remains. away: part
    of a copy -> the message that takes it to host memory."""

    def __init__(self, world: World, c: int):
        self.world, self.c = world, c
        self.acts: list[Act] = []
        self.pending: dict[str, tuple[tuple[Hashable, ...], float]] = {}
        self.away: dict[tuple[str, str], Hashable] = {}
        self.counts: Counter[int] = Counter()
        self.turns: Counter[int] = Counter()
        self.step = 0

    def whole(self, body: Sequence[Item], steps: int, also: Sequence[Every]) -> list[Act]:
        for self.step in range(steps):
            self.turns.clear()
            now = also if self.step == steps - 1 else ()
            self.block(body, lambda each, _: any(each is e for e in now))
            self.acts.append(Begin(-1, self.step, 0))
        for buffer in list(self.pending):
            self.wait(buffer)
        self.acts += [Wait(key) for key in self.away.values()]
        return self.acts

    def block(self, body: Sequence[Item], runs: Callable[[Every, int], bool], period: int = 1, depth: int = 0) -> None:
        """runs: whether an `every` does now, from it and the period of those around it and itself."""
        for item in body:
            if isinstance(item, Loop):
                self.loop(item, depth + 1)
            elif isinstance(item, Every):
                both = lcm(period, item.period)
                if item.period == 1 or runs(item, both):
                    self.block(item.body, runs, both, depth)
            elif self.c in self.world.on(item.mesh):
                self.acts.append(Begin(item.id, self.step, self.turns[item.id]))
                self.turns[item.id] += 1
                self.event(item, (item.id, self.counts[item.id]))
                self.counts[item.id] += 1

    def loop(self, loop: Loop, depth: int) -> None:
        """Turns in which the same happens one after the other: the first few, then the rest as long as the last one."""
        for kind in kinds(loop):
            before: Counter[int] = Counter()
            for _ in range(kind.played):
                before = Counter(self.turns)
                self.acts.append(Mark(depth))
                self.block(loop.body, lambda _, period: kind.runs(period), depth=depth)
            if kind.left:
                ran = Counter(self.turns) - before
                self.acts.append(Again(depth, kind.left, ran))
                self.turns.update({event: kind.left * n for event, n in ran.items()})

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
                self.host(event, key)
            case Checkpoint():
                self.together(event, key, 4.0)
            case Save():
                whole = sum(prod(p.spec.shape) for p in parameters(world.models[event.model])) * 4
                size = world.size(event.mesh)
                self.together(event, key, 0.0, 3)
                sent = whole / size if size > 1 else 0.0
                self.run(machine.link(sent, world.crosses(event.mesh)) + machine.disk(whole / size))
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

    def host(self, event: Offload | Onload, key: Hashable) -> None:
        """Between the device and the host, beside whatever the rank does; on a processor there is nowhere to go. What
        comes is waited for by its use, and comes when it has gone."""
        world, layout = self.world, self.world.layouts[event.layout]
        at = cell_of(layout, world.meshes[layout.mesh], world.classes.first[self.c])
        assert at is not None, f"class {self.c} has no copy under {layout.id}"
        copy, buffer = Copy(world.models[event.model], layout, at), f"{event.model}@{event.layout}"
        size = moment_bytes(copy) if event.what == "optimizer" else (
            copy.stored * resting(copy) + copy.compute * elements(copy.model.base, copy))
        name = (key, "host", self.c)  # of this class alone
        if (gone := self.away.pop((buffer, event.what), None)) is not None:
            self.acts.append(Wait(gone))
        self.acts.append(Post(name, (self.c,), 0.0 if world.machine.shared else world.machine.host(size)))
        if isinstance(event, Offload):
            self.away[buffer, event.what] = name
        else:
            keys, after = self.pending.get(buffer, ((), 0.0))
            self.pending[buffer] = ((*keys, name), after)

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
