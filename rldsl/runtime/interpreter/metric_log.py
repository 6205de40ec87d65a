"""Metrics of each step to one rank, which reports them."""

from __future__ import annotations

import torch

from rldsl.plan.events import Log, split
from rldsl.runtime.comm.exchange import post
from rldsl.runtime.interpreter.state import State


def log(state: State, event: Log) -> None:
    """The first rank of each buffer's mesh sends its numbers, in one message, to rank `event.to`. A buffer without a
    number (of a train call whose minibatches were all left out) adds nothing to the step's line."""
    by_rank: dict[int, list[tuple[str, str]]] = {}
    for name, buffer in event.metrics:
        spread = state.spreads[split(buffer)[1]]
        by_rank.setdefault(state.world.meshes[spread.mesh].members()[0], []).append((name, buffer))
    rank, sends, receives = state.world.rank, {}, {}
    mine = [_told(state.store.take(b).data) for _, b in by_rank.get(rank, ())]
    if mine and rank != event.to:
        sends[event.to] = torch.cat(mine)
    if rank == event.to:
        receives = {peer: torch.empty(2 * len(names), dtype=torch.float64, device=state.device)
                    for peer, names in by_rank.items() if peer != rank}
    post(sends, receives, event.id * 16).wait()
    if rank == event.to:
        receives[rank] = torch.cat(mine) if mine else torch.empty(0, device=state.device)
        found = {name: told for peer, names in by_rank.items()
                 for (name, _), told in zip(names, receives[peer].view(-1, 2).tolist())}
        for name, _ in event.metrics:
            there, number = found[name]
            if there:
                state.metrics.setdefault(name, []).append(number)


def _told(data: torch.Tensor) -> torch.Tensor:
    """[2]: whether there is a number, and which."""
    number = data.reshape(-1)[:1].double()
    return torch.cat([number.new_ones(1), number]) if number.numel() else number.new_zeros(2)


def end_step(state: State) -> None:
    """What was logged in this step is reported, once: a checkpoint comes after its step's line."""
    assert state.report is not None
    state.report.end_step(state.metrics)
    state.metrics.clear()
