"""The cost of a call under a strategy: seconds per step, and bytes per device.

In: a job, a strategy, a number of ranks. Out: an `Entry`. Seconds come from the simulator's functions
(`simulate/calls.py`) and bytes from the memory estimate (`memory/`), both through the backend's description, for the
call alone on its ranks. Pipelines are summed in closed form instead of simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from rldsl.memory.calls import gradient_bytes, needs, optimizer_bytes
from rldsl.memory.parameters import Copy, elements, resting
from rldsl.plan.events import AnyCall, Generate, Infer, Train
from rldsl.search.isolated_call import IsolatedCall
from rldsl.search.problem import Job, Problem
from rldsl.search.space import Strategy
from rldsl.sharding.layout import own_layers
from rldsl.simulate.calls import (
    Passes,
    Stage,
    generate,
    infer_passes,
    metrics_seconds,
    result_seconds,
    stage,
    train_passes,
    update,
)
from rldsl.simulate.engine import Compute, Op, Pool


@dataclass(frozen=True, slots=True)
class Candidate:
    """The cost of a strategy of a call."""

    strategy: Strategy
    size: int  # ranks
    seconds: float  # per step
    unit: int  # how many ranks wait for each other: all, or those of a shard
    static: int  # bytes of trained state, held all the time
    shared: int  # bytes of read-only parameters, held once for all calls that use the same
    copy: int  # bytes of a copy of a trained model, held until its last use in a step
    active: int  # bytes while the call runs
    own: bool = False  # whether it runs on the trained parameters themselves, without a copy
    away: float = 0.0  # seconds of the onload, which overlaps with other work

    @property
    def resident(self) -> int:
        """Bytes that other calls cannot use."""
        return self.static + self.shared + self.copy

    @property
    def least(self) -> int:
        """The fewest bytes with which it can run: without a copy of its own."""
        return self.static + self.shared + self.active


@dataclass(frozen=True, slots=True)
class CallMemory:
    static: int
    shared: int
    copy: int
    active: int

    @property
    def least(self) -> int:
        return self.static + self.shared + self.active


def candidate_cost(world: IsolatedCall, problem: Problem, job: Job, s: Strategy, size: int, found: CallMemory, own: bool) -> Candidate:
    """world: of the call alone. found: its memory. own: on the copy that is trained; always so of a train call."""
    back = onload_seconds(world) if s.offload else 0.0
    alone = job.kind != "train" and s.pp == 1
    unit = s.cp * s.tp * s.ep if alone else size
    return Candidate(s, size, call_seconds(world, world.event(s)) * job.times, unit, found.static, found.shared, found.copy,
                 found.active, own and problem.models[job.model].home != "", back * job.times)


# ---------------------------------------------------------------------------------------------------- memory


def call_memory(problem: Problem, world: IsolatedCall, job: Job, s: Strategy) -> CallMemory:
    """Bytes of the fullest rank. What is offloaded is on the device while the call runs."""
    event = world.event(s)
    each = [_memory_of_stage(problem, world, job, s, event, copy) for copy in world.fullest]
    static, shared, copy, active = (max(getattr(b, n) for b in each) for n in ("static", "shared", "copy", "active"))
    return CallMemory(0, 0, copy, active + static + shared) if s.offload else CallMemory(static, shared, copy, active)


def _memory_of_stage(problem: Problem, world: IsolatedCall, job: Job, s: Strategy, event: AnyCall, copy: Copy) -> CallMemory:
    held = copy.stored * resting(copy)
    base = copy.compute * elements(copy.model.base, copy)
    active = sum(needs(world.tables, event, copy, "cuda").values())
    if isinstance(event, Train):
        mine = held + gradient_bytes(copy) + optimizer_bytes(copy)
        return CallMemory(mine if problem.homes[job.model] == job.number else 0, base, 0, active)
    if copy.model.home == world.layout.id:
        return CallMemory(0, base, 0, active + (held if s.offload else 0))
    return CallMemory(0, base, held, active) if copy.model.home else CallMemory(0, base + held, 0, active)


def onload_seconds(world: IsolatedCall) -> float:
    """Seconds of the onload of parameters and optimizer state, at the same time."""
    copy = world.fullest[0]
    parts = copy.stored * resting(copy) + copy.compute * elements(world.model.base, copy)
    return world.machine.host(max(parts, optimizer_bytes(copy) if copy.trained else 0))


# -------------------------------------------------------------------------------------------------- duration


def call_seconds(world: IsolatedCall, event: AnyCall) -> float:
    """Seconds of the call, once."""
    match event:
        case Generate():
            return _with_shared_cores(world, _compute_seconds(generate(world, event, 0, 0)))
        case Infer():
            each = _distinct_stages(world)
            line = _pipeline_times(each, [infer_passes(world, event, stage) for stage, _ in each])
            return _with_shared_cores(world, inference_seconds(line) + result_seconds(world, event, each[-1][0])) if line.count else 0.0
        case Train():
            each = _distinct_stages(world)
            times = world.spread.minibatches * world.spread.epochs
            line = _pipeline_times(each, [train_passes(world, event, stage) for stage, _ in each])
            ends = max(_compute_seconds(update(stage, world.layout.zero)) for stage, _ in each)
            seconds = times * (training_seconds(line) + ends) + metrics_seconds(each[-1][0])
            return _with_shared_cores(world, seconds) if line.count else 0.0
        case _:
            assert_never(event)


def _distinct_stages(world: IsolatedCall) -> list[tuple[Stage, int]]:
    """(a stage, how many are like it): the first, the last, and the ones between them by number of layers."""
    pp = world.layout.pp
    kinds: dict[tuple[int, bool, bool], list[int]] = {}
    for s in range(pp):
        layers = len(own_layers(world.model.layers, world.layout, s))
        kinds.setdefault((layers, s == 0, s == pp - 1), []).append(s)
    return [(stage(world, world.model.name, world.layout.id, of[0], 0), len(of)) for of in kinds.values()]


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """A pipeline."""

    stages: int
    count: int  # micro-batches
    total: float  # seconds of all stages together for one micro-batch, forward and backward
    slowest: float  # seconds of the slowest stage for one micro-batch, forward and backward
    message: float  # seconds
    chunks: int = 1  # of layers per stage


def _pipeline_times(each: list[tuple[Stage, int]], found: list[Passes]) -> PipelineTimes:
    me, stages = each[0][0], sum(n for _, n in each)
    if not found[0].count:
        return PipelineTimes(stages, 0, 0.0, 0.0, 0.0)
    way = me.machine.message(found[0].message, me.groups.crosses["pp"]) if stages > 1 else 0.0
    both = [sum(map(sum, p.durations)) for p in found]
    return PipelineTimes(stages, found[0].count, sum(t * n for t, (_, n) in zip(both, each, strict=True)), max(both), way,
                len(found[0].durations))


def inference_seconds(line: PipelineTimes) -> float:
    """Micro-batches follow each other through the stages: a flow shop with equal jobs, which takes the sum of all
    stages, plus the slowest once more for each further job."""
    return line.total + (line.stages - 1) * line.message + (line.count - 1) * (line.slowest + line.message * (
        line.stages > 1))


def training_seconds(line: PipelineTimes) -> float:
    """1F1B (Narayanan et al. 2021): one micro-batch through all stages and back, and for each further one the slowest
    stage and a message. With chunks of layers the fill is divided by the chunks, and each chunk has its messages. The
    full simulation finds up to 1 % more, since messages also delay each other while a pipeline fills."""
    fill = (line.stages - 1) * (2 if line.stages > 2 else 1)
    further = line.count * line.chunks - 1 if line.stages > 1 else 0
    return (line.count * line.slowest + (line.total - line.slowest) / line.chunks
            + (fill + further) * line.message)


def _compute_seconds(ops: list[Op]) -> float:
    return sum(a.seconds for a in ops if isinstance(a, Compute))


def _with_shared_cores(world: IsolatedCall, seconds: float) -> float:
    """Seconds where ranks share the cores of a machine: at least as if no other ranks were there."""
    if not world.machine.shared:
        return seconds
    cores = max(1, world.cluster.cores // world.machine.threads)
    here = min(world.layout.dp * world.layout.tp * world.layout.cp, world.per_node)
    return seconds / Pool(cores, world.cluster.core_speed).rate(here)
