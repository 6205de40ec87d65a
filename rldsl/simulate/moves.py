"""The ops of a class in a transfer or a realloc: posted where the event stands, waited for where they are needed.

In: an event, a class, the world. Out: the ops at the event, the messages that are under way afterwards, and the
seconds of putting what has come into its place. A transfer is expected, not worked out row by row: rows lie anywhere on
the source's shards. A realloc takes the paths that the runtime takes (`reshard/`), so rows of `zero`, runs of `ep`
and lines that nodes pass on cost what they cost there; the first rank of a class stands for it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rldsl.plan.events import Realloc, Transfer
from rldsl.reshard.rounds import num_buckets, num_rounds
from rldsl.sharding.dtypes import in_wire_dtype
from rldsl.simulate.engine import Compute, Isend, Op
from rldsl.simulate.traffic import Loads, Traffic
from rldsl.simulate.world import World

BYTES = {"f32": 4, "i64": 8, "bool": 1, "text": 0}


@dataclass(frozen=True, slots=True)
class Issued:
    """keys: of the messages that this class takes part in. after: seconds of work once they have arrived."""

    ops: list[Op]
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
    ops: list[Op] = [Compute(world.machine.rows(rows if c in takers else 0) + world.machine.memory(
        2 * (out if c in givers else 0.0)))]
    keys: list[Hashable] = []
    for d, need in needs.items():
        if need > 0 and (c == d or c in givers):
            keys.append((key, value, d))
            seconds = sources * world.machine.latency(crosses) + world.machine.link(max(need, out), crosses)
            ops.append(Isend(keys[-1], tuple(dict.fromkeys((d, *givers))), seconds, 1.0))
    return Issued(ops, tuple(keys), world.machine.memory(2 * needs.get(c, 0.0)))


def realloc(world: World, event: Realloc, c: int, key: Hashable) -> Issued:
    """Buckets follow each other: with B of them in R rounds the bytes of a rank take R / B of their time alone, since
    the ends of a tree wait for the first and the last."""
    machine, model = world.machine, world.models[event.model]
    source, src = world.models[event.source or event.model], world.layouts[event.src]
    givers = world.on(src.mesh)
    item = {"float32": 4, "bfloat16": 2}[in_wire_dtype(source, src.id, model, event.dst, event.decay).dtype]
    moved = moves(world, event)
    way = world.ways[event.model, event.src, event.dst]
    parts = num_buckets(way, item)
    rounds = num_rounds(way, parts)
    ops: list[Op] = [Compute(machine.memory(2 * item * moved[c].sent))]
    keys: list[Hashable] = []
    for d in world.on(world.layouts[event.dst].mesh):
        if moved[d].received > 0 and (c == d or c in givers):
            keys.append((key, d))
            parties = tuple(dict.fromkeys((d, *givers)))
            crosses = any(moved[p].crosses for p in parties)
            longest = max(moved[d].receiving(machine, item), *(moved[p].sending(machine, item) for p in parties))
            ops.append(Isend(keys[-1], parties, rounds * (machine.latency(crosses) + longest / parts), 1.0))
    return Issued(ops, tuple(keys), machine.memory(2 * item * moved[c].received))


def moves(world: World, event: Realloc) -> dict[int, Traffic]:
    """Class -> what a rank of it sends and receives, for the classes on the two layouts' meshes."""
    if event.id not in world.moved:
        way = world.ways[event.model, event.src, event.dst]
        there = (*world.on(world.layouts[event.src].mesh), *world.on(world.layouts[event.dst].mesh))
        loads = Loads.of(way)
        world.moved[event.id] = {c: loads.most(world.classes.ranks[c]) for c in dict.fromkeys(there)}
    return world.moved[event.id]
