"""The ranks of a test world on one GPU, which NCCL refuses: messages go through the host, over gloo.

As with NCCL, what arrives is there once it has been waited for: until then it is NaN, or the largest integer. What is
sent is read when it is posted, on the stream of the caller.

`RLDSL_TEST_DEVICE=cuda pytest tests/end_to_end` runs on the GPU what these tests execute in worlds of ranks; with
`RLDSL_TEST_DEVICE=cpu` messages are copied in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rldsl.runtime import collectives
from tests.cuda_paths.late import poison

DEVICE = "RLDSL_TEST_DEVICE"


def device() -> torch.device | None:
    """Where the ranks of tests compute; None: on the CPU, without anything of this module."""
    name = os.environ.get(DEVICE)
    return torch.device(name, 0) if name else None


class HostWork:
    """A posted operation on copies that the host has of tensors."""

    def __init__(self, work: Any, received: list[tuple[torch.Tensor, torch.Tensor]], sent: Any = None) -> None:
        """received: (the caller's tensor, where the message arrives). sent: kept until it has gone."""
        self.work, self.received, self.sent = work, received, sent
        for x, _ in received:
            poison(x.detach())

    def wait(self, *timeout: Any) -> Any:
        out = self.work.wait(*timeout) if self.work is not None else True
        for x, arrived in self.received:
            x.detach().copy_(arrived.view(x.shape))
        self.received, self.sent = [], None
        return out

    def is_completed(self) -> bool:
        return not self.received

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def host(x: torch.Tensor) -> torch.Tensor:
    """A copy in the memory of the host, once all before it on this stream is done."""
    return x.detach().contiguous().cpu().clone()


def use(where: torch.device) -> None:
    """From now on this process, which is in a gloo world, computes on that device, and executes plans there."""
    from rldsl.runtime.interpreter import interpreter

    if where.type == "cuda":
        torch.cuda.set_device(where)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # as in `rldsl.run`
    _, *others = interpreter.execute.__defaults__ or ()
    interpreter.execute.__defaults__ = (where, *others)
    for name, replaced in _replacements().items():
        setattr(dist, name, replaced)
    collectives.ALL_GATHER = _out_of_place(collectives.ALL_GATHER)
    collectives.REDUCE_SCATTER = _out_of_place(collectives.REDUCE_SCATTER)


def _replacements() -> dict[str, Callable[..., Any]]:
    plain_batch, gather = dist.batch_isend_irecv, dist.gather

    def batch(operations: list[Any]) -> list[HostWork]:
        tensors = [host(op.tensor) if op.op is sends else torch.empty(op.tensor.shape, dtype=op.tensor.dtype)
                   for op in operations]
        made = [dist.P2POp(op.op, x, op.peer, op.group, op.tag) for op, x in zip(operations, tensors, strict=True)]
        return [HostWork(work, [] if op.op is sends else [(op.tensor, x)], x)
                for work, op, x in zip(plain_batch(made), operations, tensors, strict=True)]

    def gathered(x: torch.Tensor, gather_list: list[torch.Tensor] | None = None, *rest: Any, **more: Any) -> Any:
        copies = [host(y) for y in gather_list] if gather_list else gather_list
        out = gather(host(x), copies, *rest, **more)
        for y, copy in zip(gather_list or (), copies or (), strict=True):
            y.copy_(copy)
        return out

    sends = dist.isend
    in_place = {name: _in_place(getattr(dist, name)) for name in ("all_reduce", "broadcast", "recv", "send")}
    return {**in_place, "batch_isend_irecv": batch, "gather": gathered,
            "all_to_all_single": _out_of_place(dist.all_to_all_single)}


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: torch.Tensor, *args: Any, async_op: bool = False, **more: Any) -> Any:
        copy = host(tensor)
        asked = {"async_op": True} if async_op else {}
        work = function(copy, *args, **more, **asked)
        if async_op:
            return HostWork(work, [(tensor, copy)])
        tensor.detach().copy_(copy)
        return work

    return call


def _out_of_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(output: torch.Tensor, x: torch.Tensor, *args: Any, async_op: bool = False, **more: Any) -> Any:
        arrived, sent = torch.empty(output.shape, dtype=output.dtype), host(x)
        work = HostWork(function(arrived, sent, *args, async_op=True, **more), [(output, arrived)], sent)
        return work if async_op else work.wait()

    return call
