"""The acts of a class in a call: generate, infer, train, with the schedule of the backend's pipeline.

In: an event, a class, the world. Out: acts. `key` tells this execution of the event from all others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from rldsl.plan.events import Generate, Infer, Train
from rldsl.plan.model import Layout
from rldsl.sharding.boxes import itemsize
from rldsl.sharding.layout import stage_layers
from rldsl.sharding.partition import micro_batch_count
from rldsl.sharding.pipeline_schedule import Exchange, Message, Pass, actions
from rldsl.simulate.classes import Groups
from rldsl.simulate.cost import Counts, Shard, decode, decoding, micro, prefill, shard
from rldsl.simulate.engine import Act, Post, Run, Wait
from rldsl.simulate.times import Machine
from rldsl.simulate.world import World, meet


@dataclass(frozen=True, slots=True)
class Stage:
    """A class at its place under the layout of a call."""

    c: int
    groups: Groups
    shard: Shard
    machine: Machine
    key: Hashable

    @property
    def line(self) -> tuple[int, ...]:
        """The classes of its pipeline, by stage."""
        return self.groups.members["pp"]

    def together(self, axis: str, name: Hashable, seconds: float) -> list[Act]:
        parties = self.groups.members.get(axis, ())
        return meet((self.key, axis, parties, name), parties, seconds)

    def all_reduce(self, axis: str, moved: float) -> float:
        return self.machine.all_reduce(moved, self.groups.sizes[axis], self.groups.crosses[axis])

    @property
    def resting(self) -> float:
        """Elements that an optimizer step of this rank changes under `zero`: experts are divided over those alone that
        hold the same."""
        s, sizes = self.shard, self.groups.sizes
        return (s.trained - s.apart) / sizes["dp"] + s.apart / sizes.get("copies", 1)

    def over_dp(self, collective: Callable[[float, int, bool], float], item: int, elements: float,
                apart: float = 0.0) -> float:
        """Seconds of a gather or a scatter of so many elements over dp, and of experts over those that hold the same.
        item: bytes of one."""
        size, copies, crosses = self.groups.sizes["dp"], self.groups.sizes.get("copies", 1), self.groups.crosses
        return collective(item * elements / size, size, crosses["dp"]) + collective(
            item * apart / copies, copies, crosses.get("copies", False))

    def hidden(self, tokens: float) -> float:
        """Bytes of hidden states."""
        return tokens * self.shard.model.sizes.hidden * self.shard.item

    def divided(self, tokens: float, outputs: float, layers: float, apart: bool = False) -> float:
        """Seconds of the collectives of tensor parallelism in one direction of a pass: after attention and after the
        feed-forward of each layer, after the embedding, and about the normaliser of the log-probabilities. apart: with
        sequence parallelism each all-reduce of a layer is a reduce-scatter and an all-gather of the same bytes."""
        if self.shard.tp == 1:
            return 0.0
        moved, size, crosses = self.hidden(tokens), self.groups.sizes["tp"], self.groups.crosses["tp"]
        whole = self.all_reduce("tp", moved)
        each = sum(way(moved / size, size, crosses) for way in (self.machine.all_gather, self.machine.reduce_scatter)
                   ) if apart else whole
        ends = 2 * self.all_reduce("tp", outputs * 8) if outputs and self.shard.last else 0.0
        return 2 * layers * each + self.shard.first * whole + ends

    def context(self, tokens: float, layers: float, ways: int = 1) -> float:
        """Seconds in which the ranks of a cp group tell each other keys and values. tokens: of this rank."""
        kept = tokens * self.shard.cache * self.shard.item
        return ways * layers * self.machine.all_gather(kept, self.groups.sizes["cp"], self.groups.crosses["cp"])

    def experts(self, tokens: float, layers: float, ways: int = 1) -> float:
        """Seconds in which tokens travel to the ranks of their experts and back. tokens: of this rank."""
        size, sizes = self.groups.sizes.get("ep", 1), self.shard.model.sizes
        if size == 1 or not self.shard.mixed:
            return 0.0
        moved = tokens * max(sizes.chosen, 1) * sizes.hidden * itemsize(self.shard.model)
        return 2 * ways * layers * self.machine.all_to_all(moved, size, self.groups.crosses["ep"])

    def message(self, found: Message, wanting: int, moved: float) -> tuple[Act, Hashable]:
        """Ready for a message of a minibatch, which the rank `wanting` along pp is to have."""
        pair = tuple(sorted((self.line[self.groups.stage], self.line[found.peer])))
        key = (self.key, "pp", pair, wanting, found.wanted)
        return Post(key, pair, self.machine.message(moved, self.groups.crosses["pp"]), 1.0), key

    def over(self, i: int, way: str, moved: float) -> tuple[Act, Hashable]:
        """Ready for the message number `i` between this stage and the next ("next") or the one before ("before")."""
        s = self.groups.stage
        pair = (self.line[s], self.line[s + 1]) if way == "next" else (self.line[s - 1], self.line[s])
        key = (self.key, "pp", pair, i)
        return Post(key, pair, self.machine.message(moved, self.groups.crosses["pp"]), 1.0), key


def stage(world: World, model: str, layout: str, c: int, key: Hashable) -> Stage:
    own = world.groups[layout][c]
    return Stage(c, own, shard(world.models[model], world.layouts[layout], own.stage), world.machine, key)


def generate(world: World, event: Generate, c: int, key: Hashable) -> list[Act]:
    """Every rank of a shard goes through every token. A pipeline has a lane of sequences for each stage
    (`backends/torch/generate/clock_ticks.py`): all stages work at the same time, and between two moments they
    exchange."""
    me, layout = stage(world, event.model, event.layout, c, key), world.layouts[event.layout]
    rows, row = world.rows(world.spreads[event.spread], event.frame), world.row(event.frame)
    d, machine = decoding(event, rows, row, layout.pp), world.machine
    own = longest = 0.0
    for s in range(layout.pp):
        held = shard(world.models[event.model], layout, s)
        first, rest = prefill(held, d, row), decode(held, d)
        at = Stage(c, me.groups, held, machine, key)
        fresh = d.fresh * row.prompt
        seconds = (machine.forward(held, first) + machine.decode(held, rest)
                   + machine.start(held, d.shapes)
                   + d.waves * (at.divided(fresh, 0, held.layers) + at.experts(fresh, held.layers))
                   + d.steps * (at.divided(d.active, 0, held.layers) + at.experts(d.active, held.layers)))
        if held.last and held.tp > 1:
            seconds += (d.steps + d.waves) * machine.all_gather(d.active * 4 * held.head / max(
                held.model.sizes.hidden, 1), held.tp, me.groups.crosses["tp"])
        longest = max(longest, seconds)
        own = seconds if s == me.groups.stage else own
    total = longest
    if layout.pp > 1:  # hidden states to the next stage, and tokens and log-probs back to all
        moments = d.steps + d.waves + layout.pp - 1
        total += moments * machine.message(me.hidden(d.active) + 16 * d.active, me.groups.crosses["pp"])
        total += longest * (layout.pp - 1) / max(d.steps + d.waves, 1.0)
    if not total:
        return []
    parties = me.groups.members["shard"]
    return [*meet((key, "shard", parties), parties, 0.0), *me.together("ep", "start", 0.0), Run(total, own / total)]


def _micro_batches(event: Infer | Train, rows: int, tokens: float, at_least: int) -> int:
    """Micro-batches of a shard. tokens: of a row."""
    count = micro_batch_count(rows, event.mbs, at_least)
    return min(rows, max(count, ceil(rows * tokens / event.mbt))) if event.mbt else count


@dataclass(frozen=True, slots=True)
class Passes:
    """Of a stage in a pipeline: how many micro-batches there are, (forward, backward) seconds of one for each chunk of
    layers, and bytes of a message to a neighbour."""

    count: int
    durations: tuple[tuple[float, float], ...]
    message: float


def forward(world: World, event: Infer, me: Stage) -> Passes:
    """An inference call; a backward pass takes nothing."""
    layout = world.layouts[event.layout]
    rows, row = world.rows(world.spreads[event.spread], event.frame), world.row(event.frame)
    count = _micro_batches(event, rows, row.tokens, layout.pp)
    if not count:
        return Passes(0, (), 0.0)
    one = micro(me.shard, rows / count, row, 1.0 if event.what == "scores" else row.response, layout.cp)
    tokens = rows / count * row.tokens / layout.cp
    seconds = (world.machine.forward(me.shard, one) + me.divided(tokens, one.outputs, me.shard.layers)
               + me.context(tokens, me.shard.layers) + me.experts(tokens, me.shard.layers))
    return Passes(count, ((seconds, 0.0),), me.hidden(tokens))


def result(world: World, event: Infer, me: Stage) -> float:
    """Seconds in which the last stage tells all others what it found."""
    rows, row = world.rows(world.spreads[event.spread], event.frame), world.row(event.frame)
    return me.all_reduce("pp", 4 * rows * row.response)


def infer(world: World, event: Infer, c: int, key: Hashable) -> list[Act]:
    me = stage(world, event.model, event.layout, c, key)
    found = forward(world, event, me)
    acts: list[Act] = []
    sent: list[Hashable] = []
    for i in range(found.count):
        if not me.shard.first:
            post, key_in = me.over(i, "before", found.message)
            acts += [post, Wait(key_in)]
        acts += [*me.together("tp", i, 0.0), *me.together("ep", i, 0.0), Run(found.durations[0][0])]
        if not me.shard.last:
            post, key_out = me.over(i, "next", found.message)
            acts.append(post)
            sent.append(key_out)
    acts += [Wait(k) for k in sent]
    return [*acts, *me.together("pp", "result", result(world, event, me))] if found.count else []


def minibatch(world: World, event: Train, me: Stage) -> Passes:
    """The passes of a minibatch of training."""
    layout, spread = world.layouts[event.layout], world.spreads[event.spread]
    rows = ceil(world.frames[event.frames[0]].count / spread.minibatches / layout.dp)
    count = _micro_batches(event, rows, sum(world.row(f).tokens for f in event.frames), layout.pp)
    if not count:
        return Passes(0, (), 0.0)
    scores = all(what == "scores" for _, _, what in event.fresh)
    tokens = sum(rows / count * world.row(f).tokens for f in event.frames) / layout.cp
    operators = len(world.programs[event.loss].nodes)
    durations: list[tuple[float, float]] = []
    for chunk in _chunks(me, layout):
        held = chunk.shard
        parts = [micro(held, rows / count, world.row(f), 1.0 if scores else world.row(f).response, layout.cp)
                 for f in event.frames]
        one = Counts(1, held.layers, *(sum(getattr(p, n) for p in parts) for n in ("tokens", "pairs", "outputs")))
        ahead, back = world.machine.train(held, one, event.recompute == "full")
        comm = chunk.divided(tokens, one.outputs, held.layers, apart=True) + chunk.context(tokens, held.layers)
        comm += chunk.experts(tokens, held.layers)
        again = (chunk.divided(tokens, 0, held.layers, apart=True) + chunk.experts(tokens, held.layers)
                 if event.recompute == "full" else 0.0)
        share = held.layers / max(me.shard.layers, 1)  # of parameters and gradients, which come and go by layers
        come = share * _gathered(me) if layout.zero >= 3 else 0.0
        go = _scattered(me, share) if layout.zero >= 2 else 0.0
        loss = world.machine.compute(operators, one.outputs) if held.last else 0.0
        beside = world.machine.beside
        durations.append((beside(ahead + comm + loss, come), beside(back + comm + again + 2 * loss, come + go)))
    return Passes(count, tuple(durations), me.hidden(tokens))


def closing(me: Stage, zero: int) -> list[Act]:
    """What a minibatch ends with: reductions, and one optimizer step."""
    return [*_reduce(me, zero), Run(me.machine.update(me.shard, me.resting if zero else me.shard.trained))]


def told(me: Stage) -> float:
    """Seconds in which all ranks of the mesh add up the metrics of a train call."""
    return 2 * me.all_reduce("mesh", 64)


def train(world: World, event: Train, c: int, key: Hashable) -> list[Act]:
    """Every minibatch: micro-batches through the pipeline, reductions, one optimizer step; then the metrics."""
    me = stage(world, event.model, event.layout, c, key)
    layout, spread = world.layouts[event.layout], world.spreads[event.spread]
    found = minibatch(world, event, me)
    acts: list[Act] = []
    for m in range(spread.minibatches * spread.epochs if found.count else 0):
        step = Stage(c, me.groups, me.shard, me.machine, (key, m))
        acts += pipelined(step, found.count, found.durations, found.message)
        acts += closing(step, layout.zero)
    return [*acts, *me.together("mesh", "metrics", told(me))] if found.count else []


def _chunks(me: Stage, layout: Layout) -> list[Stage]:
    """One for each chunk of layers: the shard with these alone."""
    if layout.vpp == 1:
        return [me]
    found, s, number = [], me.shard, layout.pp * layout.vpp
    for at in range(me.groups.stage, number, layout.pp):
        last = at == number - 1
        held = replace(s, layers=len(stage_layers(s.model.layers, number, at)), first=at == 0, last=last,
                       head=s.head if last else 0)
        found.append(replace(me, shard=held))
    return found


def pipelined(me: Stage, count: int, durations: Sequence[tuple[float, float]], moved: float) -> list[Act]:
    """A minibatch as `backends/torch/train/pipeline.py` runs it. durations: of a forward and of a backward pass, for
    each chunk. What comes is waited for by the pass that needs it, what goes before the next exchange."""
    acts: list[Act] = []
    sent: list[Hashable] = []
    arriving: dict[Pass, Hashable] = {}
    here = me.groups.stage
    for action in actions(len(me.line), len(durations), count)[here]:
        if isinstance(action, Exchange):
            acts += [Wait(key) for key in sent]
            sent.clear()
            for message in action.sends:
                post, key = me.message(message, message.peer, moved)
                acts.append(post)
                sent.append(key)
            for message in action.takes:
                post, arriving[message.wanted] = me.message(message, here, moved)
                acts.append(post)
            continue
        if action in arriving:
            acts.append(Wait(arriving.pop(action)))
        way = ("back" if action.backward else "ahead", action.chunk, action.micro)
        acts += [*me.together("tp", way, 0.0), *me.together("ep", way, 0.0),
                 Run(durations[action.chunk][action.backward])]
    return [*acts, *(Wait(key) for key in sent)]


def _gathered(me: Stage) -> float:
    """Seconds in which the layers become whole, in the dtype in which they multiply."""
    s = me.shard
    return me.over_dp(me.machine.all_gather, itemsize(s.model), s.trained - s.rest - s.apart, s.apart)


def _scattered(me: Stage, share: float) -> float:
    """Seconds in which gradients are summed and divided, in float32: of a share of the layers, and of what belongs to
    none."""
    s = me.shard
    return me.over_dp(me.machine.reduce_scatter, 4, share * (s.trained - s.rest - s.apart) + s.rest, share * s.apart)


def _reduce(me: Stage, zero: int) -> list[Act]:
    """Gradients: tied embeddings over the ends of the pipeline, all over cp and dp; then the norm over the mesh. With
    `zero` what belongs to no layer becomes whole once a minibatch in float32, and so do layers but for 3, which gathers
    them in each pass; gradients are divided here with 1 alone."""
    acts: list[Act] = []
    model = me.shard.model
    tied = next((s for s in model.params if s.stage == "ends"), None)
    if tied is not None and me.groups.sizes["pp"] > 1:
        size = 4 * model.sizes.vocab * model.sizes.hidden / me.shard.tp
        acts += me.together("pp", "tied", me.all_reduce("pp", size))
    if me.groups.sizes["cp"] > 1:
        acts += me.together("cp", "gradients", me.all_reduce("cp", 4 * me.shard.trained))
    if me.groups.sizes["dp"] > 1:
        common = me.all_reduce("dp", 4 * (me.shard.trained - me.shard.apart))
        if me.groups.sizes.get("copies", 1) > 1:
            common += me.all_reduce("copies", 4 * me.shard.apart)
        if zero:
            common = me.over_dp(me.machine.all_gather, 4, me.shard.rest) + (_gathered(me) if zero < 3 else 0.0)
            common += _scattered(me, 1.0) if zero == 1 else 0.0
        acts += me.together("dp", "gradients", common)
    if me.groups.sizes["mesh"] > 1:
        acts += me.together("mesh", "norm", me.all_reduce("mesh", 8))
    return acts
