"""What a reallocation amounts to, from its paths alone: bytes, messages, and a digest of all that it does.

In: `Paths`. Out: numbers that the compiler writes into the plan and that every rank finds again, at a cost that does
not grow with the number of ranks. """

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rldsl.plan.model import Model
from rldsl.reshard.records import Kind, Paths, taken
from rldsl.reshard.rounds import BUCKET, buckets, count
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


def summary(p: Paths, model: Model, bucket: int = BUCKET) -> Summary:
    """In bytes of the model's dtype. bucket: bytes."""
    size = itemsize(model)
    number = buckets(p, size, bucket)
    total = sum(lacking(k) * len(k.nodes) for k in p.kinds)
    crossing = sum(p.lines[i].size * len(k.nodes) for k in p.kinds for i in k.entering)
    return Summary(total * size, crossing * size, count(p, number), p.busiest * size, digest(p, number))


def lacking(kind: Kind) -> int:
    """Elements that the ranks of one node lack."""
    entering = sum(len(needers) * sum(x.values()) for needers, x in taken(kind.entering.values()).items())
    return entering + sum(h.stop - h.start for h in kind.hops)


def digest(p: Paths, buckets: int) -> str:
    """sha256 over a text of the paths and the number of buckets."""
    total = hashlib.sha256()
    for line in _text(p, buckets):
        total.update(line.encode() + b"\n")
    return total.hexdigest()


def _text(p: Paths, buckets: int) -> Iterator[str]:
    yield f"{buckets} buckets, {p.devices} devices"
    for side in (p.src, p.dst):
        divided = f"{side.parts}x{side.shards}" if side.shards > 1 else str(side.parts)
        yield f"side {divided} {side.copies} {_ints(x for run in side.ordered for x in run)}"
    for i, line in enumerate(p.lines):
        yield f"line {i} {_cells(line.have)} to {_cells(line.want)}"
        for e in line.entries:
            yield f"{e.spec} {_ints(-1 if x is None else x for x in e.layers)} {_ints(x for ends in e.box for x in ends)}"
    for kind in p.kinds:
        yield f"kind {kind.trees} {_ints(kind.nodes)}"
        for i, e in kind.entering.items():
            yield f"enters {i} {_ints(e.needers)} {_ints(x for s in e.shares for x in s)}"
        for hop in kind.hops:
            yield f"hop {_ints(hop)}"
    for i, shares in sorted(p.shares.items()):
        yield f"share {i} {_ints(x for s in shares for x in s)}"
    for cell, source in sorted(p.sources.items()):
        yield f"source {_cells((cell,))} {source.size} {source.senders} {_ints(x for s in source.supplies for x in s)}"


def _ints(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _cells(cells: Iterable[Cell]) -> str:
    return " ".join(f"{c.stage}.{c.part}" + (f".{c.shard}" if c.shard else "") for c in cells)
