"""What a resharding amounts to: bytes, messages, and a digest of everything it does.

In: `Routes`. Out: numbers that the compiler writes into the plan and that every rank computes again, at a cost that
does not grow with the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rldsl.plan.model import Model
from rldsl.reshard.records import NodeGroup, Routes, arrivals_by_device
from rldsl.reshard.rounds import BUCKET, num_buckets, num_rounds
from rldsl.sharding.boxes import Cell, itemsize


@dataclass(frozen=True, slots=True)
class Summary:
    """bytes: received by all ranks. network_bytes: of these, between nodes. messages: the most from one rank to one
    other, which is the number of rounds. busiest_bytes: the most that one rank sends or receives (a bound of it where
    ranks pass on what they received)."""

    bytes: int
    network_bytes: int
    messages: int
    busiest_bytes: int
    digest: str


def summary(p: Routes, model: Model, bucket: int = BUCKET) -> Summary:
    """In bytes of the model's dtype. bucket: bytes."""
    size = itemsize(model)
    number = num_buckets(p, size, bucket)
    total = sum(missing_elements(k) * len(k.nodes) for k in p.groups)
    crossing = sum(p.classes[i].size * len(k.nodes) for k in p.groups for i in k.arrivals)
    return Summary(total * size, crossing * size, num_rounds(p, number), p.busiest * size, digest(p, number))


def missing_elements(group: NodeGroup) -> int:
    """Elements that the ranks of one node lack."""
    entering = sum(len(needers) * sum(x.values()) for needers, x in arrivals_by_device(group.arrivals.values()).items())
    return entering + sum(h.stop - h.start for h in group.local_copies)


def digest(p: Routes, buckets: int) -> str:
    """sha256 over a text of the paths and the number of buckets."""
    total = hashlib.sha256()
    for line in _text(p, buckets):
        total.update(line.encode() + b"\n")
    return total.hexdigest()


def _text(p: Routes, buckets: int) -> Iterator[str]:
    yield f"{buckets} buckets, {p.devices} devices"
    for side in (p.src, p.dst):
        divided = f"{side.parts}x{side.shards}" if side.shards > 1 else str(side.parts)
        yield f"side {divided} {side.replicas} {_ints(x for run in side.ordered for x in run)}"
    for i, line in enumerate(p.classes):
        yield f"line {i} {_cells(line.holders)} to {_cells(line.needers)}"
        for e in line.segments:
            layers = _ints(-1 if x is None else x for x in e.layers)
            yield f"{e.spec} {layers} {_ints(x for ends in e.box for x in ends)}"
    for group in p.groups:
        yield f"kind {group.num_trees} {_ints(group.nodes)}"
        for i, arrival in group.arrivals.items():
            yield f"enters {i} {_ints(arrival.needers)} {_ints(x for s in arrival.shares for x in s)}"
        for copy in group.local_copies:
            yield f"hop {_ints(copy)}"
    for i, shares in sorted(p.shares.items()):
        yield f"share {i} {_ints(x for s in shares for x in s)}"
    for cell, source in sorted(p.senders.items()):
        supplies = _ints(x for s in source.supplies for x in s)
        yield f"source {_cells((cell,))} {source.size} {source.num_senders} {supplies}"


def _ints(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _cells(cells: Iterable[Cell]) -> str:
    return " ".join(f"{c.stage}.{c.part}" + (f".{c.shard}" if c.shard else "") for c in cells)
