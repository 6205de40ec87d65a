"""Values between ranks: one contiguous message for each pair of ranks, posted at once, waited for late.

In: who sends what to whom, which every rank works out by the same pure functions. Out: a `Pending`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rldsl.diag import present
from rldsl.plan.events import Event
from rldsl.plan.model import Spread, Value
from rldsl.runtime.comm.row_assignment import StepRows
from rldsl.runtime.host_numbers import on_device
from rldsl.runtime.store import Pending, RaggedRows
from rldsl.sharding.message_batches import MAX_MESSAGES, message_batches
from rldsl.sharding.partition import row_moves

TAGS_PER_EVENT = 16

DTYPES = {"f32": torch.float32, "i64": torch.int64, "bool": torch.uint8}


def message_tag(event: Event, part: int = 0) -> int:
    """For debuggers only: messages between two ranks are matched by their order, so two parts may share a tag, and NCCL
    has no tags."""
    return event.id * TAGS_PER_EVENT + part % TAGS_PER_EVENT


@dataclass(frozen=True, slots=True)
class PostedMessages:
    """Messages of one event that are on their way."""

    works: Sequence[Any]  # what torch returned for each message
    sending: Sequence[torch.Tensor]  # the sent tensors, kept alive until `wait`

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def post(sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], tag: int,
         group: Any = None) -> PostedMessages:
    """Start every message: peer -> tensor. All ranks post their messages batch by batch
    (`sharding/message_batches.py`), and in a batch in the order of their peers. tag: see `message_tag`. group: None is
    the world's."""
    return post_each(tuple(sends.items()), tuple(receives.items()), tag, 1, group)


def post_each(sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], tag: int,
              max_per_peer: int, group: Any = None) -> PostedMessages:
    """The same for (peer, tensor) pairs, at most `max_per_peer` to and from each peer; messages between two ranks are
    matched in the order given."""
    sides = [[(peer, t) for peer, t in side if t.numel()] for side in (sends, receives)]
    works: list[Any] = []
    peers = {peer for side in sides for peer, _ in side}
    for batch in message_batches(dist.get_rank(), peers, dist.get_world_size(), MAX_MESSAGES // max_per_peer):
        works += dist.batch_isend_irecv([dist.P2POp(start, t, to, group=group, tag=tag) for start, side in
                                         zip((dist.isend, dist.irecv), sides, strict=True) for peer in batch
                                         for to, t in side if to == peer])
    return PostedMessages(works, tuple(t for _, t in sends))


# ---------------------------------------------------------------------------------------------------- values


def transfer(rows: StepRows, value: Value, src: Spread, dst: Spread, source_rows: RaggedRows | None,
             tag: int) -> Pending:
    """`value` from spread to spread. source_rows: what this rank has under `src`, or None. The result is the rows under
    `dst`, or None on a rank that does not take part in it."""
    world = rows.world
    have, want = rows.ids(src, value), rows.ids(dst, value)
    moves = row_moves(have, want, rows.plan.header.devices_per_node)
    dtype = torch.float64 if value.level == "batch" and value.dtype == "f32" else DTYPES[value.dtype]
    sends, receives, arriving = {}, {}, []
    for move in moves:
        if world.rank not in (move.src, move.dst):
            continue
        ids, total = on_device(move.rows, world.device), sum(rows.amounts(value, move.rows))
        if move.src == world.rank:
            rows_held = present(source_rows, f"{value.id} in {src.id} on a rank that sends it", "run")
            sends[move.dst] = rows_held.select(ids, total).data.to(dtype).contiguous()
        else:
            receives[move.src] = torch.empty(total, dtype=dtype, device=world.device)
            arriving.append((ids, rows.sizes(value, ids), move.src))
    posted = post(sends, receives, tag)

    def finish() -> RaggedRows | None:
        posted.wait()
        if world.rank not in want:
            return None
        parts = [RaggedRows(ids, sizes, receives[peer]) for ids, sizes, peer in arriving]
        kept_ids = sorted(set(want[world.rank]).intersection(have.get(world.rank, ())))
        if kept_ids and source_rows is not None:
            parts.append(source_rows.select(on_device(kept_ids, world.device), sum(rows.amounts(value, kept_ids))))
        if not parts:
            parts = [RaggedRows.empty(dtype, world.device)]
        joined = RaggedRows.join(parts)
        data = joined.data.to(torch.bool) if value.dtype == "bool" else joined.data
        return RaggedRows(joined.ids, joined.sizes, data)

    return Pending(finish, sum(t.nbytes for t in (*sends.values(), *receives.values())))
