"""The cost of a call under a strategy: seconds per step, and bytes per device.

In: a job, a strategy, a number of ranks. Out: a `Candidate`. Seconds come from the simulator's functions
(`simulate/call_ops.py`) and bytes from the memory estimate (`memory/`), both through the backend's description, for the
call alone on its ranks. Pipelines are computed in closed form instead of simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import assert_never

from rldsl.memory.call_memory import call_bytes
from rldsl.memory.parameters import Copy
from rldsl.plan.events import AnyCall, Generate, Infer, Train
from rldsl.search.isolated_call import HeldBytes, IsolatedCall, compute_seconds
from rldsl.search.problem import Job, Problem
from rldsl.search.space import Strategy
from rldsl.simulate.call_ops import (
    generate_ops,
    infer_passes,
    metrics_seconds,
    outputs_seconds,
    result_seconds,
    train_passes,
)
from rldsl.simulate.engine import Pool
from rldsl.simulate.stage import Stage, StagePasses


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy for a call, with its cost."""

    strategy: Strategy  # degrees and options
    size: int  # ranks
    seconds: float  # per step
    sync_ranks: int  # how many ranks wait for each other: all, or those of one dp rank
    static_bytes: int  # trained state, held all the time
    shared_bytes: int  # read-only parameters, held once for all calls that use the same
    copy_bytes: int  # a copy of a trained model, held until its last use in a step
    active_bytes: int  # while the call runs
    on_trained_params: bool = False  # whether it uses the trained parameters themselves, without a copy
    onload_seconds: float = 0.0  # of the onload, which overlaps with other work
    sending_onload_seconds: float = 0.0  # before trained parameters are sent to copies: the last offload, and an onload

    @property
    def resident_bytes(self) -> int:
        """Bytes that other calls cannot use."""
        return self.static_bytes + self.shared_bytes + self.copy_bytes

    @property
    def min_bytes(self) -> int:
        """The fewest bytes with which it can run: without its own copy."""
        return self.static_bytes + self.shared_bytes + self.active_bytes


@dataclass(frozen=True, slots=True)
class CallMemory:
    """As `Candidate`."""

    static_bytes: int  # as of a `Candidate`
    shared_bytes: int  # as of a `Candidate`
    copy_bytes: int  # as of a `Candidate`
    active_bytes: int  # as of a `Candidate`

    @property
    def min_bytes(self) -> int:
        return self.static_bytes + self.shared_bytes + self.active_bytes


def build_candidate(isolated: IsolatedCall, problem: Problem, job: Job, s: Strategy, size: int, memory: CallMemory,
                    own: bool, seconds: float) -> Candidate:
    """own: whether it uses the trained parameters; always true for a train call. seconds: per step."""
    independent = job.kind != "train" and s.pp == 1
    sync_ranks = s.cp * s.tp * s.ep if independent else size
    onload, sending = onload_seconds(isolated, job) if s.offload else (0.0, 0.0)
    return Candidate(s, size, seconds, sync_ranks, memory.static_bytes, memory.shared_bytes, memory.copy_bytes,
                     memory.active_bytes, own and problem.models[job.model].train_layout != "", onload, sending)


def build_offloaded(isolated: IsolatedCall, job: Job, e: Candidate) -> Candidate:
    """A candidate of a training or of a frozen model, with offloading: it holds nothing while other calls run."""
    onload, sending = onload_seconds(isolated, job)
    return Candidate(replace(e.strategy, offload=True), e.size, e.seconds, e.sync_ranks, 0, 0, e.copy_bytes,
                     e.min_bytes, e.on_trained_params, onload, sending)


def onload_seconds(isolated: IsolatedCall, job: Job) -> tuple[float, float]:
    """`onload_seconds` and `sending_onload_seconds` of a candidate. Parameters and optimizer state move at the same
    time."""
    parameters, optimizer = isolated.onload_seconds
    most = max(parameters, optimizer)
    return most * job.times_per_step, parameters + most if job.kind == "train" else 0.0


# ---------------------------------------------------------------------------------------------------- memory


def call_memory(problem: Problem, isolated: IsolatedCall, job: Job, s: Strategy, limit: float = inf) -> CallMemory:
    """Bytes of the fullest rank. Offloaded state is on the device while the call runs. limit: the stages after the
    first that needs more bytes are not looked at."""
    event, each = isolated.event(s), list[CallMemory]()
    for stage, held in zip(isolated.fullest_stages, isolated.held_bytes, strict=True):
        each.append(_memory_of_stage(problem, isolated, job, s, event, stage, held))
        if each[-1].min_bytes > limit:
            break
    static, shared = max(b.static_bytes for b in each), max(b.shared_bytes for b in each)
    copy, active = max(b.copy_bytes for b in each), max(b.active_bytes for b in each)
    return CallMemory(0, 0, copy, active + static + shared) if s.offload else CallMemory(static, shared, copy, active)


def least_bytes(problem: Problem, isolated: IsolatedCall, job: Job) -> int:
    """Bytes that the call needs with any micro-batches: parameters, gradients and optimizer state."""
    trains = job.kind == "train" and problem.first_train[job.model] == job.number
    copies = job.kind == "train" or isolated.model.train_layout
    return max(x.base + (x.parameters + x.update if trains else 0 if copies else x.parameters)
               for x in isolated.held_bytes)


