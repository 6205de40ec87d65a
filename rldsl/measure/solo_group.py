"""A process group of which only one rank is there: its collectives return at once, with that rank's own data.

For timing a shard of a tensor-parallel model alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _Done(dist.Work):
    def __init__(self, result: Any):
        super().__init__()
        self.result_ = result

    def wait(self, timeout: Any = None) -> bool:
        return True


class SingleRankGroup(dist.ProcessGroup):
    """Rank 0 of `size`."""

    def __init__(self, size: int):
        super().__init__(0, size)  # type: ignore[call-arg]  # a constructor that torch does not declare
        self.ranks = size

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0

    def allreduce(  # type: ignore[override]  # torch calls it with these arguments, and declares more
            self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        return _Done(tensors)

    def allgather(  # type: ignore[override]  # as above
            self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> dist.Work:
        for every, mine in zip(outputs, inputs, strict=True):
            for one in every:
                one.copy_(mine)
        return _Done(outputs)

    def reduce_scatter(  # type: ignore[override]  # as above
            self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any = None) -> dist.Work:
        for mine, every in zip(outputs, inputs, strict=True):
            mine.copy_(every[0])
        return _Done(outputs)

    def alltoall_base(
            self, output: torch.Tensor, given: torch.Tensor, output_splits: Any = None, input_splits: Any = None,
            options: Any = None) -> dist.Work:
        output.view(self.ranks, -1).copy_(given.view(self.ranks, -1)[0])  # each of the others sends what this one keeps
        return _Done([output])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        output.view(self.ranks, -1).copy_(input.view(-1))
        return _Done([output])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        output.view(-1).copy_(input.view(self.ranks, -1)[0])
        return _Done([output])

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single(output, input)  # as torch before 2.13 calls it

    def _reduce_scatter_base(self, outputTensor: torch.Tensor, inputTensor: torch.Tensor,
                             opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single(outputTensor, inputTensor)  # as above
