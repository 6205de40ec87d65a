"""What a rank of a pipeline does in a minibatch of training: its passes, and what it exchanges between them.

In: the number of ranks along pp, of chunks of layers on each, of micro-batches, and a rank. Out: its actions, in order.
Chunk c of rank p is stage c * pp + p of the model (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). With one
chunk this is 1F1B (PipeDream-flush: arXiv:2006.09503): run ahead by the distance from the end, then one forward and one
backward. With more, a rank runs one group of micro-batches after the other through its chunks, and filling and draining
cost (pp - 1) / chunks of what they cost otherwise.

Micro-batches come in groups of about equal size, of pp or more, so that a chunk is done with a group when the next
chunk's comes back; any number of them does. Fewer than pp make one group, and wait.

Invariants: each pass of each chunk and micro-batch stands once; every message is in the list of both its ends; and all
lists increase in one order of time, `_moments`, so that nobody waits for ever even if messages are rendezvous.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from rldsl.diag import internal_error


class Pass(NamedTuple):
    """Of one chunk and micro-batch of a rank, both by number."""

    backward: bool
    chunk: int
    micro: int


class Message(NamedTuple):
    """Hidden states for a forward pass, or their gradient for a backward one. wanted: the pass that needs it. peer: the
    rank along pp at the other end."""

    wanted: Pass
    peer: int


class Exchange(NamedTuple):
    """Posted together. sends: what the pass before it has made, if another rank wants that."""

    sends: tuple[Message, ...]
    takes: tuple[Message, ...]


Action = Pass | Exchange


def rank_passes(pp: int, chunks: int, count: int, rank: int) -> tuple[Pass, ...]:
    """Of `count` micro-batches, in order."""
    if not (0 <= rank < pp and chunks >= 1 and (pp > 1 or chunks == 1)):
        raise ValueError(f"no schedule for rank {rank} of {pp} with {chunks} chunks")
    groups = _groups(pp, count)
    ahead = [Pass(False, c, i) for group in groups for c in range(chunks) for i in group]
    back = [Pass(True, c, i) for group in groups for c in reversed(range(chunks)) for i in group]
    apart = pp - 1 - rank
    if chunks > 1:
        apart = 2 * apart + (chunks - 1) * max(map(len, groups), default=0)
    warm = min(apart, len(ahead))
    paired = (p for pair in zip(ahead[warm:], back, strict=False) for p in pair)
    return (*ahead[:warm], *paired, *back[len(ahead) - warm :])


def _groups(pp: int, count: int) -> list[range]:
    number = max(1, count // pp)
    return [range(g * count // number, (g + 1) * count // number) for g in range(number)] if count else []


@lru_cache(maxsize=64)
def actions(pp: int, chunks: int, count: int) -> tuple[tuple[Action, ...], ...]:
    """Of every rank. What a pass has made travels as soon as it is there: its message stands, on both sides, behind the
    passes of its moment."""
    found: list[list[Action]] = [[] for _ in range(pp)]
    for together in _clock_ticks([rank_passes(pp, chunks, count, rank) for rank in range(pp)], chunks):
        sends: dict[int, list[Message]] = defaultdict(list)
        takes: dict[int, list[Message]] = defaultdict(list)
        for rank, p in together:
            found[rank].append(p)
            to = next_pass(pp, chunks, rank, p)
            if to is not None and to[0] != rank:
                sends[rank].append(Message(to[1], to[0]))
                takes[to[0]].append(Message(to[1], rank))
        for rank in sorted({*sends, *takes}):
            found[rank].append(Exchange(tuple(sends[rank]), tuple(takes[rank])))
    return tuple(map(tuple, found))


def next_pass(pp: int, chunks: int, rank: int, p: Pass) -> tuple[int, Pass] | None:
    """Who wants what a pass makes: (rank, its pass); None for the loss and the gradient of the embedding."""
    stage = p.chunk * pp + rank + (-1 if p.backward else 1)
    return (stage % pp, Pass(p.backward, stage // pp, p.micro)) if 0 <= stage < pp * chunks else None


def _clock_ticks(lists: Sequence[Sequence[Pass]], chunks: int) -> Iterator[list[tuple[int, Pass]]]:
    """The passes of all ranks, by moments in which each rank makes at most one: as early as what they need allows, were
    all passes equally long."""
    pp, at = len(lists), [0] * len(lists)
    needs: set[tuple[int, Pass]] = {(0, p) for p in lists[0] if not p.backward and p.chunk == 0}
    while any(i < len(own) for i, own in zip(at, lists, strict=True)):
        together = [(rank, own[i]) for rank, (i, own) in enumerate(zip(at, lists, strict=True))
                    if i < len(own) and (rank, own[i]) in needs]
        if not together:
            raise internal_error(f"the schedule of {pp} ranks and {chunks} chunks deadlocks", "pipeline schedule",
                                 tuple(grid(lists, at, chunks > 1).splitlines()))
        yield together
        for rank, p in together:
            at[rank] += 1
            needs.remove((rank, p))
            to = next_pass(pp, chunks, rank, p)
            if to is not None:
                needs.add(to)
            elif not p.backward:
                needs.add((rank, Pass(True, p.chunk, p.micro)))


def show_pass(p: Pass, chunked: bool = False) -> str:
    """"F0": the forward pass of micro-batch 0; "B3": a backward pass. chunked: with the chunk, "F0.1"."""
    return f"{'B' if p.backward else 'F'}{p.micro}" + (f".{p.chunk}" if chunked else "")


def show_schedule(pp: int, chunks: int, count: int) -> str:
    """The passes of every rank, a line each: "rank 0  F0 F1 B0 B1"."""
    return "\n".join(f"rank {rank}  " + " ".join(show_pass(p, chunks > 1) for p in rank_passes(pp, chunks, count, rank))
                     for rank in range(pp))


def grid(lists: Sequence[Sequence[Pass]], done: Sequence[int], chunked: bool = False) -> str:
    """Ranks as rows and passes as columns, with a mark where each rank stands. done: how many passes each has made."""
    texts = [[show_pass(p, chunked) for p in own] for own in lists]
    wide = max((len(text) for own in texts for text in own), default=0)
    rows = []
    for rank, (own, stands) in enumerate(zip(texts, done, strict=True)):
        cells = [f"{'>' if i == stands else ' '}{text:<{wide}}" for i, text in enumerate(own)]
        rows.append(f"rank {rank} |{'|'.join(cells)}|" + ("" if stands < len(own) else " done"))
    return "\n".join(rows)


def max_activations_in_flight(order: Sequence[Pass], weights: Sequence[int], of: int | None = None) -> int:
    """The most that is kept for backward passes when one begins. weights: kept of a pass through each chunk. of: only
    when it is one of this chunk."""
    kept = most = 0
    for p in order:
        if not p.backward:
            kept += weights[p.chunk]
            continue
        if of is None or p.chunk == of:
            most = max(most, kept)
        kept -= weights[p.chunk]
    return most


def max_waiting_messages(own: Sequence[Action]) -> int:
    """The most messages that have come to a rank and wait for their passes, with the one that a pass reads."""
    here: Counter[Pass] = Counter()
    most = 0
    for action in own:
        if isinstance(action, Exchange):
            here.update(m.wanted for m in action.takes)
            most = max(most, here.total())
        else:
            here.pop(action, None)
    return most