def _memory_of_stage(problem: Problem, isolated: IsolatedCall, job: Job, s: Strategy, event: AnyCall,
                     copy: Copy, of: HeldBytes) -> CallMemory:
    held, base = of.parameters, of.base
    active = sum(call_bytes(isolated.tables, event, copy, "cuda").values())
    if isinstance(event, Train):
        trained = held + of.update
        return CallMemory(trained if problem.first_train[job.model] == job.number else 0, base, 0, active)
    if copy.model.train_layout == isolated.layout.id:
        return CallMemory(0, base, 0, active + (held if s.offload else 0))
    return CallMemory(0, base, held, active) if copy.model.train_layout else CallMemory(0, base + held, 0, active)


# -------------------------------------------------------------------------------------------------- duration


def call_seconds(isolated: IsolatedCall, event: AnyCall) -> float:
    """Seconds of the call, once."""
    match event:
        case Generate():
            return _with_shared_cores(isolated, compute_seconds(generate_ops(isolated, event, 0, 0)))
        case Infer():
            each = isolated.distinct_stages
            times = _pipeline_times(each, [infer_passes(isolated, event, stage) for stage, _ in each])
            if not times.count:
                return 0.0
            seconds = inference_seconds(times) + result_seconds(isolated, event, each[-1][0])
            return _with_shared_cores(isolated, isolated.machine.call() + seconds)
        case Train():
            each = isolated.distinct_stages
            updates = isolated.spread.minibatches * isolated.spread.epochs
            passes = [train_passes(isolated, event, stage) for stage, _ in each]
            times = _pipeline_times(each, passes)
            first = _first_pass_seconds(isolated, event, each, passes) if event.first_pass and times.count else 0.0
            seconds = updates * (first + training_seconds(times) + isolated.update_seconds)
            seconds += metrics_seconds(each[-1][0]) + isolated.machine.call()
            return _with_shared_cores(isolated, seconds) if times.count else 0.0
        case _:
            assert_never(event)


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """The times of a pipeline, in seconds; of forward and backward for one micro-batch."""

    stages: int  # pp
    count: int  # micro-batches
    total: float  # of all stages together
    slowest: float  # of the slowest stage
    message: float  # between two stages
    chunks: int = 1  # of layers per stage (vpp)
    leaves: int = 1  # as in `StagePasses`


def _pipeline_times(each: list[tuple[Stage, int]], found: list[StagePasses]) -> PipelineTimes:
    first, stages = each[0][0], sum(n for _, n in each)
    if not found[0].count:
        return PipelineTimes(stages, 0, 0.0, 0.0, 0.0)
    message = first.machine.message(found[0].message, first.groups.crosses["pp"]) if stages > 1 else 0.0
    both = [sum(map(sum, p.durations)) for p in found]
    total = sum(t * n for t, (_, n) in zip(both, each, strict=True))
    return PipelineTimes(stages, found[0].count, total, max(both), message, len(found[0].durations),
                         found[0].leaves)


def _first_pass_seconds(isolated: IsolatedCall, event: Train, each: list[tuple[Stage, int]],
                        passes: list[StagePasses]) -> float:
    """The forward passes that come before those of a minibatch, and what the dp ranks exchange after them. With chunks
    of layers the fill is divided by their number, and each chunk has its messages."""
    p = _pipeline_times(each, [replace(x, durations=tuple((forward, 0.0) for forward, _ in x.durations))
                               for x in passes])
    further = p.count * p.chunks - 1 if p.stages > 1 else 0
    filled = (p.total - p.slowest) / p.chunks + (p.stages - 1) * p.message
    return p.count * p.slowest + filled + further * p.message + outputs_seconds(isolated, event, each[-1][0])


def inference_seconds(p: PipelineTimes) -> float:
    """Micro-batches follow each other through the stages: a flow shop with equal jobs, which takes the sum of all
    stages, plus the slowest stage once for each further job."""
    return p.total + (p.stages - 1) * p.message + (p.count - 1) * (p.slowest + p.message * (p.stages > 1))


def training_seconds(p: PipelineTimes) -> float:
    """1F1B (Narayanan et al. 2021): one micro-batch through all stages and back, plus the slowest stage and a message
    for each further one. With chunks of layers the fill is divided by their number, and each chunk has its messages.
    The full simulation takes up to 1 % longer, since messages also delay each other while a pipeline fills."""
    fill = (p.stages - 1) * (2 if p.stages > 2 else 1)
    further = p.count * p.chunks - p.leaves if p.stages > 1 else 0
    filled = p.leaves * ((p.total - p.slowest) / p.chunks + fill * p.message)
    return p.count * p.slowest + filled + further * p.message


def _with_shared_cores(isolated: IsolatedCall, seconds: float) -> float:
    """Seconds of a call whose ranks share the cores of a machine with each other."""
    if not isolated.machine.shared:
        return seconds
    cores = max(1, isolated.cluster.cores // isolated.machine.threads)
    here = min(isolated.layout.dp * isolated.layout.tp * isolated.layout.cp, isolated.per_node)
    return seconds / Pool(cores, isolated.cluster.core_speed).rate(here)
