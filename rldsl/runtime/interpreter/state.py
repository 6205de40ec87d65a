"""What a rank carries through a run: the world, the models' shards, open data, the buffers of the current step."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rldsl.plan.events import Compute, Fetch, Generate, Load, Offload, split
from rldsl.plan.expr import Program
from rldsl.plan.model import Data, Frame, Function, Model, Plan, Spread, Value
from rldsl.plan.projection import events
from rldsl.runtime.backend import PackedBatch, Shard
from rldsl.runtime.comm.reshard import Route
from rldsl.runtime.comm.row_assignment import Lens, StepRows
from rldsl.runtime.comm.world import World
from rldsl.runtime.data import Source, open_source
from rldsl.runtime.health.event_ring import Ring
from rldsl.runtime.store import Column, Pending, Store
from rldsl.sharding.partition import mix

if TYPE_CHECKING:
    from rldsl.runtime.data.read_positions import Reading
    from rldsl.runtime.metrics.reporter import Report
    from rldsl.runtime.persist.checkpoint_reader import Resume
    from rldsl.runtime.persist.checkpoint_writer import Writer
    from rldsl.runtime.rewards.pool import Pool

RANDOM_NUMBERS = 1 << 32  # keeps the seeds of computations apart from those of frames


@dataclass
class State:
    """step: number of the current step, from 1; 0 before the first. out: where files go."""

    plan: Plan
    world: World
    out: Path
    store: Store = field(default_factory=Store)
    ring: Ring = field(default_factory=Ring)  # of what this rank does
    step: int = 0
    turn: int = 0  # of the innermost loop, from 0
    over: str = ""  # the data source that the innermost loop goes over
    shards: dict[tuple[str, str], Shard] = field(default_factory=dict)
    dropped: set[tuple[str, str]] = field(default_factory=set)  # shards without memory
    pool: dict[Any, torch.Tensor] = field(default_factory=dict)  # what shards share
    sources: dict[str, Source] = field(default_factory=dict)
    routes: dict[int, Route] = field(default_factory=dict)
    arriving: dict[tuple[str, str], Pending] = field(default_factory=dict)
    leaving: dict[tuple[str, str], dict[int, Pending]] = field(default_factory=dict)  # by event, from where it lies
    metrics: dict[str, list[float]] = field(default_factory=dict)  # of this step, as they came
    fetched: dict[str, int] = field(default_factory=dict)  # data source -> the batch read last, from 0
    readings: dict[str, Reading] = field(default_factory=dict)  # of the sources of which this rank tells
    drawn: dict[int, int] = field(default_factory=dict)  # generate or compute event -> times in this step
    tokens: int = 0  # in the rows that this rank knows lengths of, this step
    ragged: int = 0  # bytes of transfers that this rank sent and received, this step, where lengths decide how many
    report: Report | None = None  # of progress and metrics; there when the run walks
    allow_write: tuple[str, ...] = ()  # as in Options
    resume: Resume | None = None
    writer: Writer | None = None  # of checkpoints
    rewards: Pool | None = None  # calls users' functions
    stop_asked: Callable[[], bool] = lambda: False  # whether this rank was asked to end the run (SIGTERM)
    stopped: bool = False  # all ranks have agreed to

    def __post_init__(self) -> None:
        plan = self.plan
        self.models: dict[str, Model] = {m.name: m for m in plan.models}
        self.data: dict[str, Data] = {d.name: d for d in plan.data}
        self.frames: dict[str, Frame] = {f.id: f for f in plan.frames}
        self.values: dict[str, Value] = {v.id: v for v in plan.values}
        self.spreads: dict[str, Spread] = {s.id: s for s in plan.spreads}
        self.programs: dict[str, Program] = {p.id: p for p in plan.programs}
        self.functions: dict[str, Function] = {f.id: f for f in plan.functions}
        self.moved = {(e.model, e.layout) for e, _ in events(plan) if isinstance(e, Offload)
                      and e.what == "parameters"}
        self.shared = {(e.model, e.layout): e.of for e, _ in events(plan) if isinstance(e, Load) and e.of}
        self.rows = StepRows(plan, self.world, 0)

    @property
    def seed(self) -> int:
        return self.plan.header.seed

    @property
    def device(self) -> torch.device:
        return self.world.device

    def begin_step(self) -> None:
        self.step += 1
        self.tokens = 0
        self.drawn.clear()
        self.rows = StepRows(self.plan, self.world, self.step - 1)

    def next_batch(self, event: Fetch) -> int:
        """Which batch of its source a fetch reads now: 0, 1, ... The ranks that read a source take part in each of its
        fetches, so that they count alike."""
        turn = self.fetched[event.data] = self.fetched.get(event.data, -1) + 1
        return turn

    def sampling_seed(self, event: Generate) -> int:
        """A seed of its own for each generate of the program and each time that it runs in a step: two calls on the
        same prompts must not draw the same samples. The order of frames is the program's, whatever the placement."""
        times = self.drawn[event.id] = self.drawn.get(event.id, -1) + 1
        frame = next(i for i, f in enumerate(self.plan.frames) if f.id == event.frame)
        return mix(self.seed, frame, times) >> 1  # 63 bits: keys are signed on devices

    def drawing_seed(self, event: Compute) -> int:
        """A seed for each time that a computation runs in a step; its calls of `uniform` have numbers of their own."""
        times = self.drawn[event.id] = self.drawn.get(event.id, -1) + 1
        return mix(self.seed, RANDOM_NUMBERS, times)

    def shard(self, model: str, layout: str, load: bool = False) -> Shard:
        """This rank's shard, built at its first use; of one that was dropped the memory, without values."""
        key = (model, layout)
        if key in self.dropped:
            self.dropped.discard(key)
            self.shards[key].allocate()
        if key not in self.shards:
            record, where = self.models[model], self.world.layouts[layout]
            build = importlib.import_module(f"rldsl.backends.{where.backend}").build
            self.shards[key] = build(record, where, self.world.meshes[where.mesh], self.world.axes(where), self.device,
                                     load=load, trainable=record.home == layout,
                                     weight_cache=None if key in self.moved else self.pool)
        return self.shards[key]

    def settled(self, model: str, layout: str) -> Shard:
        """The shard with every parameter in place."""
        pending = self.arriving.pop((model, layout), None)
        if pending is not None:
            pending.finish()
        return self.shards[model, layout]

    def changeable(self, model: str, layout: str) -> Shard:
        """The same, when what is on its way from there has left: parameters may be written, or given up."""
        for pending in self.leaving.pop(self.memory(model, layout), {}).values():
            pending.finish()
        return self.settled(model, layout)

    def memory(self, model: str, layout: str) -> tuple[str, str]:
        """The copy whose parameters it is, where it shares those of another."""
        return model, self.shared.get((model, layout), layout)

    def drop(self, model: str, layout: str) -> None:
        """Give the memory of a copy up, until a realloc brings it again."""
        self.changeable(model, layout).free()
        self.dropped.add((model, layout))

    def told(self, pending: Pending) -> Pending:
        """The same; that this rank waits for it, and which event posted it (the one that it is at now), is known."""
        posted = self.ring.here()

        def finish() -> Any:
            self.ring.waits(posted)
            result = pending.finish()
            self.ring.goes_on()
            return result

        return Pending(finish, pending.bytes)

    def source(self, data: str) -> Source:
        if data not in self.sources:
            tells = self.tells(data)
            found = self.sources[data] = open_source(self.data[data], self.plan.header.steps, tells)
            if tells and found.note:
                print(f"note: {found.note}", file=sys.stderr, flush=True)
        return self.sources[data]

    def tells(self, data: str) -> bool:
        """Whether this rank is the one that tells the user about a source: the first that reads it."""
        fetches = (e for e, _ in events(self.plan) if isinstance(e, Fetch) and e.data == data)
        return self.world.rank == min((min(self.world.meshes[e.mesh].members()) for e in fetches), default=0)

    # rows and columns of the current step

    def my_rows(self, spread: Spread, frame: str) -> torch.Tensor:
        mine = self.rows.shards(spread)[self.rows.shard(spread, self.world.rank)][frame]
        return torch.tensor(mine, dtype=torch.int64, device=self.device)

    def holds(self, buffer: str) -> bool:
        """Whether this rank is on the mesh of a value's buffer."""
        mesh = self.spreads[split(buffer)[1]].mesh
        return self.world.rank in self.world.meshes[mesh].members()

    def read(self, reads: tuple[str, ...], value: str) -> Any:
        """The buffer among an event's reads that holds `value`."""
        return self.store.take(next(b for b in reads if split(b)[0] == value))

    def write(self, value: str, spread: str, ids: torch.Tensor, data: torch.Tensor) -> None:
        """ids: ascending row or prompt numbers ([0] at batch level)."""
        sizes = self.rows.sizes(self.values[value], ids)
        self.store.put(f"{value}@{spread}", Column(ids, sizes, data))

    def know_lengths(self, frame: str, lens: Lens) -> None:
        self.rows.know(frame, lens)
        if not self.frames[frame].of and int(lens.response.sum()):  # a selection's tokens are those of another frame
            self.tokens += int(lens.of("tokens").sum())

    def packed(self, frame: str, tokens: Column, rows: torch.Tensor) -> PackedBatch:
        lens = self.rows.lens[frame]
        return PackedBatch(rows, lens.prompt[rows], lens.response[rows], tokens.pick(rows).data)
