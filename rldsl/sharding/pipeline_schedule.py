"""What a rank of a pipeline does in a minibatch of training: its passes, and what it exchanges between them.

In: the number of ranks along pp, of chunks of layers on each, of micro-batches, and a rank. Out: its actions, in order.
Chunk c of rank p is virtual stage c * pp + p of the model (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). With
one chunk this is 1F1B (PipeDream-flush: arXiv:2006.09503): run ahead by the distance from the end, then one forward and
one backward. With more, a rank runs one group of micro-batches after the other through its chunks, and filling and
draining cost (pp - 1) / chunks of what they cost otherwise.

Micro-batches come in groups of about equal size, of pp or more, so that a chunk is done with a group when the next
chunk's comes back; any number of them does. Fewer than pp make one group, and wait.

Invariants: each pass of each chunk and micro-batch occurs once; every message is in the lists of both its ends; and all
lists increase in the order of clock ticks (`_clock_ticks`), so no rank waits forever even if messages are rendezvous.
"Rank" is the coordinate along pp.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from rldsl.diag import internal_error


class MicroBatchPass(NamedTuple):
    """The forward or backward pass of one micro-batch through one chunk of layers of a rank."""

    backward: bool  # false: forward
    chunk: int  # number on its rank
    micro: int  # number of the micro-batch


class Message(NamedTuple):
    """Hidden states for a forward pass, or their gradient for a backward one."""

    for_pass: MicroBatchPass  # the pass that needs it
    peer: int  # the rank along pp at the other end


class Exchange(NamedTuple):
    """Messages that a rank posts together."""

    sends: tuple[Message, ...]  # the output of the pass before, if another rank needs it
    receives: tuple[Message, ...]  # the input of the next pass, if another rank computes it


Action = MicroBatchPass | Exchange


@lru_cache(maxsize=1024)
def rank_passes(pp: int, chunks: int, count: int, rank: int) -> tuple[MicroBatchPass, ...]:
    """The passes of a rank for `count` micro-batches, in order."""
    if not (0 <= rank < pp and chunks >= 1 and (pp > 1 or chunks == 1)):
        raise ValueError(f"no schedule for rank {rank} of {pp} with {chunks} chunks")
    groups = _groups(pp, count)
    forwards = [MicroBatchPass(False, c, i) for group in groups for c in range(chunks) for i in group]
    backwards = [MicroBatchPass(True, c, i) for group in groups for c in reversed(range(chunks)) for i in group]
    # forward passes before the first backward pass
    warmup = pp - 1 - rank
    if chunks > 1:  # interleaved: two passes per later rank, and a group for every chunk but the last (section 2.2)
        warmup = 2 * warmup + (chunks - 1) * max(map(len, groups), default=0)
    warmup = min(warmup, len(forwards))
    paired = (p for pair in zip(forwards[warmup:], backwards, strict=False) for p in pair)
    return (*forwards[:warmup], *paired, *backwards[len(forwards) - warmup :])


def _groups(pp: int, count: int) -> list[range]:
    number = max(1, count // pp)
    return [range(g * count // number, (g + 1) * count // number) for g in range(number)] if count else []


@lru_cache(maxsize=64)
def actions(pp: int, chunks: int, count: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank. The output of a pass is sent at once: on both sides its message comes right after the
    passes of its clock tick."""
    return _actions([rank_passes(pp, chunks, count, rank) for rank in range(pp)], chunks)


