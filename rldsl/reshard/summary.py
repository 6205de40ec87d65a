"""Sizes of a reshard: bytes, messages, and a digest of everything it does.

In: a `ReshardPlan`. Out: numbers that the compiler writes into the plan and that every rank computes again, at a cost
that does not grow with the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rldsl.plan.model import Model
from rldsl.reshard.records import NodeGroup, ReshardPlan
from rldsl.reshard.rounds import BUCKET, num_buckets, num_rounds
from rldsl.sharding.boxes import Cell, itemsize

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Summary:
    """Sizes of a reshard."""

    bytes: int  # received by all ranks
    network_bytes: int  # of these, between nodes
    messages: int  # the most from one rank to one other, which is the number of rounds
    busiest_bytes: int  # the most that one rank sends or receives; an upper bound where ranks forward
    digest: str  # sha256, in hexadecimal, over everything that the reshard does


def summary(plan: ReshardPlan, model: Model, bucket: int = BUCKET) -> Summary:
    """The sizes of a reshard of `model`, in its dtype. bucket: bytes."""
    size = itemsize(model)
    buckets = num_buckets(plan, size, bucket)
    total = sum(missing_elements(group) * len(group.nodes) for group in plan.groups)
    crossing = sum(group.arrivals.elements() * len(group.nodes) for group in plan.groups)
    return Summary(total * size, crossing * size, num_rounds(plan, buckets), plan.busiest * size,
                   digest(plan, buckets))


def joined(parts: Sequence[Summary]) -> Summary:
    """The sizes of several reshards, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Summary(sum(p.bytes for p in parts), sum(p.network_bytes for p in parts), sum(p.messages for p in parts),
                   sum(p.busiest_bytes for p in parts),
                   hashlib.sha256("".join([f"{p.digest}\n" for p in parts]).encode()).hexdigest())


def missing_elements(group: NodeGroup) -> int:
    """Elements that the ranks of one node lack."""
    entering = sum(len(needers) * sum(x.values()) for needers, x in group.arrivals.by_device.items())
    return entering + sum(copy.stop - copy.start for copy in group.local_copies)


def digest(plan: ReshardPlan, buckets: int) -> str:
    """sha256 over a text of everything that a reshard does, and the number of buckets."""
    return hashlib.sha256("".join([f"{line}\n" for line in _text(plan, buckets)]).encode()).hexdigest()


def _text(plan: ReshardPlan, buckets: int) -> Iterator[str]:
    # The words below are hashed into the plans that have been written, so they stay as they are.
    yield f"{buckets} buckets, {plan.devices} devices"
    for view in (plan.src, plan.dst):
        yield f"side {view.parts}x{view.zero_shards} {view.replicas} {view.ordered}"
    cells, text = _by_identity(_cells), _by_identity(repr)
    for i, box_class in enumerate(plan.classes):
        yield f"class {i} {cells(box_class.holders)} to {cells(box_class.needers)}"
        yield "".join([f"{spec} {text(layers)} {text(box)}\n" for spec, layers, box, _ in box_class.segments])
    first: dict[int, int] = {}  # id of what a group wants -> the first group that wants it
    for number, group in enumerate(plan.groups):
        wanted = group.arrivals.wanted
        if first.setdefault(id(wanted), number) == number:
            yield "".join([f"wanted by {x.needers}: {x.classes}\n" for x in wanted.lists])
        yield (f"group {group.num_trees} {group.nodes} wants what {first[id(wanted)]} wants, "
               f"without {group.arrivals.held}, cut at {group.arrivals.bounds}")
        yield "".join([f"copy {_ints(copy)}\n" for copy in group.local_copies])
    for i, parts in sorted(plan.sent_parts.items()):
        yield f"share {i} {_ints(x for part in parts for x in part)}"
    for cell, sender in sorted(plan.senders.items()):
        supplies = [(family.groups[0], size) for family, size in sender.supplies.families]
        fewer = _ints(x for less in sender.supplies.fewer for x in less)
        yield f"source {_cells((cell,))} {sender.size} {sender.num_senders} {supplies} {fewer}"


def _by_identity(write: Callable[[T], str]) -> Callable[[T], str]:
    """The same, written once for each object that the plan keeps: many records have one, and hashing it takes as long
    as writing it."""
    texts: dict[int, str] = {}

    def text(part: T) -> str:
        if (found := texts.get(id(part))) is None:
            found = texts[id(part)] = write(part)
        return found

    return text


def _ints(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _cells(cells: tuple[Cell, ...]) -> str:
    return " ".join([f"{c.pp_rank}.{c.part}.{c.zero_shard}" for c in cells])
