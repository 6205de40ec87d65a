"""The acts of a class in a call: generate, infer, train, with the schedule of the backend's pipeline.

In: an event, a class, the world. Out: acts. `key` tells this execution of the event from all others.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import ceil

from rldsl.plan.boxes import itemsize
from rldsl.plan.events import Generate, Infer, Train
from rldsl.simulate.classes import Groups
from rldsl.simulate.cost import Counts, Shard, decode, decoding, micro, micro_batches, prefill, shard
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

    def hidden(self, tokens: float) -> float:
        """Bytes of hidden states."""
        return tokens * self.shard.model.sizes.hidden * self.shard.item

    def divided(self, tokens: float, outputs: float, layers: float, apart: bool = False) -> float:
        """Seconds of the collectives of tensor parallelism in one direction of a pass: after attention and after the
        feed-forward of each layer, after the embedding, and about the normaliser of the log-probabilities. apart:
        hidden states are divided by tokens between them, so that a sum is a scatter and a gather: as many bytes, in
        two goes."""
        if self.shard.tp == 1:
            return 0.0
        whole = (2 * layers + self.shard.first) * self.all_reduce("tp", self.hidden(tokens))
        twice = 2 * layers * self.all_reduce("tp", 0.0) if apart else 0.0
        return whole + twice + (2 * self.all_reduce("tp", outputs * 8) if outputs and self.shard.last else 0.0)

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
    """Every rank of a shard goes through every token: stage after stage, then the choice back to all."""
    me, layout = stage(world, event.model, event.layout, c, key), world.layouts[event.layout]
    rows, row = world.rows(world.spreads[event.spread], event.frame), world.row(event.frame)
    d, machine = decoding(event, rows, row), world.machine
    own = total = 0.0
    for s in range(layout.pp):
        held = shard(world.models[event.model], layout, s)
        first, rest = prefill(held, d, row), decode(held, d)
        at = Stage(c, me.groups, held, machine, key)
        seconds = (machine.forward(held, first) + machine.decode(held, rest)
                   + d.waves * (at.divided(d.slots * row.prompt, 0, held.layers)
                                + at.experts(d.slots * row.prompt, held.layers))
                   + d.steps * (at.divided(d.active, 0, held.layers) + at.experts(d.active, held.layers)))
        if held.last and held.tp > 1:
            seconds += (d.steps + d.waves) * machine.all_gather(d.active * 4 * held.head / max(
                held.model.sizes.hidden, 1), held.tp, me.groups.crosses["tp"])
        total += seconds
        own = seconds if s == me.groups.stage else own
    if layout.pp > 1:
        each = (layout.pp - 1) * machine.message(me.hidden(d.active), me.groups.crosses["pp"]) + 2 * me.all_reduce(
            "pp", 12 * d.active)
        total += (d.steps + d.waves) * each
    if not total:
        return []
    parties = me.groups.members["shard"]
    return [*meet((key, "shard", parties), parties, 0.0), *me.together("ep", "start", 0.0), Run(total, own / total)]


def infer(world: World, event: Infer, c: int, key: Hashable) -> list[Act]:
    me, layout = stage(world, event.model, event.layout, c, key), world.layouts[event.layout]
    rows, row = world.rows(world.spreads[event.spread], event.frame), world.row(event.frame)
    count = micro_batches(rows, event.mbs, layout.pp)
    if not count:
        return []
    one = micro(me.shard, rows / count, row, 1.0 if event.what == "scores" else row.response, layout.cp)
    tokens = rows / count * row.tokens / layout.cp
    seconds = (world.machine.forward(me.shard, one) + me.divided(tokens, one.outputs, me.shard.layers)
               + me.context(tokens, me.shard.layers) + me.experts(tokens, me.shard.layers))
    acts: list[Act] = []
    sent: list[Hashable] = []
    for i in range(count):
        if not me.shard.first:
            post, key_in = me.over(i, "before", me.hidden(tokens))
            acts += [post, Wait(key_in)]
        acts += [*me.together("tp", i, 0.0), *me.together("ep", i, 0.0), Run(seconds)]
        if not me.shard.last:
            post, key_out = me.over(i, "next", me.hidden(tokens))
            acts.append(post)
            sent.append(key_out)
    acts += [Wait(k) for k in sent]
    return [*acts, *me.together("pp", "result", me.all_reduce("pp", 4 * rows * row.response))]


def train(world: World, event: Train, c: int, key: Hashable) -> list[Act]:
    """Every minibatch: micro-batches through the pipeline, reductions, one optimizer step; then the metrics."""
    me = stage(world, event.model, event.layout, c, key)
    layout, spread = world.layouts[event.layout], world.spreads[event.spread]
    rows = ceil(world.frames[event.frames[0]].count / spread.minibatches / layout.dp)
    count = micro_batches(rows, event.mbs, layout.pp)
    if not count:
        return []
    scores = all(what == "scores" for _, _, what in event.fresh)
    parts = [micro(me.shard, rows / count, world.row(f), 1.0 if scores else world.row(f).response, layout.cp)
             for f in event.frames]
    one = Counts(1, me.shard.layers, *(sum(getattr(p, n) for p in parts) for n in ("tokens", "pairs", "outputs")))
    tokens = sum(rows / count * world.row(f).tokens for f in event.frames) / layout.cp
    ahead, back = world.machine.train(me.shard, one, event.recompute == "full")
    comm = me.divided(tokens, one.outputs, me.shard.layers, apart=True) + me.context(tokens, me.shard.layers)
    comm += me.experts(tokens, me.shard.layers)
    again = (me.divided(tokens, 0, me.shard.layers, apart=True) + me.experts(tokens, me.shard.layers)
             if event.recompute == "full" else 0.0)
    come, go = _gathered(me, layout.zero >= 3), _gathered(me, layout.zero >= 2)  # parameters and gradients, by layers
    operators = len(world.programs[event.loss].nodes)
    loss = world.machine.compute(operators, one.outputs) if me.shard.last else 0.0
    beside = world.machine.beside
    acts: list[Act] = []
    for m in range(spread.minibatches * spread.epochs):
        step = Stage(c, me.groups, me.shard, me.machine, (key, m))
        acts += one_f_one_b(step, count, beside(ahead + comm + loss, come),
                            beside(back + comm + again + 2 * loss, come + go), me.hidden(tokens))
        acts += _reduce(step, layout.zero)
        acts.append(Run(world.machine.update(me.shard, layout.dp if layout.zero else 1)))
    return [*acts, *me.together("mesh", "metrics", 2 * me.all_reduce("mesh", 64))]


def one_f_one_b(me: Stage, count: int, ahead: float, back: float, moved: float) -> list[Act]:
    """The order of `backends/torch/pipeline.py`: run ahead by the distance from the end, then one forward, one
    backward. Sends are posted beside the receive that is waited for, and themselves waited for at the end."""
    first, last = me.shard.first, me.shard.last
    warm = min(len(me.line) - 1 - me.groups.stage, count)
    acts: list[Act] = []
    sent: list[Hashable] = []

    def run(i: int) -> None:
        acts.extend([*me.together("tp", ("ahead", i), 0.0), *me.together("ep", ("ahead", i), 0.0), Run(ahead)])

    def back_run(i: int) -> None:
        acts.extend([*me.together("tp", ("back", i), 0.0), *me.together("ep", ("back", i), 0.0), Run(back)])

    def exchange(send: tuple[int, str] | None = None, receive: tuple[int, str] | None = None) -> None:
        """(message number, way): activations have even numbers, their slopes odd ones."""
        wait: Hashable = None
        for message, sends in ((send, True), (receive, False)):
            if message is not None:
                post, key = me.over(*message, moved)
                acts.append(post)
                if sends:
                    sent.append(key)
                else:
                    wait = key
        if receive is not None:
            acts.append(Wait(wait))

    def take(i: int) -> tuple[int, str] | None:
        return None if first or i >= count else (2 * i, "before")

    def give(i: int) -> tuple[int, str] | None:
        return None if last else (2 * i, "next")

    def slope(i: int) -> tuple[int, str] | None:
        return None if last else (2 * i + 1, "next")

    def send_back(i: int) -> tuple[int, str] | None:
        return None if first else (2 * i + 1, "before")

    for i in range(warm):
        exchange(receive=take(i))
        run(i)
        exchange(send=give(i))
    exchange(receive=take(warm))
    for i in range(warm, count):
        run(i)
        exchange(send=give(i), receive=slope(i - warm))
        back_run(i - warm)
        exchange(send=send_back(i - warm), receive=take(i + 1))
    for i in range(count - warm, count):
        exchange(receive=slope(i))
        back_run(i)
        exchange(send=send_back(i))
    return [*acts, *(Wait(k) for k in sent)]


def _gathered(me: Stage, wanted: bool) -> float:
    """Seconds of a gather or a scatter of the shard's parameters over dp."""
    size = me.groups.sizes["dp"]
    if not wanted:
        return 0.0
    common = me.machine.all_gather(4 * (me.shard.trained - me.shard.apart) / size, size, me.groups.crosses["dp"])
    copies = me.groups.sizes.get("copies", 1)
    return common + me.machine.all_gather(4 * me.shard.apart / copies, copies, me.groups.crosses.get("copies", False))


def _reduce(me: Stage, zero: int) -> list[Act]:
    """Gradients: tied embeddings over the ends of the pipeline, all over cp and dp; then the norm over the mesh. With
    `zero` parameters are gathered again after the update: a sum is a scatter and a gather, so 1 costs what 0 does."""
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
        acts += me.together("dp", "gradients", {2: _gathered(me, True), 3: 0.0}.get(zero, common))
    if me.groups.sizes["mesh"] > 1:
        acts += me.together("mesh", "norm", me.all_reduce("mesh", 8))
    return acts
