"""What decoding works on: a slab, the sequences in its slots, what has been sampled, and recordings of its steps.

In: how many sequences, slots and tokens. Out: a `Desk`, cleared. A later generation of the same shape takes the same
desk, so that it finds its steps recorded; in between a desk has no memory, only the list of what is done on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from rldsl.backends.torch.generate.captured_step import Replay
from rldsl.backends.torch.generate.kv_cache import Slab
from rldsl.backends.torch.generate.storage_parking import Rest

MOST = 2  # desks of a shard: one for sampling, one for evaluations, say


@dataclass
class Progress:
    """What has been sampled so far; every field is indexed by sequence.

    tokens [N, M + 1] int64, logprobs [N, M + 1] float32 with M = max_new_tokens (the last column is for what is
    dropped); done [N] bool (ended by itself); lengths [N] int64: number of sampled tokens."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor
    done: torch.Tensor

    @staticmethod
    def start(count: int, longest: int, device: torch.device) -> Progress:
        return Progress(torch.zeros(count, longest + 1, dtype=torch.long, device=device),
                        torch.zeros(count, longest + 1, device=device),
                        torch.zeros(count, dtype=torch.long, device=device),
                        torch.zeros(count, dtype=torch.bool, device=device))


class Seats:
    """The sequence of each slot. which: its number; made: tokens sampled; before: tokens of its prompt, less one;
    token, logprob: the last; live: it has not ended; ended: by itself. draws: [slots, M + 1] its random numbers, if
    any."""

    def __init__(self, slots: int, longest: int, device: torch.device, draws: bool):
        self.which, self.made, self.before, self.token = torch.zeros(4, slots, dtype=torch.long, device=device)
        self.logprob = torch.zeros(slots, device=device)
        self.live, self.ended = torch.zeros(2, slots, dtype=torch.bool, device=device)
        self.draws = torch.zeros(slots if draws else 0, longest + 1, dtype=torch.float64, device=device)

    def move(self, sources: Sequence[int], into: Sequence[int]) -> None:
        fields = (self.which, self.made, self.before, self.token, self.live, self.ended)
        for x in (*fields, self.draws) if len(self.draws) else fields:
            x[list(into)] = x[list(sources)]
        self.live[list(sources)] = False


@dataclass
class Desk:
    """eos_ids: tokens that end a sequence. steps, notes: recordings of decoding steps, and of what is noted after them.
    rooms: where hidden states of the stage before arrive, for the steps of each lane."""

    slab: Slab
    seats: Seats
    progress: Progress
    eos_ids: torch.Tensor
    steps: Replay
    notes: Replay
    rooms: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    rest: Rest | None = None

    @staticmethod
    def make(count: int, slots: int, width: int, longest: int, ends: Sequence[int], draws: bool, lanes: int,
             replay: bool, device: torch.device) -> Desk:
        """count: sequences. slots, width: of the slab. longest: the most tokens of a response. ends: see eos_ids."""
        return Desk(Slab(slots, width, device), Seats(slots, longest, device, draws),
                    Progress.start(count, longest, device), torch.tensor(ends, dtype=torch.long, device=device),
                    Replay(device, replay, lanes=lanes), Replay(device, replay, twice=False, lanes=lanes))

    def open(self) -> None:
        """Everything is 0, and every slot empty."""
        if self.rest is None:
            return
        self.rest.wake()
        self.rest = None
        for x in self._tensors():
            x.zero_()

    def close(self) -> None:
        self.steps.sleep()
        self.notes.sleep()
        self.rest = Rest((*self._tensors(), *self.rooms.values()))
        self.rest.sleep()

    def _tensors(self) -> Iterator[torch.Tensor]:
        for held in (vars(self.seats), vars(self.progress)):
            yield from held.values()
        for pair in self.slab.layers.values():
            yield from pair


Desks = MutableMapping[Hashable, Desk]


def keep(desks: Desks, key: Hashable, desk: Desk) -> None:
    """For the next generation with this key; the oldest of too many goes."""
    desk.close()
    desks[key] = desk
    if len(desks) > MOST:
        del desks[next(iter(desks))]
