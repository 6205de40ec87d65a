"""Which passes inference and training make in the torch backend, and how long each takes.

In: the event, a stage, the plan on a cluster with its expected lengths. Out: `StagePasses`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from rldsl.plan.events import Infer, Train
from rldsl.plan.heads import OUTPUTS
from rldsl.plan.model import Layout
from rldsl.sharding.gradient_leaves import pass_tokens
from rldsl.sharding.layout import stage_layers
from rldsl.sharding.micro_batches import count_without_token_limit
from rldsl.simulate.gradient_reductions import gather_seconds, scatter_seconds
from rldsl.simulate.lengths import Row
from rldsl.simulate.serving_engine import packed, response_lengths
from rldsl.simulate.shared_prompts import computed_prompts, image_tokens
from rldsl.simulate.stage import Stage, StagePasses
from rldsl.simulate.work_counts import WorkCounts, count_micro_batch
from rldsl.simulate.world import World

PACKED = 256  # rows that are packed to count micro-batches; more in proportion


def _micro_batches(event: Infer | Train, rows: int, row: Row, batch: int, at_least: int) -> int:
    """Micro-batches of a dp rank. row: the tokens of one. batch: rows of all dp ranks."""
    count = count_without_token_limit(rows, event.mbs, at_least)
    return min(rows, max(count, _packed_micro_batches(rows, row, batch, event.mbt))) if event.mbt else count


@cache
def _packed_micro_batches(rows: int, row: Row, batch: int, most: int) -> int:
    """Micro-batches of at most `most` tokens for rows whose responses are not all equally long."""
    parts = max(1, min(rows, PACKED))
    lengths = [row.prompt + x for x in response_lengths(row, batch, parts)]
    return max(ceil(packed(lengths, most) * rows / parts), 1)


def infer_passes(world: World, event: Infer, stage: Stage) -> StagePasses:
    layout = world.layouts[event.layout]
    rows, row = world.rows(world.spreads[event.spread], event.frame), world.row(event.frame)
    count = _micro_batches(event, rows, row, world.count(event.frame), layout.pp)
    if not count:
        return StagePasses(0, (), 0.0)
    responses = 1.0 if OUTPUTS[event.output_name].level == "seq" else row.response
    prompts = computed_prompts(world, event, (event.frame,), rows / count)
    one = count_micro_batch(stage.shard, rows / count, row, responses, layout.cp, prompts,
                            image_tokens(world, event, (event.frame,), rows / count))
    tokens = rows / count * (row.tokens - (1 - prompts) * row.prompt) / layout.cp
    links = (stage.tensor_parallel(tokens, one.outputs, stage.shard.layers)
             + stage.context_parallel(tokens, stage.shard.layers) + stage.expert_parallel(tokens, stage.shard.layers))
    seconds = world.machine.forward(stage.shard, one, links)
    return StagePasses(count, ((seconds, 0.0),), stage.hidden_bytes(tokens))


@dataclass(frozen=True, slots=True)
class PlainPasses:
    """The passes of a minibatch at a stage, without what `zero` moves during them: the same at all its levels, except
    where gradients have leaves."""

    count: int  # micro-batches; 0: the call does nothing
    durations: tuple[tuple[float, float], ...] = ()  # (forward, backward) seconds of one, per chunk of layers
    shares: tuple[float, ...] = ()  # of the stage's layers, per chunk
    message: float = 0.0  # bytes of a message to a neighboring stage
    leaves: int = 1  # as of `StagePasses`


def train_passes(world: World, event: Train, stage: Stage) -> StagePasses:
    layout, spread = world.layouts[event.layout], world.spreads[event.spread]
    degrees = layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, layout.vpp
    of_leaves = spread.leaves > 0 and layout.zero > 0  # with `zero`, leaves may have passes of their own
    key = event.id, degrees, of_leaves, event.mbs, event.mbt, event.recompute, stage.rank_class
    if key not in world.plain_passes:
        world.plain_passes[key] = _plain_passes(world, event, stage)
    plain, overlapped = world.plain_passes[key], world.machine.overlapped
    durations: list[tuple[float, float]] = []
    for (forward, backward), share in zip(plain.durations, plain.shares, strict=True):
        gather = share * gather_seconds(stage) if layout.zero >= 3 else 0.0
        scatter = scatter_seconds(stage, share) if layout.zero >= 2 else 0.0
        scatter /= plain.count if spread.leaves else 1  # once in all passes
        durations.append((overlapped(forward, gather), overlapped(backward, gather + scatter)))
    return StagePasses(plain.count, tuple(durations), plain.message, plain.leaves)


def _plain_passes(world: World, event: Train, stage: Stage) -> PlainPasses:
    layout, spread = world.layouts[event.layout], world.spreads[event.spread]
    unit = world.frames[event.frames[0]].per_prompt if spread.granularity == "prompt" else 1  # rows that stay together
    rows = unit * ceil(world.count(event.frames[0]) / unit / spread.minibatches / layout.dp)
    each = [world.row(f) for f in event.frames]
    wide = Row(sum(r.prompt for r in each), sum(r.response for r in each), sum(r.longest for r in each),
               each[0].spread)
    whole = world.count(event.frames[0])
    leaves = min(rows, spread.leaves // layout.dp) if spread.leaves else 1
    if spread.leaves:
        apart = replace(event, mbt=pass_tokens(world.frames[f] for f in event.frames))
        in_leaf = _micro_batches(apart, ceil(rows / leaves), wide, whole, 1)
        together = layout.cp == 1 and not (layout.zero and stage.shard.model.dtype == "bfloat16")
        while together and in_leaf == 1 and leaves % 2 == 0 and 2 * ceil(rows / leaves) * wide.tokens <= event.mbt:
            leaves //= 2  # two are computed as one pass
        count = leaves * in_leaf
    else:
        count = _micro_batches(event, rows, wide, whole, layout.pp)
    if not count:
        return PlainPasses(0)
    by_seq = all(OUTPUTS[what].level == "seq" for _, _, what in event.model_outputs)
    prompts = computed_prompts(world, event, event.frames, rows / count)
    tokens = rows / count * (wide.tokens - (1 - prompts) * wide.prompt) / layout.cp
    images = image_tokens(world, event, event.frames, rows / count)
    operators = len(world.programs[event.loss].nodes)
    durations: list[tuple[float, float]] = []
    shares: list[float] = []
    for chunk in _stage_per_chunk(stage, layout):
        held = chunk.shard
        parts = [count_micro_batch(held, rows / count, world.row(f), 1.0 if by_seq else world.row(f).response,
                                   layout.cp, prompts)
                 for f in event.frames]
        one = WorkCounts(1, held.layers, *(sum(getattr(p, n) for p in parts) for n in ("tokens", "pairs", "outputs")))
        one = replace(one, images=images)
        comm = (chunk.tensor_parallel(tokens, one.outputs, held.layers, sequence_parallel=True)
                + chunk.context_parallel(tokens, held.layers))
        comm += chunk.expert_parallel(tokens, held.layers)
        recomputed = (chunk.tensor_parallel(tokens, 0, held.layers, sequence_parallel=True)
                      + chunk.expert_parallel(tokens, held.layers) if event.recompute == "full" else 0.0)
        forward, backward = world.machine.train(held, one, event.recompute == "full", comm, recomputed)
        loss = world.machine.compute(operators, one.outputs) if held.last else 0.0
        durations.append((forward + loss, backward + 2 * loss))
        shares.append(held.layers / max(stage.shard.layers, 1))
    return PlainPasses(count, tuple(durations), tuple(shares), stage.hidden_bytes(tokens), leaves)


def _stage_per_chunk(stage: Stage, layout: Layout) -> list[Stage]:
    """The stage once per chunk of layers, with these layers alone."""
    if layout.vpp == 1:
        return [stage]
    found, s, number = [], stage.shard, layout.pp * layout.vpp
    for at in range(stage.groups.stage, number, layout.pp):
        last = at == number - 1
        held = replace(s, layers=len(stage_layers(s.model.layers, number, at)), first=at == 0, last=last,
                       head=s.head if last else 0)
        found.append(replace(stage, shard=held))
    return found
