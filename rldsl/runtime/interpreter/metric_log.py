"""Metrics of each step to one rank, which reports them."""

from __future__ import annotations

import torch

from rldsl.plan.events import Log, split
from rldsl.runtime.comm.exchange import message_tag, post
from rldsl.runtime.metrics.reporter import Reporter
from rldsl.runtime.state.step import StepState


def log(step: StepState, event: Log) -> None:
    """The first rank of each buffer's mesh sends its numbers, in one message, to rank `event.to`. A buffer without a
    number (the train call skipped all minibatches) adds nothing to the step's line."""
    context, rank = step.context, step.context.rank
    by_rank: dict[int, list[tuple[str, str]]] = {}
    for name, buffer in event.metrics:
        spread = context.spreads[split(buffer)[1]]
        by_rank.setdefault(context.world.meshes[spread.mesh].members()[0], []).append((name, buffer))
    sends: dict[int, torch.Tensor] = {}
    receives: dict[int, torch.Tensor] = {}
    numbers = [_optional_number(step.buffers.get(b).data) for _, b in by_rank.get(rank, ())]
    if numbers and rank != event.to:
        sends[event.to] = torch.cat(numbers)
    if rank == event.to:
        receives = {peer: torch.empty(2 * len(names), dtype=torch.float64, device=context.device)
                    for peer, names in by_rank.items() if peer != rank}
    post(sends, receives, message_tag(event)).wait()
    if rank == event.to:
        receives[rank] = torch.cat(numbers) if numbers else torch.empty(0, device=context.device)
        by_name = {name: pair for peer, names in by_rank.items()
                   for (name, _), pair in zip(names, receives[peer].view(-1, 2).tolist(), strict=True)}
        for name, _ in event.metrics:
            exists, number = by_name[name]
            if exists:
                step.logged.setdefault(name, []).append(number)


def _optional_number(data: torch.Tensor) -> torch.Tensor:
    """[2]: whether there is a number, and which."""
    number = data.reshape(-1)[:1].double()
    return torch.cat([number.new_ones(1), number]) if number.numel() else number.new_zeros(2)


def end_step(step: StepState, reporter: Reporter) -> None:
    """Report what was logged in this step, once: a checkpoint comes after its step's line."""
    reporter.end_step(step.logged)
    step.logged.clear()
