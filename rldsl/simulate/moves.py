"""The acts of a class in a transfer or a realloc: posted where the event stands, waited for where they are needed.

In: an event, a class, the world. Out: the acts at the event, the messages that are under way afterwards, and the
seconds of putting what has come into its place. Who sends how much is expected, not worked out row by row or box by
box: rows lie anywhere on the source's shards, and senders of equal boxes send equal parts (`plan/movement.py` sees to
that).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache

from rldsl.plan.boxes import Box, Cell, cell, intersect, pieces_at, volume
from rldsl.plan.events import Realloc, Transfer
from rldsl.plan.layout import stage_layers
from rldsl.plan.model import Layout, ParamSpec
from rldsl.plan.movement import carried
from rldsl.simulate.engine import Act, Post, Run
from rldsl.simulate.world import World

BYTES = {"f32": 4, "i64": 8, "bool": 1, "text": 0}


@dataclass(frozen=True, slots=True)
class Issued:
    """keys: of the messages that this class takes part in. after: seconds of work once they have arrived."""

    acts: list[Act]
    keys: tuple[Hashable, ...]
    after: float = 0.0


def transfer(world: World, event: Transfer, value: str, c: int, key: Hashable) -> Issued:
    """One value of the event."""
    src, dst, record = world.spreads[event.src], world.spreads[event.dst], world.values[value]
    givers, takers = world.on(src.mesh), world.on(dst.mesh)
    size = 8 if record.level == "batch" else BYTES[record.dtype]
    held = (1.0 if record.level == "batch" or src.unit == "all" else 1 / world.dp(src))
    rows = world.rows(dst, record.frame) if record.frame else 1
    whole = world.entries(record, rows) * size
    needs = {d: whole * (1 - held if d in givers else 1.0) for d in takers}
    total = sum(need * world.classes.sizes[d] for d, need in needs.items())
    out = total / world.size(src.mesh)
    crosses = world.crosses(src.mesh, dst.mesh)
    sources = min(world.dp(src), rows)
    acts: list[Act] = [Run(world.machine.rows(rows if c in takers else 0) + world.machine.memory(
        2 * (out if c in givers else 0.0)))]
    keys: list[Hashable] = []
    for d, need in needs.items():
        if need > 0 and (c == d or c in givers):
            keys.append((key, value, d))
            seconds = sources * world.machine.latency(crosses) + world.machine.link(max(need, out), crosses)
            acts.append(Post(keys[-1], tuple(dict.fromkeys((d, *givers))), seconds, 1.0))
    return Issued(acts, tuple(keys), world.machine.memory(2 * needs.get(c, 0.0)))


def realloc(world: World, event: Realloc, c: int, key: Hashable) -> Issued:
    model, source = world.models[event.model], world.models[event.source or event.model]
    src, dst = world.layouts[event.src], world.layouts[event.dst]
    givers, takers = world.on(src.mesh), world.on(dst.mesh)
    item = {"float32": 4, "bfloat16": 2}[carried(source, src.id, model, dst.id, event.decay).dtype]
    needs = {d: _lacks(world, event, d) for d in takers}
    total = item * sum(sum(need) * world.classes.sizes[d] for d, need in needs.items())
    out = total / world.size(src.mesh)
    crosses = world.crosses(src.mesh, dst.mesh)
    acts: list[Act] = [Run(world.machine.memory(2 * (out if c in givers else 0.0)))]
    keys: list[Hashable] = []
    for d, (near, far) in needs.items():
        if near + far > 0 and (c == d or c in givers):
            keys.append((key, d))
            seconds = max(world.machine.link(item * near, False) + world.machine.link(item * far, True),
                          world.machine.link(out, crosses)) + world.machine.latency(crosses)
            acts.append(Post(keys[-1], tuple(dict.fromkeys((d, *givers))), seconds, 1.0))
    return Issued(acts, tuple(keys), world.machine.memory(2 * item * sum(needs.get(c, (0.0, 0.0)))))


def _lacks(world: World, event: Realloc, c: int) -> tuple[float, float]:
    """Elements that a rank of class `c` gets: from its own node, from others."""
    model, src, dst = world.models[event.model], world.layouts[event.src], world.layouts[event.dst]
    rank, per, mesh = world.classes.first[c], world.per_node, world.meshes[src.mesh]
    at, mine = cell(dst, world.meshes[dst.mesh], rank), cell(src, mesh, rank)
    assert at is not None
    beside = range(rank // per * per, rank // per * per + per)
    local = {found for r in beside if r != rank and (found := cell(src, mesh, r)) is not None and found != mine}
    near = far = 0.0
    for spec in model.params:
        wanted = _volume(spec, dst, at)
        for stage, layers in _stages(spec, model.layers, src, dst, at.stage).items():
            here = _common(spec, dst, at, src, mine) if mine is not None and mine.stage == stage else 0
            rest = wanted - here
            if rest > 0:
                boxes = {_boxes(spec, src, x): x for x in local if x.stage == stage}
                close = min(rest, sum(_common(spec, dst, at, src, x) for x in boxes.values()))
                near, far = near + layers * close, far + layers * (rest - close)
    return near, far


def _stages(spec: ParamSpec, layers: int, src: Layout, dst: Layout, stage: int) -> dict[int, int]:
    """Stage of the source -> how many parameters of the spec it holds that a stage of the destination wants."""
    if spec.stage == "layer":
        count = spec.layers or layers
        wanted = stage_layers(count, dst.pp, stage)
        held = {s: len(set(wanted).intersection(stage_layers(count, src.pp, s))) for s in range(src.pp)}
        return {s: n for s, n in held.items() if n}
    ends = {"first": (0,), "last": (dst.pp - 1,), "ends": (0, dst.pp - 1), "all": range(dst.pp)}[spec.stage]
    return {src.pp - 1 if spec.stage == "last" else 0: 1} if stage in ends else {}


def _boxes(spec: ParamSpec, layout: Layout, at: Cell) -> tuple[Box, ...]:
    return tuple(p.box for p in pieces_at(spec, layout, at.part, at.shard))


@cache
def _volume(spec: ParamSpec, layout: Layout, at: Cell) -> int:
    return sum(map(volume, _boxes(spec, layout, at)))


@cache
def _common(spec: ParamSpec, layout: Layout, at: Cell, other: Layout, of: Cell) -> int:
    """Elements that both of two places hold."""
    both = (intersect(a, b) for a in _boxes(spec, layout, at) for b in _boxes(spec, other, of))
    return sum(volume(box) for box in both if box is not None)
