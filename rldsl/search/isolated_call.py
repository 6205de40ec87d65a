"""One call on its own ranks, as the simulator and the memory estimate see it, without a plan.

In: a job, the degrees of a strategy, a number of ranks. Out: the `World` of the simulator with only that call, and its
event under every strategy of these degrees. The ranks of a pipeline stage do the same work, so each stage is one class,
and its groups follow in closed form.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Any

from rldsl.diag import internal_error
from rldsl.graph import model as g
from rldsl.memory.call_memory import gradient_bytes, optimizer_bytes
from rldsl.memory.parameters import Copy, base_bytes, resting_bytes
from rldsl.memory.values import Tables
from rldsl.passes.row_spreads import spread_of, tokens_per_pass
from rldsl.placement.model import Placement
from rldsl.plan.events import AnyCall, Generate, Infer, Train
from rldsl.plan.image_limits import most_declared
from rldsl.plan.model import Layout, Model
from rldsl.plan.payloads import GenerateSpec, InferSpec, TrainSpec, payload
from rldsl.plan.spaces import IndexedFrame
from rldsl.search.problem import Job, Problem
from rldsl.search.space import Block, Strategy
from rldsl.sharding.boxes import Cell
from rldsl.sharding.layout import own_layers
from rldsl.simulate.call_ops import update_ops
from rldsl.simulate.classes import Groups
from rldsl.simulate.engine import Compute, Op
from rldsl.simulate.machine import Machine
from rldsl.simulate.stage import Stage, build_stage
from rldsl.simulate.world import World

SPECS: Mapping[type[g.Node], type] = {g.Generate: GenerateSpec, g.Infer: InferSpec, g.Train: TrainSpec}


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """What a rank holds of a model, whatever the micro-batches of its call."""

    parameters: int  # between calls
    base: int  # below adapters
    update: int  # gradients and optimizer state; 0 where the model is not trained


class IsolatedCall(World):
    """A `World` with one call."""

    def __init__(self, problem: Problem, job: Job, s: Strategy, size: int, own: bool,
                 plain_passes: dict[Hashable, Any] | None = None, pass_peaks: dict[Hashable, Any] | None = None):
        """own: whether the call trains its model, or uses the trained parameters (float32) without a copy.
        plain_passes, pass_peaks: seconds and memory of passes of the same call under other strategies; see
        `World.plain_passes` and `Tables.passes`."""
        mesh = Block(0, size).mesh()
        layout = s.layout(mesh)
        spread = spread_of(job.node, Placement(mesh, layout), problem.frames)
        self.cluster, self.lengths, self.per_node = problem.cluster, problem.lengths, problem.cluster.gpus
        self.machine = machine_of(problem)
        self.meshes, self.layouts, self.spreads = {mesh.id: mesh}, {layout.id: layout}, {spread.id: spread}
        self.model = with_home(problem.models[job.model], layout, own)
        self.models, self.frames = {job.model: self.model}, dict(problem.frames)
        self.programs, self.values = problem.programs, problem.values
        self.layout, self.spread, self.mesh = layout, spread, mesh
        self.groups = {layout.id: stage_groups(layout, size, self.per_node)}  # in place of the property of that name
        self.node, self.prompts = job.node, problem.prompt_sources
        self.served, self.lag = {}, problem.graph.lag
        self.images = most_declared(dict(d.options) for d in problem.graph.data)
        self.plain_passes = plain_passes if plain_passes is not None else {}
        self.pass_peaks = pass_peaks
        self._events: dict[tuple[int, int, bool], AnyCall] = {}  # by what of a strategy they depend on; a cache

    @cached_property
    def payload(self) -> dict[str, Any]:
        """The fields of its event that no strategy changes."""
        return payload(self.node, SPECS[type(self.node)])

    def event(self, s: Strategy) -> AnyCall:
        options = s.mbs, s.mbt, s.recompute
        if options not in self._events:
            self._events[options] = call_event(self.node, self.layout, self.spread.id, s, self.frames, self.payload)
        return self._events[options]

    @cached_property
    def fullest_stages(self) -> tuple[Copy, ...]:
        """The model at the stages that may hold most: the first, the last, and between them the first one that has the
        most layers."""
        pp, layers = self.layout.pp, self.model.layers
        full = (s for s in range(1, pp - 1) if len(own_layers(layers, self.layout, s)) * pp >= layers)
        stages = sorted({0, *([next(full, 1)] if pp > 2 else []), pp - 1})
        return tuple(Copy(self.model, self.layout, Cell(s, 0)) for s in stages)

    @cached_property
    def held_bytes(self) -> tuple[HeldBytes, ...]:
        """Of each of `fullest_stages`."""
        return tuple(HeldBytes(resting_bytes(c), base_bytes(c),
                               gradient_bytes(c) + optimizer_bytes(c) if c.trained else 0) for c in self.fullest_stages)

    @cached_property
    def onload_seconds(self) -> tuple[float, float]:
        """(seconds in which the parameters of the first stage come from host memory, those of the optimizer state)."""
        copy = self.fullest_stages[0]
        parameters = self.machine.host(resting_bytes(copy) + base_bytes(copy))
        return parameters, self.machine.host(optimizer_bytes(copy)) if copy.trained else 0.0

    @cached_property
    def distinct_stages(self) -> list[tuple[Stage, int]]:
        """(a stage, how many are equal to it): the first, the last, and those between them by number of layers, and of
        those that carry a state."""
        pp = self.layout.pp
        carrying = {n for r in self.model.sizes.recurrences for n in r.layers}
        kinds: dict[tuple[int, int, bool, bool], list[int]] = {}
        for s in range(pp):
            own = own_layers(self.model.layers, self.layout, s)
            kinds.setdefault((len(own), len(carrying.intersection(own)), s == 0, s == pp - 1), []).append(s)
        return [(build_stage(self, self.model.name, self.layout.id, of[0], 0), len(of)) for of in kinds.values()]

    @cached_property
    def update_seconds(self) -> float:
        """Of what ends a minibatch of training."""
        return max(compute_seconds(update_ops(stage, self.layout.zero)) for stage, _ in self.distinct_stages)

    @cached_property
    def tables(self) -> Tables:
        return Tables(self.frames, self.values, self.spreads, self.layouts, prompts=self.prompts, images=self.images,
                      passes=self.pass_peaks)


def compute_seconds(ops: list[Op]) -> float:
    """Of the ops in which a rank computes."""
    return sum(a.seconds for a in ops if isinstance(a, Compute))


def machine_of(problem: Problem) -> Machine:
    c = problem.cluster
    return Machine(c, c.threads or max(1, c.cores // min(c.gpus, problem.world)))


def with_home(model: Model, layout: Layout, own: bool) -> Model:
    """The model as in a plan that trains it under this layout (own), under another one, or not at all."""
    return replace(model, train_layout=layout.id if own and model.train_layout else model.train_layout)


def call_event(node: g.Node, layout: Layout, spread: str, s: Strategy, frames: Mapping[str, IndexedFrame],
               own: Mapping[str, Any]) -> AnyCall:
    """own: the fields that the node has, too."""
    common: dict[str, Any] = {"id": 0, "mesh": layout.mesh, "layout": layout.id, "spread": spread, "mbs": s.mbs, **own}
    match node:
        case g.Generate():
            return Generate(**common)
        case g.Infer():
            return Infer(**common, mbt=s.mbt)
        case g.Train():
            return Train(**common, mbt=tokens_per_pass(node, frames, layout, s.mbt),
                         recompute="full" if s.recompute else "none")
        case _:
            raise internal_error(f"{node.id} is not a call", "search")


def stage_groups(x: Layout, size: int, gpus: int) -> dict[int, Groups]:
    """The groups of each stage of a layout on ranks 0 to size - 1."""
    block, inner = x.dp * x.cp * x.tp, x.cp * x.tp
    shards, rows = _distinct_starts(size, inner, gpus), _distinct_starts(size, block, gpus)
    sizes = {"pp": x.pp, "tp": x.tp, "cp": x.cp, "dp": x.dp, "mesh": size, "dp_rank": x.pp * inner}
    crosses = {"pp": _crosses_nodes(range(block), block, x.pp, gpus), "mesh": size > gpus, "dp_rank": False,
               "tp": _crosses_nodes(_distinct_starts(size, x.tp, gpus), 1, x.tp, gpus),
               "cp": _crosses_nodes((s + t for s in shards for t in range(x.tp)), x.tp, x.cp, gpus),
               "dp": _crosses_nodes((s + i for s in rows for i in range(inner)), inner, x.dp, gpus)}
    if x.ep > 1:
        sizes |= {"ep": x.ep, "expert_dp": x.dp // x.ep}
        runs = [s + d * inner + i for s in rows for d in range(0, x.dp, x.ep) for i in range(inner)]
        places = [s + i for s in rows for i in range(x.ep * inner)]
        crosses |= {"ep": _crosses_nodes(runs, inner, x.ep, gpus),
                    "expert_dp": _crosses_nodes(places, x.ep * inner, x.dp // x.ep, gpus)}
    pipeline = tuple(range(x.pp))
    return {s: Groups({a: pipeline if a in ("pp", "mesh", "dp_rank") else (s,) for a in sizes}, sizes, crosses, s)
            for s in pipeline}


def _distinct_starts(size: int, step: int, gpus: int) -> range:
    """0, step, ... below `size`, up to the first one with the same position in its node as an earlier one."""
    return range(0, min(size, lcm(step, gpus)), step)


def _crosses_nodes(firsts: Iterable[int], stride: int, count: int, gpus: int) -> bool:
    """Whether one of the groups first, first + stride, ... (`count` ranks) spans several nodes."""
    return count > 1 and any(f // gpus != (f + (count - 1) * stride) // gpus for f in firsts)
