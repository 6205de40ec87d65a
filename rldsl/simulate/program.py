"""The ops of every class of ranks: the plan's body, walked in the order of `runtime/interpreter/interpreter.py`.

In: a world. Out: per class its ops over some iterations of the step loop. The body of an `every` of steps is no part of
an ordinary step, and is left out unless asked for; with a lag, the parts of it that run ahead then run in earlier
iterations. An `every` inside a loop counts the loop's iterations (`iterations.py`). Invariant: classes that share an
event give its messages the same keys, since they execute it equally often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from rldsl.diag import present
from rldsl.memory.call_memory import optimizer_bytes
from rldsl.memory.parameters import Copy, base_bytes, resting_bytes
from rldsl.plan.derive_ops import DERIVE_OPS
from rldsl.plan.events import (
    EVERY_ITERATION,
    Checkpoint,
    Collect,
    Compute,
    Derive,
    Draw,
    Event,
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
    Train,
    Transfer,
    When,
    ahead_of,
)
from rldsl.plan.projection import walk
from rldsl.plan.traits import rule_for
from rldsl.sharding.boxes import cell_of, parameters
from rldsl.simulate.call_ops import generate_ops, infer_ops, train_ops
from rldsl.simulate.engine import Compute as ComputeOp
from rldsl.simulate.engine import EventBegin, Isend, LoopBegin, Op, RepeatExtrapolated, Wait
from rldsl.simulate.iterations import IterationKind, iteration_kinds
from rldsl.simulate.transfer_ops import reshard_ops, transfer_ops
from rldsl.simulate.world import World, collective

# The runtime's work in Python and in small tensors, as equivalents of rows divided and of kernels launched; fitted to
# recorded runs.
FETCH_ROWS, FETCH_KERNELS = 90, 600  # to read and tokenize a row; to collate a batch
CALL_ROWS = 110  # to call a Python function with a row
MOVE_KERNELS = 150  # to divide, pack and join a value
MOST_TURNS = 4  # that an event of a block is simulated ahead of its step


def step_loop(world: World) -> Loop:
    """The loop over the steps."""
    return next(item for item in world.plan.body if isinstance(item, Loop))


@dataclass(frozen=True, slots=True)
class Occasions:
    """The steps in which blocks run, each around the next, that do not run in every one."""

    blocks: tuple[When, ...] = ()
    step: int = 0  # the iteration of the first such step, from 0
    period: int = 0  # steps from one to the next; 0: there is only one

    def has(self, block: When) -> bool:
        return any(block is other for other in self.blocks)

    def includes(self, step: int) -> bool:
        later = step - self.step
        return later == 0 or bool(self.period) and later > 0 and later % self.period == 0


def build_programs(world: World, iterations: int, also: Occasions = Occasions()) -> list[list[Op]]:  # noqa: B008 (immutable)
    """The ops of each class. also: what runs besides what runs in every step."""
    body = step_loop(world).body
    return [_OpBuilder(world, c, also).whole(body, iterations) for c in range(len(world.classes.ranks))]


def iterations_ahead(blocks: Sequence[When]) -> int:
    """By how many iterations the earliest event of the innermost of some blocks runs before the step that it is for, as
    the simulation counts them: many iterations between two parts of a block are as good as a few."""
    return max((_turns(ahead_of(item)) for item, _ in walk(blocks[-1].body)), default=0)


def _turns(ahead: int) -> int:
    return min(max(ahead, 0), MOST_TURNS)


def periodic_blocks(items: Sequence[Item], around: tuple[When, ...] = ()) -> Iterator[tuple[When, ...]]:
    """Every block that runs only in some steps, after the ones around it."""
    for item in items:
        if isinstance(item, When):
            path = (*around, item) if item.seldom else around
            if item.seldom:
                yield path
            yield from periodic_blocks(item.body, path)


def _runs_in(kind: IterationKind, block: When) -> bool:
    return block.runs(kind.number)


class _OpBuilder:
    """Builds the ops of one class, in the order of the plan's body."""

    def __init__(self, world: World, c: int, also: Occasions):
        self.world, self.c, self.also = world, c, also
        self.ops: list[Op] = []
        # buffer -> keys of the messages under way to it, and seconds of work once they have arrived
        self.pending: dict[str, tuple[tuple[Hashable, ...], float]] = {}
        # (copy, part) -> key of the message that moves it to host memory
        self.offloading: dict[tuple[str, str], Hashable] = {}
        self.executed: Counter[int] = Counter()  # event -> executions so far
        self.iterations: Counter[int] = Counter()  # event -> executions so far in this step
        self.step = 0

    def whole(self, body: Sequence[Item], iterations: int) -> list[Op]:
        for self.step in range(iterations):
            self.iterations.clear()
            self.iteration(body)
            self.ops.append(EventBegin(-1, self.step, 0))
        for buffer in list(self.pending):
            self.wait(buffer)
        self.ops += [Wait(key) for key in self.offloading.values()]
        return self.ops

    def iteration(self, items: Sequence[Item], around: tuple[When, ...] = ()) -> None:
        """around: the blocks around the items."""
        for item in items:
            if isinstance(item, When):
                if not item.seldom or self.also.has(item):
                    self.iteration(item.body, (*around, item))
            elif not any(b.seldom for b in around) or self.is_due(item, around[-1]):
                self.block([item], lambda _: True)

    def is_due(self, item: Item, block: When) -> bool:
        """Whether an item of a block that does not run in every step runs in this iteration, for the step of
        another."""
        ahead = ahead_of(item)
        if ahead == EVERY_ITERATION:  # with anything of the block
            return any(self.also.includes(self.step + _turns(a)) for a in block.aheads)
        return self.also.includes(self.step + _turns(ahead))

    def block(self, body: Sequence[Item], runs: Callable[[When], bool], depth: int = 0) -> None:
        """runs: whether a block runs now."""
        for item in body:
            if isinstance(item, Loop):
                self.loop(item, depth + 1)
            elif isinstance(item, When):
                if runs(item):
                    self.block(item.body, runs, depth)
            elif self.c in self.world.on(item.mesh):
                self.ops.append(EventBegin(item.id, self.step, self.iterations[item.id]))
                self.iterations[item.id] += 1
                self.event(item, (item.id, self.executed[item.id]))
                self.executed[item.id] += 1

    def loop(self, loop: Loop, depth: int) -> None:
        """Iterations that run the same events one after the other: the first few op by op, and the rest extrapolated
        from the last of these."""
        for kind in iteration_kinds(loop):
            before: Counter[int] = Counter()
            for _ in range(kind.simulated):
                before = Counter(self.iterations)
                self.ops.append(LoopBegin(depth))
                self.block(loop.body, partial(_runs_in, kind), depth=depth)
            if kind.left:
                ran = Counter(self.iterations) - before
                self.ops.append(RepeatExtrapolated(depth, kind.left, ran))
                self.iterations.update({event: kind.left * n for event, n in ran.items()})

    def wait(self, buffer: str) -> None:
        keys, after = self.pending.pop(buffer, ((), 0.0))
        self.ops += [Wait(k) for k in keys]
        self.run(after if keys else 0.0)

    def run(self, seconds: float) -> None:
        if seconds > 0:
            self.ops.append(ComputeOp(seconds))

    def together(self, event: Event, key: Hashable, moved: float, times: int = 1) -> None:
        """`times` all-reduces of `moved` bytes over the event's mesh."""
        size = self.world.size(event.mesh)
        seconds = times * self.world.machine.all_reduce(moved, size, self.world.crosses(event.mesh))
        self.ops += collective((key, "mesh"), self.world.on(event.mesh), seconds)

    def event(self, event: Event, key: Hashable) -> None:
        self.run(self.world.machine.event())
        if event.traits.family != "movement":
            for buffer in event.reads:
                self.wait(buffer)
        if (known := self.world.durations.get(event.id)) is not None:
            self.ops += collective((key, "known"), self.world.on(event.mesh), known)
        elif event.traits.timed:
            rule_for(RULES, event, "the simulator")(self, event, key)

    def generate(self, event: Generate, key: Hashable) -> None:
        self.ops += generate_ops(self.world, event, self.c, key)

    def infer(self, event: Infer, key: Hashable) -> None:
        self.ops += infer_ops(self.world, event, self.c, key)

    def train(self, event: Train, key: Hashable) -> None:
        self.ops += train_ops(self.world, event, self.c, key)

    def lengths(self, event: Lengths, key: Hashable) -> None:
        count = self.world.frames[event.frame].count
        self.together(event, key, 16.0 * count)
        self.run(self.world.machine.rows(count))

    def fetch(self, event: Fetch, key: Hashable) -> None:
        rows, machine = sum(self.world.frames[f].count for f in event.frames[:1]), self.world.machine
        self.run(machine.rows(FETCH_ROWS * rows) + machine.kernels(FETCH_KERNELS))

    def draw(self, event: Draw, key: Hashable) -> None:
        """Sent by one rank. The rows that it draws from are in a file that the compiler does not read."""
        count = self.world.frames[event.frame].count
        self.together(event, key, 8.0 * count)
        self.run(self.world.machine.rows(count))

    def derive(self, event: Derive, key: Hashable) -> None:
        self.pick(event, key)
        if DERIVE_OPS[event.op].calls_python:
            rows = self.world.count(event.frame) / max(1, self.world.size(event.mesh))
            self.run(self.world.machine.rows(CALL_ROWS * rows))

    def pick(self, event: Derive | Collect, key: Hashable) -> None:
        world = self.world
        self.run(world.machine.rows(world.count(event.frame) / max(1, world.size(event.mesh))))

    def log(self, event: Log, key: Hashable) -> None:
        self.run(self.world.machine.kernels(MOVE_KERNELS))  # posted, and awaited by no event

    def checkpoint(self, event: Checkpoint, key: Hashable) -> None:
        self.together(event, key, 4.0)

    def save(self, event: Save, key: Hashable) -> None:
        world, machine = self.world, self.world.machine
        whole = sum(prod(p.spec.shape) for p in parameters(world.models[event.model])) * 4
        size = world.size(event.mesh)
        self.together(event, key, 0.0, 3)
        sent = whole / size if size > 1 else 0.0
        self.run(machine.link(sent, world.crosses(event.mesh)) + machine.disk(whole / size))

    def free(self, event: Free, key: Hashable) -> None:
        for buffer in event.buffers:
            self.wait(buffer)

    def transfer(self, event: Transfer, key: Hashable) -> None:
        for value in event.values:
            source, target = f"{value}@{event.src}", f"{value}@{event.dst}"
            self.wait(source)
            self.run(self.world.machine.kernels(MOVE_KERNELS))
            issued = transfer_ops(self.world, event, value, self.c, key)
            self.ops += issued.ops
            self.wait(target)
            self.pending[target] = (issued.message_keys, issued.unpack_seconds)

    def host(self, event: Offload | Onload, key: Hashable) -> None:
        """Copies between device and host memory, overlapped with whatever the rank does; free on a processor, which has
        one memory. An onload begins when the offload before it has ended, and is waited for by the first use."""
        world, layout = self.world, self.world.layouts[event.layout]
        cell = present(cell_of(layout, world.meshes[layout.mesh], world.classes.first[self.c]),
                       f"cell of rank class {self.c} in layout {layout.id}")
        copy, buffer = Copy(world.models[event.model], layout, cell), f"{event.model}@{event.layout}"
        size = optimizer_bytes(copy) if event.part == "optimizer" else (
            resting_bytes(copy) + base_bytes(copy))
        name = (key, "host", self.c)  # a message of this class alone
        if (gone := self.offloading.pop((buffer, event.part), None)) is not None:
            self.ops.append(Wait(gone))
        self.ops.append(Isend(name, (self.c,), 0.0 if world.machine.shared else world.machine.host(size)))
        if isinstance(event, Offload):
            self.offloading[buffer, event.part] = name
        else:
            keys, after = self.pending.get(buffer, ((), 0.0))
            self.pending[buffer] = ((*keys, name), after)

    def realloc(self, event: Realloc, key: Hashable) -> None:
        source, target = f"{event.source or event.model}@{event.src}", f"{event.model}@{event.dst}"
        self.wait(source)
        self.wait(target)
        issued = reshard_ops(self.world, event, self.c, key)
        self.ops += issued.ops
        self.pending[target] = (issued.message_keys, issued.unpack_seconds)
        if self.c not in self.world.on(self.world.layouts[event.dst].mesh):
            self.wait(target)

    def compute(self, event: Compute, key: Hashable) -> None:
        world, machine = self.world, self.world.machine
        program, spread = world.programs[event.program], world.spreads[event.spread]
        ranks = 1 if spread.granularity == "all" else world.size(event.mesh)
        rows = max((world.count(f) / ranks for f in event.frames), default=1.0)
        entries = max((rows * world.row(f).response for f in event.frames), default=1.0)
        self.run(machine.rows(rows) + machine.compute(len(program.nodes), entries))
        self.run(machine.rows(CALL_ROWS * rows) * sum(n.op == "py" for n in program.nodes))
        reductions = sum("batch" in (n.attr("to"), n.attr("within")) for n in program.nodes)
        if reductions and world.size(event.mesh) > 1 and spread.granularity != "all":
            self.together(event, key, 16.0, reductions)


# What a kind of event takes beyond issuing it, of the kinds whose traits say `timed`.
RULES: Mapping[type[Event], Callable[[_OpBuilder, Any, Hashable], None]] = {
    Generate: _OpBuilder.generate,
    Infer: _OpBuilder.infer,
    Train: _OpBuilder.train,
    Compute: _OpBuilder.compute,
    Fetch: _OpBuilder.fetch,
    Draw: _OpBuilder.draw,
    Derive: _OpBuilder.derive,
    Collect: _OpBuilder.pick,
    Lengths: _OpBuilder.lengths,
    Transfer: _OpBuilder.transfer,
    Realloc: _OpBuilder.realloc,
    Offload: _OpBuilder.host,
    Onload: _OpBuilder.host,
    Save: _OpBuilder.save,
    Checkpoint: _OpBuilder.checkpoint,
    Log: _OpBuilder.log,
    Free: _OpBuilder.free,
}
