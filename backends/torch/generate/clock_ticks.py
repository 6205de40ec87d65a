"""The turns of the lanes of a slab through the stages of a pipeline, so that all stages work at the same time.

In: an engine for each rank. Out: all its work is done. With pp stages there are pp lanes, and item i of the work is the
next turn of lane i modulo pp. In *moment* t stage s does item t - s. Between two moments each stage gives the hidden
states that it made to the next one and gets those of its next item, and the last stage tells all others which tokens it
sampled: what it did in moment t is known when lane i's next turn begins, at the earliest in moment t + 1.

No deadlock: every message belongs to one boundary between two moments, and at a boundary a rank posts all of its
messages together and waits for them. Both sides know whether there is one and how large it is, since what an item does
follows from the prompts and from what came of the items i - pp and before, which every stage knows by then. So when all
ranks have passed boundary t, each comes to boundary t + 1 after its own pass, and all messages there meet; by induction
every boundary is passed, under rendezvous as well. Ranks that share experts are at the same stage and do the same
moments: each first asks whether any of them is busy, and all make a pass or none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from rldsl.backends.torch.generate.engine import Engine, Work
from rldsl.backends.torch.generate.scheduler import Lane

from rldsl.runtime.backend import Axes, Axis


def run(engine: Engine, axes: Axes) -> None:
    """Until every sequence of this shard, and of those that share its experts, is complete."""
    pp, ep = axes.pp, axes.ep
    items, moment = _Items(engine, pp), -pp.index
    arriving: torch.Tensor | None = None
    while True:
        if moment >= 0:
            work = items.at(moment)
            if not _any(items.busy, ep, engine.stage.device):
                return
            made = items.do(moment, arriving)
            if ep.size > 1 and (work is None or not engine.size(work)):
                engine.idle()
        else:
            made = ()
        arriving = items.exchange(moment, made) if pp.size > 1 else None
        moment += 1


class _Items:
    """Work and outcomes of the items that are under way at this stage. An item is numbered as this stage meets it."""

    def __init__(self, engine: Engine, pp: Axis):
        self.engine, self.pp = engine, pp
        self.work: dict[int, Work | None] = {}
        self.outcomes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.busy = True

    def at(self, item: int) -> Work | None:
        """What an item does; decided once, from what came of the lane's last turn."""
        if item not in self.work:
            before, lane = item - self.pp.size, self._lane(item)
            if before >= 0:
                last = self.work.pop(before)
                if last is not None:
                    self.engine.absorb(lane, last, *self.outcomes.pop(before))
            self.work[item] = self.engine.slots.next(lane)
            self.busy = self.engine.slots.busy
        return self.work[item]

    def do(self, item: int, arriving: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        work = self.at(item)
        if work is None:
            return ()
        made = self.engine.work(self._lane(item), work, arriving)
        if self.engine.stage.last:
            self.outcomes[item] = made
        return made

    def exchange(self, moment: int, made: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """Everything that travels after a moment. made: of this stage in it. The hidden states of the next item."""
        pp, stage, engine = self.pp, self.engine.stage, self.engine
        last, operations = pp.size - 1, []

        def post(operation: object, tensor: torch.Tensor, to: int) -> None:
            operations.append(dist.P2POp(operation, tensor, pp.ranks[to], pp.group))

        if not stage.last and made:
            post(dist.isend, made[0].contiguous(), pp.index + 1)
        arriving, told = None, None
        if not stage.first and moment >= -1:
            coming = self.at(moment + 1)
            if coming is not None and engine.size(coming):
                arriving = engine.room(self._lane(moment + 1), coming)
                post(dist.irecv, arriving, pp.index - 1)
        sampled = moment + pp.index - last  # by the last stage in this moment
        work = self.work.get(sampled) if sampled >= 0 else None
        if work is not None and stage.last:
            both = torch.stack([x.double() for x in made])  # exact: one message instead of two
            for to in range(last):
                post(dist.isend, both, to)
        elif work is not None:
            told = torch.empty(2, engine.sequences(work), dtype=torch.float64, device=stage.device)
            post(dist.irecv, told, last)
        for sent in dist.batch_isend_irecv(operations) if operations else ():
            sent.wait()
        if told is not None:
            self.outcomes[sampled] = told[0].long(), told[1].float()
        return arriving

    def _lane(self, item: int) -> Lane:
        return self.engine.slots.lanes[item % self.pp.size]


def _any(busy: bool, ep: Axis, device: torch.device) -> bool:
    """Whether any rank that shares experts with this one has sequences that are not complete."""
    if ep.size == 1:
        return busy
    flag = torch.tensor(int(busy), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=ep.group)
    return bool(flag)
