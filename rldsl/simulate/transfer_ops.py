"""The ops of a class in a transfer or a reshard: posted at the event, waited for where the data are needed.

In: an event, a class, the world. Out: the ops at the event, the messages that are in flight afterwards, and the seconds
of unpacking them. A transfer is estimated and not computed row by row: rows may be on any dp rank of the source. A
reshard takes the plan of the runtime (`reshard/`), so that ZeRO shards, expert groups and forwarding inside nodes
cost what they cost there; the first rank of a class represents it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rldsl.memory.reshard_buffers import realloc_key
from rldsl.plan.events import Realloc, Transfer
from rldsl.reshard.rounds import num_buckets, num_rounds
from rldsl.sharding.boxes import itemsize
from rldsl.sharding.dtypes import in_wire_dtypes
from rldsl.simulate.engine import Compute, Isend, Op
from rldsl.simulate.traffic import Loads, Traffic
from rldsl.simulate.world import World

BYTES = {"f32": 4, "i64": 8, "bool": 1, "text": 0}


@dataclass(frozen=True, slots=True)
class PostedOps:
    """What a class does for one transfer or reshard."""

    ops: list[Op]  # at the event
    message_keys: tuple[Hashable, ...]  # of the messages that it takes part in, which arrive later
    unpack_seconds: float = 0.0  # of work once they have arrived


def transfer_ops(world: World, event: Transfer, value: str, c: int, key: Hashable) -> PostedOps:
    """One value of the event, for class `c`."""
    src, dst, record = world.spreads[event.src], world.spreads[event.dst], world.values[value]
    senders, receivers = world.on(src.mesh), world.on(dst.mesh)
    size = 8 if record.level == "batch" else BYTES[record.dtype]
    held = (1.0 if record.level == "batch" or src.granularity == "all" else 1 / world.dp(src))
    rows = world.rows(dst, record.frame) if record.frame else 1
    whole = world.entries(record, rows) * size
    needs = {d: whole * (1 - held if d in senders else 1.0) for d in receivers}  # bytes, by class
    total = sum(need * world.classes.sizes[d] for d, need in needs.items())
    sent = total / world.size(src.mesh)
    crosses = world.crosses(src.mesh, dst.mesh)
    sources = min(world.dp(src), rows)
    ops: list[Op] = [Compute(world.machine.rows(rows if c in receivers else 0) + world.machine.memory(
        2 * (sent if c in senders else 0.0)))]
    keys: list[Hashable] = []
    for d, need in needs.items():
        if need > 0 and (c == d or c in senders):
            keys.append((key, value, d))
            seconds = sources * world.machine.latency(crosses) + world.machine.link(max(need, sent), crosses)
            ops.append(Isend(keys[-1], tuple(dict.fromkeys((d, *senders))), seconds, 1.0))
    return PostedOps(ops, tuple(keys), world.machine.memory(2 * needs.get(c, 0.0)))


def reshard_ops(world: World, event: Realloc, c: int, key: Hashable) -> PostedOps:
    """Buckets are pipelined: B buckets in R rounds take R / B of the time that the bytes of a rank take alone, since
    the leaves of a broadcast tree wait for the first bucket, and its root finishes before the last."""
    machine, model = world.machine, world.models[event.model]
    source, src = world.models[event.origin], world.layouts[event.src]
    senders, receivers = world.on(src.mesh), world.on(world.layouts[event.dst].mesh)
    ops: list[Op] = []
    keys: list[Hashable] = []
    unpacked = 0
    parts = in_wire_dtypes(source, src.id, model, event.dst, event.decay)
    for number, (routes, part) in enumerate(zip(world.routes[realloc_key(event)], parts, strict=True)):
        item, traffic = itemsize(part), class_traffic(world, event, number)
        buckets = num_buckets(routes, item)
        rounds = num_rounds(routes, buckets)
        ops.append(Compute(machine.memory(2 * item * traffic[c].sent)))
        unpacked += 2 * item * traffic[c].received
        for d in receivers:
            if traffic[d].received > 0 and (c == d or c in senders):
                keys.append((key, number, d))
                parties = tuple(dict.fromkeys((d, *senders)))
                crosses = any(traffic[p].crosses for p in parties)
                sent = [traffic[p].sending(machine, item) for p in parties]
                longest = max(traffic[d].receiving(machine, item), *sent)
                ops.append(Isend(keys[-1], parties, rounds * (machine.latency(crosses) + longest / buckets), 1.0))
    return PostedOps(ops, tuple(keys), machine.memory(unpacked))


def class_traffic(world: World, event: Realloc, part: int = 0) -> dict[int, Traffic]:
    """Class -> what a rank of it sends and receives, for the classes on the two layouts' meshes. part: which of the
    reshards of the event, one for each dtype that travels."""
    if (event.id, part) not in world.class_traffic:
        classes = (*world.on(world.layouts[event.src].mesh), *world.on(world.layouts[event.dst].mesh))
        loads = Loads.of(world.routes[realloc_key(event)][part])
        world.class_traffic[event.id, part] = {c: loads.max_load(world.classes.ranks[c])
                                               for c in dict.fromkeys(classes)}
    return world.class_traffic[event.id, part]
