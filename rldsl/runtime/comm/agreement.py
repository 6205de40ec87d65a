"""Ranks agree: on whether anything went wrong, and on what only one of them should have looked up.

In: what this rank knows. Out: the same on every rank of the group. `group` is as in `World.group`: None is this rank
alone; of the whole world it is `dist.group.WORLD`. Every rank of the group calls these together.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from rldsl.diag import Diagnostic, Failure


def any_rank(flags: Sequence[bool], group: Any, device: torch.device) -> tuple[bool, ...]:
    """Of each flag, whether it is true on any rank."""
    found = torch.tensor([float(flag) for flag in flags], device=device)
    if group is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return tuple(bool(x) for x in found.tolist())


def raise_together(said: Sequence[Diagnostic], group: Any, device: torch.device) -> None:
    """When any rank has something to say, all stop, and those that have it say it. Errors: those of `said`."""
    if any_rank((bool(said),), group, device)[0]:
        raise Failure(tuple(said))


def broadcast_text(text: str, device: torch.device) -> str:
    """The text of rank 0 of the world."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    size = torch.tensor(mine.numel(), device=device)
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        mine = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(mine, src=0)
    return bytes(mine.tolist()).decode()


def gather_texts(text: str, device: torch.device) -> list[str]:
    """The text of every rank of the world, in their order."""
    data = text.encode()
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(s) for s in sizes)
    mine = torch.tensor(list(data.ljust(longest, b"\0")), dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(every, mine)
    return [x[: int(n)].cpu().numpy().tobytes().decode() for x, n in zip(every, sizes)]


def ranks_that_differ(data: bytes, device: torch.device) -> list[int]:
    """The ranks of the world whose data is not that of rank 0: 32 bytes are sent of each."""
    mine = torch.tensor(list(sha256(data).digest()), dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [rank for rank, digest in enumerate(every) if not torch.equal(digest, every[0])]
