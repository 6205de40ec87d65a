"""Pipelined generation: the micro-batch groups of the KV cache take turns, so that all stages work at the same time.

In: an engine on each rank. Out: all of its sequences are complete.

With pp stages there are pp groups, and item i of the work is the next turn of group i modulo pp. In clock tick t, stage
s runs item t - s. Between two ticks each stage sends the hidden states that it made to the next stage and receives
those of its next item, and the last stage sends the sampled tokens to all others: what it samples in tick t is known
when the group's next turn begins, in tick t + 1 at the earliest.

No deadlock: every message belongs to one boundary between two ticks, and at a boundary a rank posts all of its messages
together and waits for them. Both sides know whether there is a message and how large it is, since an item follows from
the prompts and from the outcomes of the items i - pp and before, which every stage knows by then. So when all ranks
have passed boundary t, each reaches boundary t + 1 after its own forward pass, and all messages there meet; by
induction every boundary is passed, even under rendezvous sends. Ranks that share experts are at the same stage and run
the same ticks: each first asks whether any of them has work, and all run a pass or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rldsl.backends.torch.generate.engine import Engine, ScheduledBatch, dummy_pass
from rldsl.backends.torch.generate.scheduler import MicroBatchGroup, PrefillBatch
from rldsl.runtime.backend import Axes, Axis
from rldsl.runtime.collectives import all_reduce


def run_to_completion(engine: Engine, axes: Axes) -> None:
    """Run until every sequence of this shard, and of those that share its experts, is complete."""
    pp, ep = axes.pp, axes.ep
    if pp.size == ep.size == 1:
        _run_one_stage(engine)
        return
    items, tick = _InFlight(engine, pp), -pp.index
    received: torch.Tensor | None = None
    while True:
        output: tuple[torch.Tensor, ...] = ()
        if tick >= 0:
            batch = items.batch(tick)
            if not _any_has_work(items.has_work, ep, engine.stage.device):
                return
            output = items.run(tick, received)
            if ep.size > 1 and (batch is None or not engine.num_tokens(batch)):
                dummy_pass(engine.stage)
        received = items.exchange(tick, output) if pp.size > 1 else None
        tick += 1


def _run_one_stage(engine: Engine) -> None:
    """Where no other rank has to know what comes next: steps of the same shape are repeated without asking the
    scheduler, which takes as long as a step of a small model."""
    scheduler, group = engine.scheduler, engine.scheduler.groups[0]
    while (batch := scheduler.schedule(group)) is not None:
        may_have_ended = engine.record_samples(group, batch, *engine.run(group, batch, None))
        if may_have_ended or isinstance(batch, PrefillBatch):
            continue
        again, done = replace(batch, slot_moves=(), attached=()), 0
        while done < batch.repeats and not may_have_ended:
            may_have_ended = engine.record_samples(group, again, *engine.run(group, again, None))
            done += 1
        scheduler.advance(group, done)


class _InFlight:
    """Batches and outcomes of the items that are under way at this stage. Items are numbered by this stage's ticks, so
    item i is the one that it runs in its tick i."""

    def __init__(self, engine: Engine, pp: Axis):
        self.engine, self.pp = engine, pp
        self.batches: dict[int, ScheduledBatch | None] = {}
        self.samples: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # item -> (tokens, log-probs)
        self.has_work = True

    def batch(self, item: int) -> ScheduledBatch | None:
        """The batch of an item; decided once, from the outcome of the group's last turn."""
        if item not in self.batches:
            before, group = item - self.pp.size, self._group(item)
            if before >= 0:
                last = self.batches.pop(before)
                if last is not None:
                    self.engine.record_samples(group, last, *self.samples.pop(before))
            self.batches[item] = self.engine.scheduler.schedule(group)
            self.has_work = self.engine.scheduler.has_work
        return self.batches[item]

    def run(self, item: int, received: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """received: hidden states of the stage before. See `Engine.run`."""
        batch = self.batch(item)
        if batch is None:
            return ()
        output = self.engine.run(self._group(item), batch, received)
        if self.engine.stage.last:
            tokens, logprobs = output
            self.samples[item] = tokens, logprobs
        return output

    def exchange(self, tick: int, output: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """Send and receive everything that travels after a tick. output: of this stage in it. Returns the hidden states
        of the next item."""
        pp, stage, engine = self.pp, self.engine.stage, self.engine
        last_stage = pp.size - 1
        operations: list[dist.P2POp] = []

        def post(operation: Callable[..., Any], tensor: torch.Tensor, peer: int) -> None:
            operations.append(dist.P2POp(operation, tensor, pp.ranks[peer], pp.group))

        if not stage.last and output:
            post(dist.isend, output[0].contiguous(), pp.index + 1)
        recv_buffer, recv_samples = None, None
        if not stage.first and tick >= -1:
            next_batch = self.batch(tick + 1)
            if next_batch is not None and engine.num_tokens(next_batch):
                recv_buffer = engine.recv_buffer(self._group(tick + 1), next_batch)
                post(dist.irecv, recv_buffer, pp.index - 1)
        sampled_item = tick + pp.index - last_stage  # what the last stage sampled in this tick, in our numbering
        sampled = self.batches.get(sampled_item) if sampled_item >= 0 else None
        if sampled is not None and stage.last:
            both = torch.stack([x.double() for x in output])  # exact for both: one message instead of two
            for peer in range(last_stage):
                post(dist.isend, both, peer)
        elif sampled is not None:
            recv_samples = torch.empty(2, engine.num_sequences(sampled), dtype=torch.float64, device=stage.device)
            post(dist.irecv, recv_samples, last_stage)
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        if recv_samples is not None:
            self.samples[sampled_item] = recv_samples[0].long(), recv_samples[1].float()
        return recv_buffer

    def _group(self, item: int) -> MicroBatchGroup:
        return self.engine.scheduler.groups[item % self.pp.size]


def _any_has_work(has_work: bool, ep: Axis, device: torch.device) -> bool:
    """Whether any rank that shares experts with this one has sequences that are not complete."""
    if ep.size == 1:
        return has_work
    flag = torch.tensor(int(has_work), device=device)
    all_reduce(flag, dist.ReduceOp.MAX, ep.group)
    return bool(flag)
