"""Micro-batches through the stages of a pipeline.

`forward` streams them for inference. `forward_backward` does what `sharding/pipeline_schedule.py` says a rank does in
training: 1F1B, or with several chunks of layers on each rank its interleaved form. What it exchanges at once is posted
together, and in one order of time on all ranks, so the schedule holds under rendezvous as well. """

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from rldsl.backends.torch.model.packed_batch import Batch
from rldsl.backends.torch.model.stage import Stage

from rldsl.runtime.backend import Axis
from rldsl.sharding.pipeline_schedule import Exchange, Message, Pass, actions

Key = tuple[int, int]  # a chunk and a micro-batch


class Links:
    """Messages to and from other stages. arriving: what passes wait for, by the pass."""

    def __init__(self, pp: Axis):
        self.pp = pp
        self.sending: list[tuple[dist.Work, torch.Tensor]] = []
        self.arriving: dict[Pass, tuple[dist.Work, torch.Tensor]] = {}

    def exchange(self, now: Exchange, made: torch.Tensor | None, room: Callable[[int], torch.Tensor]) -> None:
        """Post all messages of an exchange together. made: what is sent. room(i): a tensor for hidden states of
        micro-batch i. What was sent before must have arrived by then, so that one message at most is kept: under
        rendezvous it has."""
        self.drain()
        out = [made.detach().contiguous() for _ in now.sends if made is not None]
        into = [room(message.wanted.micro) for message in now.takes]
        operations = [dist.P2POp(dist.isend, t, self.pp.ranks[m.peer], self.pp.group) for m, t in zip(now.sends, out)]
        operations += [dist.P2POp(dist.irecv, t, self.pp.ranks[m.peer], self.pp.group) for m, t in zip(now.takes, into)]
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):  # coalesced into one, as NCCL does
            works = [works[0]] * len(operations)
        self.sending += zip(works, out)
        self.arriving |= {m.wanted: found for m, found in zip(now.takes, zip(works[len(out) :], into))}

    def take(self, wanted: Pass) -> torch.Tensor | None:
        """What a pass needs of another rank; None if nothing."""
        if wanted not in self.arriving:
            return None
        work, tensor = self.arriving.pop(wanted)
        work.wait()
        return tensor

    def drain(self) -> None:
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


def forward(stage: Stage, pp: Axis, batches: Sequence[Batch],
            finish: Callable[[int, torch.Tensor], None]) -> None:
    """Inference; finish(i, hidden [T, H]) is called on the last stage, in order."""
    links = Links(pp)
    for i, batch in enumerate(batches):
        wanted, hidden = Pass(False, 0, i), None
        if not stage.first:
            links.exchange(Exchange((), (Message(wanted, pp.index - 1),)), None, lambda _: _empty(stage, batch))
            hidden = links.take(wanted)
        hidden = stage.forward(batch.tokens, batch.packing.positions, batch.packing, hidden)
        if stage.last:
            finish(i, hidden)
        else:
            links.exchange(Exchange((Message(wanted, pp.index + 1),), ()), hidden, lambda _: hidden)
    links.drain()


def forward_backward(stage: Stage, pp: Axis, batches: Sequence[Batch],
                     loss: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """Training; loss(i, hidden) is called where the last layers are. Gradients add up in the parameters, or, where
    these are divided over dp, as `backends/torch/model/zero.py` says."""
    links = Links(pp)
    flying: dict[Key, tuple[torch.Tensor | None, torch.Tensor]] = {}  # (input, output or loss)

    def ahead(p: Pass) -> torch.Tensor:
        batch, hidden = batches[p.micro], links.take(p)
        if hidden is not None:
            hidden.requires_grad_()
        out = stage.forward(batch.tokens, batch.packing.positions, batch.packing, hidden, p.chunk)
        out = loss(p.micro, out) if stage.chunks[p.chunk].last else out
        flying[p.chunk, p.micro] = hidden, out
        return out

    def back(p: Pass) -> torch.Tensor | None:
        hidden, out = flying.pop((p.chunk, p.micro))
        slope = links.take(p)
        if out.requires_grad:
            torch.autograd.backward(out, slope)
        if stage.sharded:
            stage.sharded.after_backward(stage.chunks[p.chunk].layers)
        if hidden is None:
            return None
        return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad

    made: torch.Tensor | None = None
    for action in actions(pp.size, len(stage.chunks), len(batches))[pp.index]:
        if isinstance(action, Exchange):
            links.exchange(action, made, lambda i: _empty(stage, batches[i]))
            made = None
        else:
            made = back(action) if action.backward else ahead(action)
    links.drain()


def _empty(stage: Stage, batch: Batch) -> torch.Tensor:
    return torch.empty(batch.tokens.numel(), stage.hidden, dtype=stage.compute_dtype, device=stage.device)
