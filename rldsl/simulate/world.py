"""What the acts of all classes are made from: the plan's tables by name, classes, groups, expected rows and lengths."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from rldsl.clusters import Cluster
from rldsl.plan.expr import Program
from rldsl.plan.model import Frame, Layout, Mesh, Model, Plan, Spread, Value
from rldsl.simulate.classes import Classes, Groups, called, classes, groups
from rldsl.simulate.engine import Act, Post, Run, Wait
from rldsl.simulate.lengths import Lengths, Row
from rldsl.simulate.times import Machine


@dataclass
class World:
    """apart: every rank is a class of its own, as those that share cores must be."""

    plan: Plan
    cluster: Cluster
    lengths: Lengths
    apart: bool = False
    machine: Machine = field(init=False)
    classes: Classes = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        per_node = min(plan.header.devices_per_node, plan.header.world)
        cores = self.cluster.cores
        self.per_node = per_node
        self.machine = Machine(self.cluster, self.cluster.threads or max(1, cores // per_node))
        self.classes = classes(plan, apart=self.apart or cores > 0)
        self.meshes: dict[str, Mesh] = {m.id: m for m in plan.meshes}
        self.layouts: dict[str, Layout] = {x.id: x for x in plan.layouts}
        self.spreads: dict[str, Spread] = {s.id: s for s in plan.spreads}
        self.models: dict[str, Model] = {m.name: m for m in plan.models}
        self.frames: dict[str, Frame] = {f.id: f for f in plan.frames}
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
        """Whether the ranks of some meshes are on several nodes."""
        ends = [end for m in meshes for start, stop in self.meshes[m].ranks for end in (start, stop - 1)]
        return min(ends) // self.per_node != max(ends) // self.per_node

    @cached_property
    def groups(self) -> dict[str, dict[int, Groups]]:
        """Layout -> class -> its groups, of the layouts under which calls run."""
        return {id: groups(layout, self.meshes[layout.mesh], self.classes, self.per_node)
                for id, layout in called(self.plan).items()}

    # ------------------------------------------------------------------------------- rows and lengths

    def row(self, frame: str) -> Row:
        return self.lengths.of(self.frames[frame])

    def dp(self, spread: Spread) -> int:
        return 1 if spread.unit == "all" or not spread.layout else self.layouts[spread.layout].dp

    def rows(self, spread: Spread, frame: str) -> int:
        """Sequences of a frame on the fullest shard of a spread."""
        record = self.frames[frame]
        if spread.unit == "prompt":
            return ceil(record.count / record.per_prompt / self.dp(spread)) * record.per_prompt
        return ceil(record.count / self.dp(spread))

    def entries(self, value: Value, rows: float) -> float:
        """Numbers of a value on so many rows of its frame."""
        if value.level == "batch" or not value.frame:
            return 1.0
        row, frame = self.row(value.frame), self.frames[value.frame]
        return {"tokens": rows * row.tokens, "response": rows * row.response, "row": rows, "batch": 1.0,
                "prompt": rows / frame.per_prompt, "columns": rows, "lengths": 2.0 * rows}[value.extent]


def meet(key: Hashable, parties: tuple[int, ...], seconds: float) -> list[Act]:
    """A collective: all are there, then all are busy with it."""
    acts: list[Act] = [] if len(parties) < 2 else [Post(key, parties), Wait(key)]
    return [*acts, Run(seconds)] if seconds > 0 else acts
