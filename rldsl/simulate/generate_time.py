"""How long a `generate` takes in the torch backend, with conversations, and in a serving engine.

In: the event, a stage, the plan on a cluster with its expected lengths. Out: a `DecodeTime`.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf, log2, prod

from rldsl.clusters import Cluster
from rldsl.memory.decode_shapes import live_conversations
from rldsl.plan.events import Generate
from rldsl.plan.model import Layout, Model
from rldsl.sharding.boxes import itemsize
from rldsl.sharding.dtypes import parameter_size
from rldsl.simulate.conversations import PassCosts, ShardConversations, conversation_seconds
from rldsl.simulate.lengths import Row
from rldsl.simulate.serving_engine import serve
from rldsl.simulate.shared_prompts import of_a_prompt
from rldsl.simulate.stage import DecodeTime, Stage
from rldsl.simulate.work_counts import (
    WorkCounts,
    build_shard,
    count_decode,
    count_micro_batch,
    count_prefill,
    plan_decoding,
)
from rldsl.simulate.world import World


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


def _conversation_time(world: World, event: Generate, stage: Stage, rows: int, row: Row) -> DecodeTime:
    """Conversations: all stages work on passes of their own, so a token for each takes as long as the slowest stage
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
            machine.forward(s.shard, WorkCounts(1, s.shard.layers, tokens * s.shard.layers,
                                                tokens * s.shard.layers * width * s.shard.attending,
                                                of * s.shard.last))
            + at(s, tokens, of) + hop(s.hidden_bytes(tokens)) for s in stages)

    rows = -(-rows // limits.branches)  # conversations
    slots = min(rows, event.mbs or rows)
    kept = stage.shard.layers * stage.shard.cache * stage.shard.item * stage.shard.attending
    conversations = ShardConversations(
        rows, slots, min(live_conversations(slots, event.waiting), rows), event.waiting, limits.max_turns, row.prompt,
        row.response, cluster.turns, cluster.tool_seconds)
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
