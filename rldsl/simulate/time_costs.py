"""How long the calls of a backend take: what its description states, and what the torch backend takes.

In: an event, a class of ranks at its pipeline stage, the plan on a cluster. Out: the passes that a call makes, and the
seconds of each. `TimeCosts` counts the torch backend; other backends derive theirs from it (`Description.time`).
`call_ops.py` checks what a backend states, and makes ops of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf, log2, prod

from rldsl.clusters import Cluster
from rldsl.memory.decode_shapes import live_conversations
from rldsl.plan.backends import costs
from rldsl.plan.events import Generate, Infer, Train
from rldsl.plan.heads import OUTPUTS
from rldsl.plan.model import Layout, Model
from rldsl.sharding.boxes import itemsize
from rldsl.sharding.dtypes import parameter_size
from rldsl.sharding.gradient_leaves import pass_tokens
from rldsl.sharding.layout import stage_layers
from rldsl.sharding.micro_batches import count_without_token_limit
from rldsl.simulate.conversations import PassCosts, ShardConversations, conversation_seconds
from rldsl.simulate.engine import Compute, Op
from rldsl.simulate.gradient_reductions import gather_seconds, gradient_reductions, scatter_seconds
from rldsl.simulate.lengths import Row
from rldsl.simulate.serving_engine import packed, response_lengths, serve
from rldsl.simulate.shared_prompts import computed_prompts, image_tokens, of_a_prompt
from rldsl.simulate.stage import DecodeTime, Stage, StagePasses
from rldsl.simulate.work_counts import (
    DecodePlan,
    WorkCounts,
    build_shard,
    count_decode,
    count_micro_batch,
    count_prefill,
    num_cache_widths,
)
from rldsl.simulate.world import World

PACKED = 256  # rows that are packed to count micro-batches; more in proportion


class TimeCosts:
    """How long the calls of one backend take. This class counts the torch backend; derive from it and override what
    differs. Every method is pure. world: the plan on a cluster, with its expected lengths. stage: the class of ranks at
    its stage."""

    def generate(self, world: World, event: Generate, stage: Stage) -> DecodeTime:
        """The whole of a `generate`."""
        return generate_time(world, event, stage)

    def infer(self, world: World, event: Infer, stage: Stage) -> StagePasses:
        """The forward passes of an inference call; backward passes take no time."""
        return infer_passes(world, event, stage)

    def train(self, world: World, event: Train, stage: Stage) -> StagePasses:
        """The passes of one minibatch of training."""
        return train_passes(world, event, stage)

    def update(self, stage: Stage, zero: int) -> list[Op]:
        """What ends a minibatch: the reductions of gradients, then one optimizer step."""
        elements = stage.sharded_elements if zero else stage.shard.trained
        return [*gradient_reductions(stage, zero), Compute(stage.machine.update(stage.shard, elements))]


def time_costs(backend: str) -> TimeCosts:
    """The costs that the description of a backend states. Errors: RL0326."""
    return costs(backend, "time", TimeCosts)


def generate_time(world: World, event: Generate, stage: Stage) -> DecodeTime:
    """A pipeline has one group of sequences per stage (`backends/torch/generate/clock_ticks.py`): all stages work at
    the same time, and exchange between two clock ticks."""
    layout = world.layouts[event.layout]
    rows, row = world.rows(world.spreads[event.spread], event.frame), world.row(event.frame)
    if event.conversation is not None:
        return _conversation_time(world, event, stage, rows, row)
    if world.cluster.cache_gb:
        return _served_time(world, event, stage)
    d, machine = plan_decoding(event, rows, row, layout.pp), world.machine
    own = longest = 0.0
    for s in range(layout.pp):
        held = build_shard(world.models[event.model], layout, s)
        first, rest = count_prefill(held, d, row, of_a_prompt(world, row)), count_decode(held, d)
        at = replace(stage, shard=held)
        new = d.prefilled * row.prompt
        seconds = (machine.forward(held, first) + machine.decode(held, rest)
                   + machine.start(held, d.shapes)
                   + d.waves * at.links(new, held.layers) + d.steps * at.links(d.active, held.layers)
                   + (d.steps + d.waves) * at.logits_gather(d.active))
        longest = max(longest, seconds)
        own = seconds if s == stage.groups.stage else own
    total = longest
    if layout.pp > 1:  # hidden states to the next stage, and tokens and log-probs back to all
        ticks = d.steps + d.waves + layout.pp - 1
        total += ticks * machine.message(stage.hidden_bytes(d.active) + 16 * d.active, stage.groups.crosses["pp"])
        total += longest * (layout.pp - 1) / max(d.steps + d.waves, 1.0)
    return DecodeTime(total, own / total) if total else DecodeTime(0.0)


def plan_decoding(event: Generate, rows: float, row: Row, groups: int = 1) -> DecodePlan:
    """rows: sequences of the shard. groups: of sequences, one per pipeline stage. A finished sequence makes room for a
    waiting one; until the last one ends, the KV cache is read as far as the longest. The samples of a prompt share its
    prefill; with the KV cache of what it continues there is none."""
    slots = min(rows, event.mbs or rows)
    if not slots:
        return DecodePlan(0, 0, 0, 0, 0, 0, 0)
    waves = ceil(rows / slots)
    longest = row.longest
    steps = longest if waves == 1 else max(rows * row.response / slots + (longest - row.response), longest)
    if event.cache_of:
        waves = 0  # nothing is prefilled: the last token of a prompt runs in the first decoding step
    sampled = rows * max(row.response - bool(waves), 0.0)  # the first token comes from the prefill
    steps = max(steps - waves, 0.0)
    each = slots / groups
    return DecodePlan(waves * groups, each, each / max(event.sampling.n, 1) if waves else 0.0, steps * groups,
                    sampled / (steps * groups) if steps else 0.0, row.prompt + longest / 2,
                    groups * num_cache_widths(row.prompt, row.prompt + longest) if steps else 0.0)


def _conversation_time(world: World, event: Generate, stage: Stage, rows: int, row: Row) -> DecodeTime:
    """Conversations: each stage works on its own passes, so a token for each takes as long as the slowest stage
    takes for all, in `pp` passes."""
    limits, layout, cluster = event.conversation, world.layouts[event.layout], world.cluster
    if limits is None or not rows:
        return DecodeTime(0.0)
    machine, crosses = world.machine, stage.groups.crosses["pp"]
    stages = [replace(stage, shard=build_shard(world.models[event.model], layout, s)) for s in range(layout.pp)]
    width = row.prompt + row.response / 2

    def hop(moved: float) -> float:
        """A message to the next stage."""
        return machine.message(moved, crosses) if layout.pp > 1 else 0.0

    def at(one: Stage, tokens: float, outputs: float) -> float:
        """Collectives of a pass."""
        return one.links(tokens, one.shard.layers) + one.logits_gather(outputs)

    def decode(active: float) -> float:
        each = active / layout.pp
        return layout.pp * max(
            machine.conversation_step(s.shard, WorkCounts(
                1, s.shard.layers, each * s.shard.layers, each * s.shard.layers * width * s.shard.attending,
                each * s.shard.last))
            + at(s, each, each) + hop(s.hidden_bytes(each))
            for s in stages)

    def prefill(tokens: float, of: float) -> float:
        return max(
            machine.conversation_reply(s.shard, WorkCounts(
                1, s.shard.layers, tokens * s.shard.layers, tokens * s.shard.layers * width * s.shard.attending,
                of * s.shard.last, slots=of * s.shard.layers))
            + at(s, tokens, of) + hop(s.hidden_bytes(tokens)) for s in stages)

    rows = -(-rows // limits.branches)  # conversations
    slots = min(rows, event.mbs or rows)
    kept = stage.shard.layers * stage.shard.cache * stage.shard.item * stage.shard.attending
    turns = min(cluster.turns.mean if cluster.turns else limits.max_turns, limits.max_turns)
    in_turn = min(cluster.turn_tokens.mean if cluster.turn_tokens else inf, event.sampling.max_new_tokens)
    own = min(row.response, turns * in_turn)  # the environment has written the rest
    conversations = ShardConversations(
        rows, slots, min(live_conversations(slots, event.waiting), rows), event.waiting, limits.max_turns,
        row.prompt + row.response - own, own, cluster.turns, cluster.tool_seconds, cluster.reset_seconds,
        cluster.turn_tokens, event.sampling.max_new_tokens, machine.environments())
    costs_of_passes = PassCosts(decode, prefill, lambda tokens: machine.host(kept * tokens))
    seconds, computed = conversation_seconds(conversations, costs_of_passes)
    images = machine.tower(stages[0].shard, rows * of_a_prompt(world, row))  # once for each conversation
    seconds, computed = seconds + images, computed + images
    return DecodeTime(seconds, computed / seconds) if seconds else DecodeTime(0.0)


def engine_room(cluster: Cluster, model: Model, layout: Layout) -> float:
    """Tokens that the KV cache of a serving engine has room for next to the weights, at the stage with the least; at
    most 0 where not even the weights fit."""
    rooms = []
    for s in (build_shard(model, layout, stage) for stage in range(layout.pp)):
        left, each = cluster.cache_gb * 1e9 - s.weight_bytes, s.layers * s.cache * s.item * s.attending
        rooms.append(left / each if each else inf if left > 0 else 0.0)
    return min(rooms)


def _served_time(world: World, event: Generate, stage: Stage) -> DecodeTime:
    """A serving engine on the ranks of one dp rank. Before, it gets the new weights."""
    layout, cluster = world.layouts[event.layout], world.cluster
    one_shot = not cluster.decode_reduce_ranks or layout.tp <= cluster.decode_reduce_ranks
    if cluster.decode_reduce_us and layout.tp > 1 and one_shot:
        cluster = replace(cluster, reduce_us=cluster.decode_reduce_us / ceil(log2(layout.tp)))
    machine = replace(world.machine, cluster=cluster)
    stage = replace(stage, machine=machine)
    rows, row = world.rows(world.spreads[event.spread], event.frame), world.row(event.frame)
    held = [replace(stage, shard=build_shard(world.models[event.model], layout, s)) for s in range(layout.pp)]
    free = engine_room(cluster, world.models[event.model], layout)

    def step(count: float, cached: float) -> float:
        seconds = cluster.decode_us * 1e-6 + cluster.decode_row_us * 1e-6 * count
        for x in held:
            s = x.shard
            one = WorkCounts(1, s.layers, s.layers * count, s.layers * cached * s.attending, count * s.last)
            seconds += machine.decode(s, one, captured=True) + x.links(count, s.layers) + x.logits_gather(count)
        return seconds + (layout.pp - 1) * machine.message(stage.hidden_bytes(count), stage.groups.crosses["pp"])

    def prefill(tokens: float) -> float:
        number = tokens / max(row.prompt, 1.0)
        return sum(machine.forward(x.shard, count_micro_batch(x.shard, number, Row(row.prompt, 0.0, 0.0), 1.0,
                                                                images=number * of_a_prompt(world, row)),
                                   x.links(tokens, x.shard.layers)) for x in held)

    if not rows:
        return DecodeTime(0.0)
    key = (event.id, rows, stage.groups.crosses.get("tp"), stage.groups.crosses.get("ep"), stage.groups.crosses["pp"])
    if key not in world.served:  # the same for every class of ranks
        world.served[key] = serve(row, rows, world.count(event.frame), max(free, 1.0), step, prefill,
                                  max(event.sampling.n, 1)).seconds
    return DecodeTime(world.served[key] + _new_weights(world, world.models[event.model]))


def _new_weights(world: World, model: Model) -> float:
    """Seconds until an engine has the new weights of a model and is awake."""
    if not model.train_layout:
        return 0.0
    size = sum(max(s.layers, 1) * prod(s.shape) * parameter_size(s, itemsize(model)) for s in model.params)
    rate = 0.0 if world.lag else world.cluster.sync_gb_s * 1e9  # with a lag other ranks send them: a reallocation
    return world.cluster.sync_s + (size / rate if rate else 0.0)


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
    key = _micro_batch_key(event, stage, layout, rows / count)
    if key not in world.plain_passes:
        world.plain_passes[key] = _forward_pass(world, event, stage, rows / count)
    seconds, message = world.plain_passes[key]
    return StagePasses(count, ((seconds, 0.0),), message)


def _micro_batch_key(event: Infer | Train, stage: Stage, layout: Layout, rows: float) -> Hashable:
    """What the passes of a micro-batch of an event depend on, which `dp` and `zero` do not change. rows: of it."""
    degrees = layout.tp, layout.pp, layout.cp, layout.ep, layout.vpp
    crosses = [stage.groups.crosses.get(axis) for axis in ("tp", "cp", "ep")]
    return "micro-batch", event.id, rows, degrees, stage.rank_class, *crosses


def _forward_pass(world: World, event: Infer, stage: Stage, rows: float) -> tuple[float, float]:
    """(seconds of a micro-batch of `rows` rows, bytes of a message to a neighboring stage)."""
    layout, row = world.layouts[event.layout], world.row(event.frame)
    responses = 1.0 if OUTPUTS[event.output_name].level == "seq" else row.response
    prompts = computed_prompts(world, event, (event.frame,), rows)
    one = count_micro_batch(stage.shard, rows, row, responses, layout.cp, prompts,
                            image_tokens(world, event, (event.frame,), rows))
    tokens = rows * (row.tokens - (1 - prompts) * row.prompt) / layout.cp
    links = (stage.tensor_parallel(tokens, one.outputs, stage.shard.layers)
             + stage.context_parallel(tokens, stage.shard.layers) + stage.expert_parallel(tokens, stage.shard.layers))
    return world.machine.forward(stage.shard, one, links), stage.hidden_bytes(tokens)


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
    of_leaves = spread.leaves > 0 and layout.zero > 0  # with `zero`, leaves may have separate passes
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
               each[0].log_std)
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
    key = event.recompute, _micro_batch_key(event, stage, layout, rows / count)
    if key not in world.plain_passes:
        world.plain_passes[key] = _both_passes(world, event, stage, rows / count)
    one: PlainPasses = world.plain_passes[key]
    return PlainPasses(count, one.durations, one.shares, one.message, leaves)


def _both_passes(world: World, event: Train, stage: Stage, rows: float) -> PlainPasses:
    """Those of one micro-batch of `rows` rows of each frame."""
    layout, each = world.layouts[event.layout], [world.row(f) for f in event.frames]
    by_seq = all(OUTPUTS[what].level == "seq" for _, _, what in event.model_outputs)
    prompts = computed_prompts(world, event, event.frames, rows)
    prompt, response = sum(r.prompt for r in each), sum(r.response for r in each)
    tokens = rows * (prompt + response - (1 - prompts) * prompt) / layout.cp
    images = image_tokens(world, event, event.frames, rows)
    operators = len(world.programs[event.loss].nodes)
    durations: list[tuple[float, float]] = []
    shares: list[float] = []
    for chunk in _stage_per_chunk(stage, layout):
        held = chunk.shard
        parts = [count_micro_batch(held, rows, row, 1.0 if by_seq else row.response, layout.cp, prompts)
                 for row in each]
        one = WorkCounts(1, held.layers, sum(p.tokens for p in parts), sum(p.pairs for p in parts),
                         sum(p.outputs for p in parts), images)
        comm = (chunk.tensor_parallel(tokens, one.outputs, held.layers, sequence_parallel=True)
                + chunk.context_parallel(tokens, held.layers))
        comm += chunk.expert_parallel(tokens, held.layers)
        recomputed = (chunk.tensor_parallel(tokens, 0, held.layers, sequence_parallel=True)
                      + chunk.expert_parallel(tokens, held.layers) if event.recompute == "full" else 0.0)
        forward, backward = world.machine.train(held, one, event.recompute == "full", comm, recomputed)
        loss = world.machine.compute(operators, one.outputs) if held.last else 0.0
        durations.append((forward + loss, backward + 2 * loss))
        shares.append(held.layers / max(stage.shard.layers, 1))
    return PlainPasses(1, tuple(durations), tuple(shares), stage.hidden_bytes(tokens))


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
