"""Small collectives by which ranks agree: on whether anything went wrong, and on what only one of them has read.

In: what this rank knows. Out: the same on every rank of the group. `group` is as in `World.group`: None for this rank
alone, `dist.group.WORLD` for the whole world. Every rank of the group calls these together.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from rldsl.diag import Diagnostic, Failure
from rldsl.runtime.collectives import all_gather, all_reduce


def any_rank(flags: Sequence[bool], group: Any, device: torch.device) -> tuple[bool, ...]:
    """For each flag, whether it is true on any rank."""
    table = torch.tensor([float(flag) for flag in flags], device=device)
    if group is not None:
        all_reduce(table, dist.ReduceOp.MAX, group)
    return tuple(bool(x) for x in table.tolist())


def sum_of_ranks(count: int, device: torch.device) -> int:
    """The sum over all ranks of the world."""
    total = torch.tensor(count, device=device)
    all_reduce(total)
    return int(total)


def raise_together(diagnostics: Sequence[Diagnostic], group: Any, device: torch.device) -> None:
    """If any rank has diagnostics, all ranks raise a Failure; each reports its own."""
    if any_rank((bool(diagnostics),), group, device)[0]:
        raise Failure(tuple(diagnostics))


def broadcast_text(text: str, device: torch.device) -> str:
    """The text of rank 0 of the world."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    size = torch.tensor(data.numel(), device=device)
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    return bytes(data.tolist()).decode()


def gather_texts(text: str, device: torch.device) -> list[str]:
    """The text of every rank of the world, in their order."""
    data = text.encode()
    size = torch.tensor([len(data)], device=device)
    sizes = all_gather(size).flatten().tolist()
    longest = max(sizes)
    padded = torch.tensor(list(data.ljust(longest, b"\0")), dtype=torch.uint8, device=device)
    return [x[:n].cpu().numpy().tobytes().decode() for x, n in zip(all_gather(padded), sizes, strict=True)]


def ranks_that_differ(data: bytes, device: torch.device) -> list[int]:
    """The ranks of the world whose data differs from that of rank 0. Each rank sends a digest of 32 bytes."""
    digest = torch.tensor(list(sha256(data).digest()), dtype=torch.uint8, device=device)
    digests = all_gather(digest)
    return [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]