@lru_cache(maxsize=64)
def forward_actions(pp: int, chunks: int, count: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank for forward passes alone."""
    return _actions([[p for p in rank_passes(pp, chunks, count, rank) if not p.backward] for rank in range(pp)], chunks)


def _actions(lists: Sequence[Sequence[MicroBatchPass]], chunks: int) -> tuple[tuple[Action, ...], ...]:
    """The passes of every rank, with the messages between them."""
    pp = len(lists)
    result: list[list[Action]] = [[] for _ in lists]
    for together in _clock_ticks(lists, chunks):
        sends: dict[int, list[Message]] = defaultdict(list)
        receives: dict[int, list[Message]] = defaultdict(list)
        for rank, p in together:
            result[rank].append(p)
            to = next_pass(pp, chunks, rank, p)
            if to is not None and to[0] != rank:
                sends[rank].append(Message(to[1], to[0]))
                receives[to[0]].append(Message(to[1], rank))
        for rank in sorted({*sends, *receives}):
            result[rank].append(Exchange(tuple(sends[rank]), tuple(receives[rank])))
    return tuple(map(tuple, result))


def next_pass(pp: int, chunks: int, rank: int, p: MicroBatchPass) -> tuple[int, MicroBatchPass] | None:
    """(rank, pass) that needs the output of a pass; None for the loss and the gradient of the embedding."""
    stage = p.chunk * pp + rank + (-1 if p.backward else 1)
    return (stage % pp, MicroBatchPass(p.backward, stage // pp, p.micro)) if 0 <= stage < pp * chunks else None


def _clock_ticks(lists: Sequence[Sequence[MicroBatchPass]], chunks: int) -> Iterator[list[tuple[int, MicroBatchPass]]]:
    """The (rank, pass)es of each clock tick, in which each rank makes at most one pass: as early as their inputs allow,
    if all passes were equally long."""
    pp, at = len(lists), [0] * len(lists)
    # (rank, pass)es whose inputs exist
    ready: set[tuple[int, MicroBatchPass]] = {(0, p) for p in lists[0] if not p.backward and p.chunk == 0}
    left = sum(map(len, lists))
    while left:
        together = [(rank, own[i]) for rank, (i, own) in enumerate(zip(at, lists, strict=True))
                    if i < len(own) and (rank, own[i]) in ready]
        if not together:
            raise internal_error(f"the schedule of {pp} ranks and {chunks} chunks deadlocks", "pipeline schedule",
                                 tuple(grid(lists, at, chunks > 1).splitlines()))
        yield together
        left -= len(together)
        for rank, p in together:
            at[rank] += 1
            ready.remove((rank, p))
            to = next_pass(pp, chunks, rank, p)
            if to is not None:
                ready.add(to)
            elif not p.backward:
                ready.add((rank, MicroBatchPass(True, p.chunk, p.micro)))


def show_pass(p: MicroBatchPass, chunked: bool = False) -> str:
    """"F0": the forward pass of micro-batch 0; "B3": a backward pass. chunked: with the chunk, "F0.1"."""
    return f"{'B' if p.backward else 'F'}{p.micro}" + (f".{p.chunk}" if chunked else "")


def show_schedule(pp: int, chunks: int, count: int) -> str:
    """The passes of every rank, a line each: "rank 0  F0 F1 B0 B1"."""
    return "\n".join(f"rank {rank}  " + " ".join(show_pass(p, chunks > 1) for p in rank_passes(pp, chunks, count, rank))
                     for rank in range(pp))


def grid(lists: Sequence[Sequence[MicroBatchPass]], done: Sequence[int], chunked: bool = False) -> str:
    """A text with ranks as rows and passes as columns, and a mark at the next pass of each rank. done: how many passes
    each rank has made."""
    texts = [[show_pass(p, chunked) for p in own] for own in lists]
    wide = max((len(text) for own in texts for text in own), default=0)
    rows = []
    for rank, (own, stands) in enumerate(zip(texts, done, strict=True)):
        cells = [f"{'>' if i == stands else ' '}{text:<{wide}}" for i, text in enumerate(own)]
        rows.append(f"rank {rank} |{'|'.join(cells)}|" + ("" if stands < len(own) else " done"))
    return "\n".join(rows)


@cache
def passes_in_flight(pp: int, chunks: int, count: int, rank: int,
                     of: int | None = None) -> tuple[tuple[int, ...], ...]:
    """How many passes through each chunk a rank has made forwards and not backwards when a backward pass begins, at the
    moments at which no other one has as many of all. of: only count backward passes of this chunk."""
    waiting, found = [0] * chunks, set[tuple[int, ...]]()
    for p in rank_passes(pp, chunks, count, rank):
        if p.backward and of in (None, p.chunk):
            found.add(tuple(waiting))
        waiting[p.chunk] += -1 if p.backward else 1
    return tuple(x for x in sorted(found) if not any(
        x != y and all(a <= b for a, b in zip(x, y, strict=True)) for y in found))


def max_activations_in_flight(passes: Sequence[Sequence[int]], weights: Sequence[int]) -> int:
    """The most that is kept for backward passes when one begins. passes: as of `passes_in_flight`. weights: what a pass
    through each chunk keeps."""
    return max((sum(n * w for n, w in zip(x, weights, strict=True)) for x in passes), default=0)


@cache
def max_waiting_messages(pp: int, chunks: int, count: int) -> tuple[int, ...]:
    """The most messages that each rank has received and not used yet, with the one that a pass reads. As `actions` has
    them, without making the actions."""
    lists = [rank_passes(pp, chunks, count, rank) for rank in range(pp)]
    waiting: list[set[MicroBatchPass]] = [set() for _ in lists]  # the passes that the messages are for
    most = [0] * pp
    for together in _clock_ticks(lists, chunks):
        for rank, p in together:
            waiting[rank].discard(p)
        for rank, p in together:
            to = next_pass(pp, chunks, rank, p)
            if to is not None and to[0] != rank:
                waiting[to[0]].add(to[1])
                most[to[0]] = max(most[to[0]], len(waiting[to[0]]))
    return tuple(most)
