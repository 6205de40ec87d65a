"""Metrics of each step to the rank that reports them, without a rank that waits.

In: a log event. Out: numbers on their way; the reporter writes the line of a step when all of them have arrived. A
message may arrive steps later, when the rank that reports is far ahead of one that trains.
Invariant: nobody waits in a log event. Who waits is a checkpoint, which comes after the lines of its steps, and the end
of the run.
"""

from __future__ import annotations

import torch

from rldsl.plan.arrays import EXTENT
from rldsl.plan.events import Log, split_buffer
from rldsl.runtime.comm.exchange import message_tag, post
from rldsl.runtime.health.event_ring import EventRing
from rldsl.runtime.metrics.reporter import Reporter
from rldsl.runtime.state.logged_numbers import Arrival, LoggedNumbers
from rldsl.runtime.state.step import StepState


def log(step: StepState, ring: EventRing, event: Log) -> None:
    """The first rank of each buffer's mesh sends its numbers, in one message, to rank `event.to`. A buffer without a
    number (the train call skipped all minibatches) adds nothing to the step's line."""
    context, rank = step.context, step.context.rank
    by_rank: dict[int, list[tuple[str, str]]] = {}
    logged = {name: context.values[split_buffer(buffer)[0]] for name, buffer in event.metrics}
    lists = [name for name, value in logged.items() if value.extent == EXTENT]
    widths = {name: value.width if name in lists else 1 for name, value in logged.items()}
    for name, buffer in event.metrics:
        spread = context.spreads[split_buffer(buffer)[1]]
        by_rank.setdefault(context.world.meshes[spread.mesh].members()[0], []).append((name, buffer))
    own_numbers = [_optional_numbers(step.buffers.get(b).data, widths[name]) for name, b in by_rank.get(rank, ())]
    group, tag = context.world.log_group, message_tag(event)
    if rank != event.to:
        if own_numbers:
            step.sent_logs.add(post({event.to: torch.cat(own_numbers)}, {}, tag, group))
        return
    receives = {peer: torch.empty(sum(1 + widths[n] for n, _ in names), dtype=torch.float64, device="cpu")
                for peer, names in by_rank.items() if peer != rank}
    posted = post({}, receives, tag, group)
    if own_numbers:
        receives[rank] = torch.cat(own_numbers)
    arrival = Arrival.now() if not posted.works else step.arrivals.expect(posted.wait)
    order = tuple((peer, name, widths[name]) for peer, names in by_rank.items() for name, _ in names)
    step.logged.append(LoggedNumbers(tuple(name for name, _ in event.metrics), order, receives, arrival,
                                     ring.wait_tracker(arrival.wait), frozenset(lists)))


def _optional_numbers(data: torch.Tensor, width: int) -> torch.Tensor:
    """[1 + width], on the host: whether there are numbers, and which."""
    numbers = data.reshape(-1)[:width].double().cpu()
    return torch.cat([numbers.new_ones(1), numbers]) if numbers.numel() else numbers.new_zeros(1 + width)


def end_step(step: StepState, reporter: Reporter) -> None:
    """Report what was logged in this step, once, as soon as it is there."""
    reporter.end_step(tuple(step.logged))
    step.logged.clear()
