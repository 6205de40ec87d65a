"""Micro-batches through the stages of a pipeline.

`forward` streams them for inference. `forward_backward` is 1F1B (Narayanan et al. 2019, PipeDream-flush): each stage
runs ahead by its distance from the end, then alternates one forward and one backward. Where both directions of a link
are used at once, the two messages are posted together, so the schedule holds under rendezvous as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from rldsl.backends.torch.batch import Batch
from rldsl.backends.torch.stage import Stage
from rldsl.runtime.backend import Axis


class Links:
    """Messages to and from the neighbouring stages."""

    def __init__(self, pp: Axis):
        self.pp = pp
        self.sending: list[tuple[dist.Work, torch.Tensor]] = []

    def exchange(self, *, send: torch.Tensor | None = None, to: int = 1,
                 receive: torch.Tensor | None = None, of: int = -1) -> torch.Tensor | None:
        """Post a send to the stage `to` places on and a receive from the stage `of` places on, together; wait for
        the receive only. What was sent before must have arrived by then, so that one message at most is kept: under
        rendezvous it has."""
        self.drain()
        operations, group = [], self.pp.group
        if send is not None:
            send = send.detach().contiguous()
            operations.append(dist.P2POp(dist.isend, send, self.pp.ranks[self.pp.index + to], group))
        if receive is not None:
            operations.append(dist.P2POp(dist.irecv, receive, self.pp.ranks[self.pp.index + of], group))
        if not operations:
            return None
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):  # coalesced into one, as NCCL does
            works = [works[0]] * len(operations)
        if receive is not None:
            works[-1].wait()
        if send is not None:
            self.sending.append((works[0], send))
        return receive

    def drain(self) -> None:
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


def forward(stage: Stage, pp: Axis, batches: Sequence[Batch],
            finish: Callable[[int, torch.Tensor], None]) -> None:
    """Inference; finish(i, hidden [T, H]) is called on the last stage, in order."""
    links = Links(pp)
    for i, batch in enumerate(batches):
        hidden = None if stage.first else links.exchange(receive=_empty(stage, batch))
        hidden = stage.forward(batch.tokens, batch.packing.positions, batch.packing, hidden)
        if stage.last:
            finish(i, hidden)
        else:
            links.exchange(send=hidden)
    links.drain()


def forward_backward(stage: Stage, pp: Axis, batches: Sequence[Batch],
                     loss: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """Training; loss(i, hidden) is called on the last stage. Gradients add up in the parameters, or, where these are
    divided over dp, as `zero.py` says."""
    links, count = Links(pp), len(batches)
    ahead = min(pp.size - 1 - pp.index, count)
    flying: deque[tuple[torch.Tensor | None, torch.Tensor]] = deque()  # (input, output or loss), oldest first

    def take(i: int) -> torch.Tensor | None:
        return None if stage.first or i >= count else _empty(stage, batches[i])

    def run(i: int, hidden: torch.Tensor | None) -> torch.Tensor:
        if hidden is not None:
            hidden.requires_grad_()
        batch = batches[i]
        out = stage.forward(batch.tokens, batch.packing.positions, batch.packing, hidden)
        out = loss(i, out) if stage.last else out
        flying.append((hidden, out))
        return out

    def back(slope: torch.Tensor | None) -> torch.Tensor | None:
        hidden, out = flying.popleft()
        if out.requires_grad:
            torch.autograd.backward(out, slope)
        if stage.sharded:
            stage.sharded.after_backward()
        if hidden is None:
            return None
        return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad

    def room() -> torch.Tensor | None:
        return None if stage.last else torch.empty_like(flying[0][1])

    for i in range(ahead):
        out = run(i, links.exchange(receive=take(i)))
        links.exchange(send=None if stage.last else out)
    hidden = links.exchange(receive=take(ahead))
    for i in range(ahead, count):
        out = run(i, hidden)
        slope = links.exchange(send=None if stage.last else out, to=1, receive=room(), of=1)
        hidden = links.exchange(send=back(slope), to=-1, receive=take(i + 1), of=-1)
    for _ in range(ahead):
        links.exchange(send=back(links.exchange(receive=room(), of=1)), to=-1)
    links.drain()


def _empty(stage: Stage, batch: Batch) -> torch.Tensor:
    return torch.empty(batch.tokens.numel(), stage.hidden, dtype=stage.compute_dtype, device=stage.device)
