"""Collectives of a group. CPUs of one machine use memory that they share (`shared_memory.py`). Over gloo, which
connects CPUs of several machines, small ones are one exchange of all with all.

gloo sums and gathers in rings, in which a rank waits for its neighbor again and again: 4 * (n - 1) times for a sum.
Much of that is threads that wake each other, whatever the size, while in an exchange all messages are on their way at
once (`python -m benchmarks.collectives`). A large tensor goes the way that moves fewer bytes. NCCL gets every call as
it is.

Ranks add in the order of their numbers, so that all of them get the same bits. `group` is as in torch.distributed;
every rank of it makes these calls together, with tensors of equal shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from rldsl.runtime.shared_memory import COMBINE, shared_memory_name

# bytes of a message from rank to rank up to which a collective over gloo is an exchange of all with all
MAX_EXCHANGED = 1 << 17
# torch 2.13 renames them
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
OP_NAMES: Mapping[Any, str] = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max"}  # as in `shared_memory.COMBINE`


def all_reduce(x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """Combine x over the ranks, in place. op: a ReduceOp. The maximum of NaN and a number may be either: gloo
    compares."""
    if op in OP_NAMES and (name := _shared(x, group)):
        own = x.detach()
        total = own.contiguous()
        torch.ops.rldsl.shared_all_reduce(total, OP_NAMES[op], name)
        if total is not own:
            own.copy_(total)
    elif op not in OP_NAMES or not _is_exchanged(x):
        dist.all_reduce(x, op=op, group=group)
    elif (ranks := dist.get_world_size(group)) > 1:
        parts = _exchange(x.detach().reshape(1, -1).expand(ranks, -1), group)
        x.detach().copy_(reduce(COMBINE[OP_NAMES[op]], parts.unbind()).view(x.shape))


def all_agree(yes: bool, group: Any, device: torch.device) -> bool:
    """Whether every rank says yes."""
    no = torch.tensor(float(not yes), device=device)
    all_reduce(no, dist.ReduceOp.MAX, group)
    return not bool(no)


def all_gather(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """[...] -> [ranks, ...], in the order of ranks."""
    ranks = dist.get_world_size(group)
    if name := _shared(x, group):
        gathered = x.new_empty(ranks, *x.shape)
        torch.ops.rldsl.shared_all_gather(_bytes(x.detach().reshape(-1)), _bytes(gathered.view(ranks, -1)), name)
        return gathered
    if _is_exchanged(x):
        return _exchange(x.detach().reshape(1, -1).expand(ranks, -1), group).view(ranks, *x.shape)
    out = x.new_empty(ranks, *x.shape)
    ALL_GATHER(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def reduce_scatter(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """[ranks, ...] -> [...]: the sum over the ranks of what each has for this one."""
    if _is_exchanged(x[0]) or _shared(x, group):
        return sum_of_parts(_exchange(x.detach().reshape(len(x), -1), group)).view(x.shape[1:])
    out = x.new_empty(x.shape[1:])
    REDUCE_SCATTER(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def start_all_gather(x: torch.Tensor, group: Any = None) -> tuple[dist.Work, torch.Tensor]:
    """[n] -> the work to wait for, and [ranks * n]: the rows of all ranks, once they are there."""
    ranks = dist.get_world_size(group)
    out = x.new_empty(ranks * x.numel())
    if _is_exchanged(x):
        return dist.all_to_all_single(out, x.repeat(ranks), group=group, async_op=True), out
    return ALL_GATHER(out, x, group=group, async_op=True), out


def start_reduce_scatter(x: torch.Tensor, group: Any = None) -> tuple[dist.Work, torch.Tensor]:
    """[ranks, n] -> the work to wait for, and [parts, n] whose sum (`sum_of_parts`) is what all ranks have for this
    one."""
    if _is_exchanged(x[0]):
        parts = torch.empty_like(x)
        return dist.all_to_all_single(parts, x, group=group, async_op=True), parts
    out = x.new_empty(1, x.shape[1])
    return REDUCE_SCATTER(out.view(-1), x.view(-1), group=group, async_op=True), out


def sum_of_parts(parts: torch.Tensor) -> torch.Tensor:
    """[parts, ...] -> [...], added in their order."""
    return reduce(torch.add, parts.unbind())


def _shared(x: torch.Tensor, group: Any) -> str | None:
    """The name of the group for operators of shared memory; None: the ranks share none."""
    return shared_memory_name(group) if x.is_cpu and x.numel() else None


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8. x: contiguous."""
    return x.view(torch.uint8)


def _is_exchanged(x: torch.Tensor) -> bool:
    """Equal on all ranks, whose tensors have equal shapes."""
    return x.is_cpu and 0 < x.nbytes <= MAX_EXCHANGED


def _exchange(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """[ranks, n], the row for each rank -> [ranks, n], the row of each. As bytes: gloo does not know every dtype."""
    sent = _bytes(rows.contiguous())
    received = torch.empty_like(sent)
    if name := _shared(rows, group):
        torch.ops.rldsl.shared_all_to_all(sent, received, name)
    else:
        dist.all_to_all_single(received, sent, group=group)
    return received.view(rows.dtype)
