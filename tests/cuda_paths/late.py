"""Communication that is as late as it may be: what arrives is not there until it is waited for, and what is sent must not
change before. gloo is early: a missing wait, which is a race under NCCL, passes every other test.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rldsl.runtime import collectives

ROOT = Path(__file__).parents[2]


def poison(tensor: torch.Tensor) -> None:
    """Fill with what shows in every result: NaN, or the largest number."""
    if tensor.is_floating_point():
        tensor.fill_(math.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


class Late:
    """A posted operation that reads some tensors and writes others."""

    def __init__(self, work: Any, sent: Sequence[torch.Tensor], received: Sequence[tuple[torch.Tensor, torch.Tensor]],
                 counts: dict[str, int]):
        """received: (the caller's tensor, where the message really arrives)."""
        self.work, self.received, self.counts = work, received, counts
        self.sent = [(x, x.detach().clone()) for x in sent]
        self.waited = False
        for x, _ in received:
            poison(x)

    def wait(self, *args: Any) -> Any:
        out = self.work.wait(*args)
        if not self.waited:
            for x, before in self.sent:
                if x.shape != before.shape or not torch.equal(_bits(x), _bits(before)):
                    raise AssertionError("a tensor was changed while it was being sent")
            for x, arrived in self.received:
                x.copy_(arrived)
            self.waited = True
            self.counts["waited"] += 1
        return out

    def is_completed(self) -> bool:
        return self.waited

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def _poster() -> str:
    """The file of the program that wants the message: functions that only post for others are passed over."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        own = any(folder in file.parents for folder in (ROOT / "rldsl", ROOT / "backends"))
        if own and file.name != "collectives.py" and frame.f_code.co_name not in ("post", "post_each"):
            return file.name
        frame = frame.f_back
    return ""


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def late_communication() -> Iterator[dict[str, int]]:
    """Yields how many operations were posted, and how many were waited for; and by file, how many each has posted."""
    counts: Counter[str] = Counter(posted=0, waited=0)
    plain = dist.batch_isend_irecv

    def batch(operations: list[Any]) -> list[Late]:
        works, real, sides = [], [], []
        for op in operations:
            sends = op.op is dist.isend
            tensor = op.tensor if sends else torch.empty_like(op.tensor)
            real.append(dist.P2POp(op.op, tensor, op.peer, op.group, op.tag))
            sides.append(([op.tensor], []) if sends else ([], [(op.tensor, tensor)]))
        counts["posted"] += len(operations)
        counts[_poster()] += len(operations)
        for work, (sent, received) in zip(plain(real), sides, strict=True):
            works.append(Late(work, sent, received, counts))
        return works

    def collective(function: Any) -> Any:
        def call(out: torch.Tensor, x: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            if not async_op:
                return function(out, x, *args, **kwargs)
            arrived = torch.empty_like(out)
            counts["posted"] += 1
            counts[_poster()] += 1
            return Late(function(arrived, x, *args, async_op=True, **kwargs), [x], [(out, arrived)], counts)

        return call

    gather, scatter = collective(collectives.ALL_GATHER), collective(collectives.REDUCE_SCATTER)
    with (mock.patch.object(dist, "batch_isend_irecv", batch), mock.patch.object(collectives, "ALL_GATHER", gather),
          mock.patch.object(collectives, "REDUCE_SCATTER", scatter),
          mock.patch.object(dist, "all_to_all_single", collective(dist.all_to_all_single))):
        yield counts
