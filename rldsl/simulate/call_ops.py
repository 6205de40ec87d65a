"""The ops of a class of ranks in a call: generate, infer, train, with the schedule of the backend's pipeline.

In: an event, a class, the world. Out: ops. `key` distinguishes this execution of the event from all others. Which
passes a call makes, and how long each takes, is up to its backend (`time_costs.py`).
Errors: RL0326 a backend whose description states costs that are no durations.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import isfinite

from rldsl.plan.backends import unusable
from rldsl.plan.events import Generate, Infer, Train
from rldsl.sharding.pipeline_schedule import Exchange, MicroBatchPass, actions, forward_actions
from rldsl.simulate.engine import Compute, Op, Wait
from rldsl.simulate.stage import DecodeTime, Stage, StagePasses, build_stage
from rldsl.simulate.time_costs import time_costs
from rldsl.simulate.world import World, collective

# ------------------------------------------------------------------------------ what a backend states, checked


def decode_time(world: World, event: Generate, stage: Stage) -> DecodeTime:
    """The duration of a `generate`. Errors: RL0326."""
    found = time_costs(stage.backend).generate(world, event, stage)
    if not isinstance(found, DecodeTime) or not _check_seconds(found.seconds) or not 0 <= found.share <= 1:
        raise unusable(stage.backend, f"`time.generate` must return a `DecodeTime` of finite seconds, not {found!r}")
    return found


def infer_passes(world: World, event: Infer, stage: Stage) -> StagePasses:
    """The passes of an inference call. Errors: RL0326."""
    return _check_passes(stage, "infer", time_costs(stage.backend).infer(world, event, stage), 1)


def train_passes(world: World, event: Train, stage: Stage) -> StagePasses:
    """The passes of a minibatch. Errors: RL0326."""
    found = time_costs(stage.backend).train(world, event, stage)
    return _check_passes(stage, "train", found, world.layouts[event.layout].vpp)


def update_ops(stage: Stage, zero: int) -> list[Op]:
    """What ends a minibatch. Errors: RL0326."""
    found = time_costs(stage.backend).update(stage, zero)
    if not isinstance(found, list) or not all(isinstance(op, Op) for op in found) or not all(
            _check_seconds(op.seconds) for op in found if isinstance(op, Compute)):
        raise unusable(stage.backend, f"`time.update` must return a list of ops of finite seconds, not {found!r}")
    return found


def _check_seconds(value: object) -> bool:
    return isinstance(value, float | int) and isfinite(value) and value >= 0


def _check_passes(stage: Stage, method: str, found: object, chunks: int) -> StagePasses:
    if not isinstance(found, StagePasses):
        raise unusable(stage.backend, f"`time.{method}` must return a `StagePasses`, not {found!r}")
    if type(found.count) is not int or found.count < 0 or not _check_seconds(found.message):
        raise unusable(stage.backend, f"`time.{method}` must count 0 or more micro-batches and bytes, not {found!r}")
    if found.count and (len(found.durations) != chunks or not all(
            len(pair) == 2 and all(map(_check_seconds, pair)) for pair in found.durations)):
        raise unusable(stage.backend, f"`time.{method}` must state finite (forward, backward) seconds for each of "
                       f"{chunks} chunks of layers, not {found.durations!r}")
    return found


# ---------------------------------------------------------------------------------------------- ops of the calls


def _around(world: World) -> list[Op]:
    """What a driver does before a call, where there is one."""
    seconds = world.machine.call()
    return [Compute(seconds, 0.0)] if seconds else []


def generate_ops(world: World, event: Generate, c: int, key: Hashable) -> list[Op]:
    """Every rank of a dp rank takes part in every token."""
    stage = build_stage(world, event.model, event.layout, c, key)
    found = decode_time(world, event, stage)
    if not found.seconds:
        return []
    parties = stage.groups.members["dp_rank"]
    start = [*collective((key, "dp_rank", parties), parties, 0.0), *stage.collective_ops("ep", "start", 0.0)]
    return [*_around(world), *start, Compute(found.seconds, found.share)]


def infer_ops(world: World, event: Infer, c: int, key: Hashable) -> list[Op]:
    """Micro-batches through the pipeline; then the last stage sends what it found to the others."""
    stage = build_stage(world, event.model, event.layout, c, key)
    found = infer_passes(world, event, stage)
    ops: list[Op] = _around(world) if found.count else []
    sent: list[Hashable] = []
    for i in range(found.count):
        if not stage.shard.first:
            post, key_in = stage.neighbor_message(i, "before", found.message)
            ops += [post, Wait(key_in)]
        ops += [*stage.collective_ops("tp", i, 0.0), *stage.collective_ops("ep", i, 0.0),
                Compute(found.durations[0][0])]
        if not stage.shard.last:
            post, key_out = stage.neighbor_message(i, "next", found.message)
            ops.append(post)
            sent.append(key_out)
    ops += [Wait(k) for k in sent]
    return [*ops, *stage.collective_ops("pp", "result", result_seconds(world, event, stage))] if found.count else []


def result_seconds(world: World, event: Infer, stage: Stage) -> float:
    """Seconds in which the last stage sends its results to all others."""
    rows, row = world.rows(world.spreads[event.spread], event.frame), world.row(event.frame)
    return stage.all_reduce("pp", 4 * rows * row.response)


def train_ops(world: World, event: Train, c: int, key: Hashable) -> list[Op]:
    """Per minibatch: micro-batches through the pipeline, reductions, one optimizer step. At the end the metrics."""
    stage = build_stage(world, event.model, event.layout, c, key)
    layout, spread = world.layouts[event.layout], world.spreads[event.spread]
    found = train_passes(world, event, stage)
    ops: list[Op] = _around(world) if found.count else []
    for m in range(spread.minibatches * spread.epochs if found.count else 0):
        step = replace(stage, key=(key, m))
        if event.first_pass:
            ops += first_pass_ops(replace(stage, key=(key, m, "first")), found, outputs_seconds(world, event, stage))
        for leaf in range(found.leaves):
            count = (leaf + 1) * found.count // found.leaves - leaf * found.count // found.leaves
            ops += pipeline_ops(replace(stage, key=(key, m, leaf)) if leaf else step, count, found.durations,
                                found.message)
        ops += update_ops(step, layout.zero)
    return [*ops, *stage.collective_ops("mesh", "metrics", metrics_seconds(stage))] if found.count else []


def first_pass_ops(stage: Stage, found: StagePasses, outputs: float) -> list[Op]:
    """The passes without gradient that come before those of a minibatch. outputs: as of `outputs_seconds`."""
    ops = pipeline_ops(stage, found.count, found.durations, found.message, forward_only=True)
    return [*ops, *(stage.collective_ops("dp", "outputs", outputs) if stage.shard.last else [])]


def outputs_seconds(world: World, event: Train, stage: Stage) -> float:
    """Seconds in which the dp ranks bring what a loss reads of a minibatch together."""
    read = len(event.model_outputs) + len(event.data_inputs)
    tokens = sum(world.count(f) * world.row(f).response for f in event.frames)
    return stage.all_reduce("dp", 8 * read * tokens / world.spreads[event.spread].minibatches)


def metrics_seconds(stage: Stage) -> float:
    """Seconds in which all ranks of the mesh sum the metrics of a train call."""
    return 2 * stage.all_reduce("mesh", 64)


def pipeline_ops(stage: Stage, count: int, durations: Sequence[tuple[float, float]], moved: float,
                 forward_only: bool = False) -> list[Op]:
    """The passes of a minibatch in the order of the pipeline schedule (`sharding/pipeline_schedule.py`). durations: of
    a forward and a backward pass, per chunk. A received message is waited for by the pass that needs it, a sent one
    before the next exchange."""
    ops: list[Op] = []
    sent: list[Hashable] = []
    receiving: dict[MicroBatchPass, Hashable] = {}
    here = stage.groups.stage
    schedule = forward_actions if forward_only else actions
    for action in schedule(len(stage.pipeline), len(durations), count)[here]:
        if isinstance(action, Exchange):
            ops += [Wait(key) for key in sent]
            sent.clear()
            for message in action.sends:
                post, key = stage.message(message, message.peer, moved)
                ops.append(post)
                sent.append(key)
            for message in action.receives:
                post, receiving[message.for_pass] = stage.message(message, here, moved)
                ops.append(post)
            continue
        if action in receiving:
            ops.append(Wait(receiving.pop(action)))
        name = ("backward" if action.backward else "forward", action.chunk, action.micro)
        ops += [*stage.collective_ops("tp", name, 0.0), *stage.collective_ops("ep", name, 0.0),
                Compute(durations[action.chunk][action.backward])]
    return [*ops, *(Wait(key) for key in sent)]
