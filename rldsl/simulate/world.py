"""A plan on a cluster, as the simulator reads it: records by id, classes, groups, expected rows and lengths."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import Any

from rldsl.clusters import Cluster
from rldsl.memory.reshard_buffers import ReallocKey, reshard_plans
from rldsl.memory.values import rows
from rldsl.plan.expr import Program
from rldsl.plan.image_limits import most_image_tokens
from rldsl.plan.model import Layout, Mesh, Model, Plan, Spread, Value
from rldsl.plan.prompt_sources import PromptSource, prompt_sources
from rldsl.plan.spaces import IndexedFrame, indexed_frames
from rldsl.reshard.records import ReshardPlan
from rldsl.simulate.classes import Classes, Groups, build_classes, build_groups, call_layouts
from rldsl.simulate.engine import Compute, Isend, Op, Wait
from rldsl.simulate.lengths import Lengths, Row
from rldsl.simulate.machine import Machine
from rldsl.simulate.traffic import Traffic


class World:
    """A plan on a cluster. Derived quantities are computed once."""

    def __init__(self, plan: Plan, cluster: Cluster, lengths: Lengths, per_rank: bool = False,
                 durations: Mapping[int, float] | None = None):
        """per_rank: every rank is a separate class, as ranks that share cores must be. durations: seconds that
        events are known to take, by their ids."""
        self.plan, self.cluster, self.lengths = plan, cluster, lengths
        self.durations: Mapping[int, float] = durations or {}
        self.per_node = min(plan.header.devices_per_node, plan.header.world)
        self.machine = Machine(cluster, cluster.threads or max(1, cluster.cores // self.per_node))
        self.classes: Classes = build_classes(plan, per_rank=per_rank or cluster.cores > 0)
        self.lag = plan.header.lag  # steps that generation runs ahead
        self.images = most_image_tokens(plan.data)  # tokens of the images of a prompt, at most
        self.served: dict[Hashable, float] = {}  # a generate of a serving engine, on what links -> its seconds
        self.plain_passes: dict[Hashable, Any] = {}  # of inference and training; a cache of `time_costs.py`
        # (id of a realloc event, number of a reshard of it) -> class -> traffic of a rank
        self.class_traffic: dict[tuple[int, int], dict[int, Traffic]] = {}
        self.meshes: dict[str, Mesh] = {m.id: m for m in plan.meshes}
        self.layouts: dict[str, Layout] = {x.id: x for x in plan.layouts}
        self.spreads: dict[str, Spread] = {s.id: s for s in plan.spreads}
        self.models: dict[str, Model] = {m.name: m for m in plan.models}
        self.frames: dict[str, IndexedFrame] = indexed_frames(plan)
        self.values: dict[str, Value] = {v.id: v for v in plan.values}
        self.programs: dict[str, Program] = {p.id: p for p in plan.programs}
        self._on: dict[str, tuple[int, ...]] = {m.id: self.classes.among(m.members()) for m in plan.meshes}
        self._sizes = {m.id: sum(stop - start for start, stop in m.ranks) for m in plan.meshes}

    def on(self, mesh: str) -> tuple[int, ...]:
        """The classes of a mesh."""
        return self._on[mesh]

    def size(self, mesh: str) -> int:
        return self._sizes[mesh]

    def crosses(self, *meshes: str) -> bool:
        """Whether the ranks of some meshes lie on several nodes."""
        ends = [end // self.per_node for m in meshes for start, stop in self.meshes[m].ranks
                for end in (start, stop - 1)]
        return min(ends) != max(ends)

    @cached_property
    def prompts(self) -> Mapping[str, PromptSource]:
        """Frame -> which of its rows have the same prompt."""
        return prompt_sources(self.plan)

    @cached_property
    def groups(self) -> dict[str, dict[int, Groups]]:
        """Layout -> class -> its groups, of the layouts under which calls run."""
        return {id: build_groups(layout, self.meshes[layout.mesh], self.classes, self.per_node)
                for id, layout in call_layouts(self.plan).items()}

    @cached_property
    def routes(self) -> dict[ReallocKey, tuple[ReshardPlan, ...]]:
        """The routes of each realloc, once for each dtype that travels."""
        return reshard_plans(self.plan)

    # ------------------------------------------------------------------------------- rows and lengths

    def row(self, frame: str) -> Row:
        if frame not in self._rows:
            self._rows[frame] = self.lengths.of(self.frames[frame])
        return self._rows[frame]

    @cached_property
    def _rows(self) -> dict[str, Row]:
        """By frame."""
        return {}

    def dp(self, spread: Spread) -> int:
        return 1 if spread.granularity == "all" or not spread.layout else self.layouts[spread.layout].dp

    def count(self, frame: str) -> int:
        """Sequences of a frame in a step."""
        record = self.frames[frame]
        return max(1, round(record.count * self.lengths.share(record)))

    def rows(self, spread: Spread, frame: str) -> int:
        """Sequences of a frame on the dp rank of a spread that has most."""
        found = rows(self.frames[frame], spread, self.layouts, self.frames)
        return min(found, max(1, round(found * self.lengths.share(self.frames[frame]))))

    def entries(self, value: Value, rows: float) -> float:
        """Numbers of a value on `rows` rows of its frame."""
        if value.level == "batch" or not value.frame:
            return 1.0
        row, frame = self.row(value.frame), self.frames[value.frame]
        return value.width * {"tokens": rows * row.tokens, "entry": rows * row.response, "hidden": rows * row.response,
                "response": rows * row.response, "row": rows,
                "turn": rows * frame.max_turns, "batch": 1.0,
                "prompt": rows / frame.per_prompt, "columns": rows, "row_numbers": rows,
                "lengths": 2.0 * rows, "cache": rows}[value.extent]


def collective(key: Hashable, parties: tuple[int, ...], seconds: float) -> list[Op]:
    """A collective: all parties arrive, then all are busy with it."""
    ops: list[Op] = [] if len(parties) < 2 else [Isend(key, parties), Wait(key)]
    return [*ops, Compute(seconds)] if seconds > 0 else ops
