"""Micro-batches through the stages of a pipeline.

`pipeline_forward` streams them for inference. `pipeline_forward_backward` runs a rank's actions of
`sharding/pipeline_schedule.py`: 1F1B, or its interleaved form if each rank has several chunks of layers. Messages that
a rank exchanges at the same time are posted together, and all ranks post in one order of time, so the schedule is free
of deadlock even under rendezvous sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rldsl.backends.torch.model.model_inputs import ModelInputs
from rldsl.backends.torch.model.stage import Stage
from rldsl.runtime.backend import Axis
from rldsl.sharding.pipeline_schedule import Exchange, Message, MicroBatchPass, actions, forward_actions


@dataclass(frozen=True, slots=True, eq=False)
class SentMessages:
    """What was sent in one exchange."""

    works: Sequence[dist.Work]
    tensors: Sequence[torch.Tensor]  # kept alive until then
    # Passes whose input arrives with the same `Work`: NCCL has one for a whole exchange, so a wait for the sends is one
    # for these messages, too
    with_receives: frozenset[MicroBatchPass] = frozenset()


class P2PCommunicator:
    """Messages to and from other ranks of the pipeline."""

    def __init__(self, pp: Axis):
        self.pp = pp
        self.sends: list[SentMessages] = []
        self.receives: dict[MicroBatchPass, tuple[dist.Work, torch.Tensor]] = {}  # by the pass that needs the tensor

    def exchange(self, now: Exchange, output: torch.Tensor | None, recv_buffer: Callable[[int], torch.Tensor]) -> None:
        """Post all messages of an exchange together. output: what is sent. recv_buffer(i): a tensor for the hidden
        states of micro-batch i. Waits for the previous sends first, so that few tensors are kept alive: those of one
        exchange, or, where a send completes with a receive, at most one for each message that no pass has read yet."""
        self._wait_sends()
        outgoing = [output.detach().contiguous() for _ in now.sends if output is not None]
        incoming = [recv_buffer(message.for_pass.micro) for message in now.receives]
        peers, group = self.pp.ranks, self.pp.group
        operations = [dist.P2POp(dist.isend, t, peers[m.peer], group)
                      for m, t in zip(now.sends, outgoing, strict=True)]
        operations += [dist.P2POp(dist.irecv, t, peers[m.peer], group)
                       for m, t in zip(now.receives, incoming, strict=True)]
        works = dist.batch_isend_irecv(operations)
        together: frozenset[MicroBatchPass] = frozenset()
        if len(works) < len(operations):  # coalesced into one, as NCCL does
            works, together = [works[0]] * len(operations), frozenset(m.for_pass for m in now.receives)
        if outgoing:
            self.sends.append(SentMessages(works[: len(outgoing)], outgoing, together))
        received = zip(works[len(outgoing) :], incoming, strict=True)
        self.receives |= {m.for_pass: work for m, work in zip(now.receives, received, strict=True)}

    def wait_receive(self, for_pass: MicroBatchPass) -> torch.Tensor | None:
        """What a pass needs from another rank; None if nothing."""
        if for_pass not in self.receives:
            return None
        work, tensor = self.receives.pop(for_pass)
        work.wait()
        return tensor

    def _wait_sends(self) -> None:
        """Wait for what was sent, but not for messages that a later pass needs."""
        early = [not sent.with_receives.isdisjoint(self.receives) for sent in self.sends]
        for work in (w for sent, keep in zip(self.sends, early, strict=True) if not keep for w in sent.works):
            work.wait()
        self.sends = [sent for sent, keep in zip(self.sends, early, strict=True) if keep]

    def finish(self) -> None:
        """Wait for everything that was sent."""
        for work in (w for sent in self.sends for w in sent.works):
            work.wait()
        self.sends.clear()


def pipeline_forward(stage: Stage, pp: Axis, batches: Sequence[ModelInputs],
                     finish: Callable[[int, torch.Tensor], None]) -> None:
    """Inference. finish(i, hidden [T, H]) is called on the last stage, in order."""
    p2p = P2PCommunicator(pp)
    for i, batch in enumerate(batches):
        this_pass, received = MicroBatchPass(False, 0, i), None
        if not stage.first:
            p2p.exchange(Exchange((), (Message(this_pass, pp.index - 1),)), None,
                           lambda i: _recv_buffer(stage, batches[i]))
            received = p2p.wait_receive(this_pass)
        hidden = stage.forward(batch.tokens, batch.positions, batch.attention, received)
        if stage.last:
            finish(i, hidden)
        else:
            p2p.exchange(Exchange((Message(this_pass, pp.index + 1),), ()), hidden,
                           lambda i: _recv_buffer(stage, batches[i]))
    p2p.finish()


def pipeline_first_pass(stage: Stage, pp: Axis, batches: Sequence[ModelInputs],
                        finish: Callable[[int, torch.Tensor], None]) -> None:
    """The forward passes of training, for what their gradients need first. finish(i, hidden [T, H]) is called on the
    rank with the last layers, in order."""
    p2p = P2PCommunicator(pp)
    output: torch.Tensor | None = None
    for action in forward_actions(pp.size, len(stage.chunks), len(batches))[pp.index]:
        if isinstance(action, Exchange):
            p2p.exchange(action, output, lambda i: _recv_buffer(stage, batches[i]))
            output = None
            continue
        batch, hidden = batches[action.micro], p2p.wait_receive(action)
        output = stage.forward(batch.tokens, batch.positions, batch.attention, hidden, action.chunk)
        if stage.chunks[action.chunk].last:
            finish(action.micro, output)
            output = None
    p2p.finish()


def pipeline_forward_backward(stage: Stage, pp: Axis, batches: Sequence[ModelInputs],
                              loss: Callable[[int, torch.Tensor], torch.Tensor], end_pass: Callable[[], None]) -> None:
    """Training. loss(i, hidden [T, H]) is called on the rank with the last layers. Gradients accumulate in the
    parameters, or under `zero` as `model/zero.py` says. end_pass() is called after each backward pass of a chunk."""
    p2p = P2PCommunicator(pp)
    in_flight: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}  # (input, output or loss)

    def forward(p: MicroBatchPass) -> torch.Tensor:
        batch, hidden = batches[p.micro], p2p.wait_receive(p)
        if hidden is not None:
            hidden.requires_grad_()
        given = batch.tokens, batch.positions, batch.attention, hidden, p.chunk
        out = stage.forward(*given) if batch.copies is None else stage.current.counting(
            batch.copies, stage.forward, *given)
        out = loss(p.micro, out) if stage.chunks[p.chunk].last else out
        in_flight[p.chunk, p.micro] = hidden, out
        return out

    def backward(p: MicroBatchPass) -> torch.Tensor | None:
        hidden, out = in_flight.pop((p.chunk, p.micro))
        grad = p2p.wait_receive(p)
        if out.requires_grad:
            with nullcontext() if stage.autocast_in_backward else torch.autocast(stage.device.type, enabled=False):
                torch.autograd.backward(out, grad)
            end_pass()
        if stage.zero:
            stage.zero.after_backward(stage.chunks[p.chunk].layers)
        if hidden is None:
            return None
        return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad

    output: torch.Tensor | None = None
    for action in actions(pp.size, len(stage.chunks), len(batches))[pp.index]:
        if isinstance(action, Exchange):
            p2p.exchange(action, output, lambda i: _recv_buffer(stage, batches[i]))
            output = None
        else:
            output = backward(action) if action.backward else forward(action)
    p2p.finish()


def _recv_buffer(stage: Stage, batch: ModelInputs) -> torch.Tensor:
    """[T, H] for hidden states, or for their gradient."""
    return torch.empty(batch.tokens.numel(), stage.hidden_size, dtype=stage.residual_dtype, device=stage.device)
