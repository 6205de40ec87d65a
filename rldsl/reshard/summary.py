"""Sizes of a reshard: bytes, messages, and a digest of everything it does.

In: a `ReshardPlan`. Out: numbers that the compiler writes into the plan and that every rank computes again, at a cost
that does not grow with the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rldsl.plan.model import Model
from rldsl.reshard.records import NodeGroup, ReshardPlan, arrivals_by_device
from rldsl.reshard.rounds import BUCKET, num_buckets, num_rounds
from rldsl.sharding.boxes import Cell, itemsize


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
    crossing = sum(plan.classes[i].size * len(group.nodes) for group in plan.groups for i in group.arrivals)
    return Summary(total * size, crossing * size, num_rounds(plan, buckets), plan.busiest * size,
                   digest(plan, buckets))


def missing_elements(group: NodeGroup) -> int:
    """Elements that the ranks of one node lack."""
    entering = sum(len(needers) * sum(x.values()) for needers, x in arrivals_by_device(group.arrivals.values()).items())
    return entering + sum(copy.stop - copy.start for copy in group.local_copies)


def digest(plan: ReshardPlan, buckets: int) -> str:
    """sha256 over a text of everything that a reshard does, and the number of buckets."""
    total = hashlib.sha256()
    for line in _text(plan, buckets):
        total.update(line.encode() + b"\n")
    return total.hexdigest()


def _text(plan: ReshardPlan, buckets: int) -> Iterator[str]:
    # The words below are hashed into the plans that have been written, so they stay as they are.
    yield f"{buckets} buckets, {plan.devices} devices"
    for view in (plan.src, plan.dst):
        divided = f"{view.parts}x{view.zero_shards}" if view.zero_shards > 1 else str(view.parts)
        yield f"side {divided} {view.replicas} {_ints(x for run in view.ordered for x in run)}"
    for i, box_class in enumerate(plan.classes):
        yield f"line {i} {_cells(box_class.holders)} to {_cells(box_class.needers)}"
        for segment in box_class.segments:
            layers = _ints(-1 if x is None else x for x in segment.layers)
            yield f"{segment.spec} {layers} {_ints(x for ends in segment.box for x in ends)}"
    for group in plan.groups:
        yield f"kind {group.num_trees} {_ints(group.nodes)}"
        for i, arrival in group.arrivals.items():
            yield f"enters {i} {_ints(arrival.needers)} {_ints(x for part in arrival.received_parts for x in part)}"
        for copy in group.local_copies:
            yield f"hop {_ints(copy)}"
    for i, parts in sorted(plan.sent_parts.items()):
        yield f"share {i} {_ints(x for part in parts for x in part)}"
    for cell, sender in sorted(plan.senders.items()):
        supplies = _ints(x for supply in sender.supplies for x in supply)
        yield f"source {_cells((cell,))} {sender.size} {sender.num_senders} {supplies}"


def _ints(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _cells(cells: Iterable[Cell]) -> str:
    return " ".join(f"{c.pp_rank}.{c.part}" + (f".{c.zero_shard}" if c.zero_shard else "") for c in cells)
