"""What a program that `rlc emit` writes stands on: the events and loops of a rank, called by their numbers in the plan.

In: a rank on its way (`executor.Walk`), and numbers. Out: nothing; every operation is the one that a run executes.
Codes: RL0791 a program of another plan, RL0792 what this rank does not have.
"""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

from rldsl.diag import Failure, fail
from rldsl.plan.codec import plan_id
from rldsl.plan.events import EVENTS, Event, Item, Loop
from rldsl.runtime.interpreter.interpreter import Walk
from rldsl.runtime.interpreter.state import State


@dataclass(frozen=True, slots=True)
class Program:
    """plan: the id of the plan that it was emitted from. file: where that plan was. schedules: what ranks do; a rank
    that is in none walks its list as in any run."""

    plan: str
    file: str
    schedules: tuple[tuple[Callable[[Rank], None], Sequence[range]], ...]

    def check(self, data: bytes, name: str) -> None:
        """That `data`, read from the file `name`, is the plan. RL0791: it is another one."""
        if (found := plan_id(data)) != self.plan:
            raise fail("RL0791", f"this program was emitted from plan {self.plan}, and this is plan {found}",
                       place=name, help=f"emit it again: rlc emit {name} --rank all")

    def walk(self, walk: Walk) -> None:
        """Through the schedule of this rank. Who leaves the debugger ends the run, as Ctrl-C does."""
        rank = walk.state.world.rank
        mine = next((body for body, ranks in self.schedules if any(rank in r for r in ranks)), None)
        if mine is None:
            return walk.whole()
        try:
            mine(Rank(walk))
        except BdbQuit:
            raise KeyboardInterrupt from None


class Rank:
    """The operations of one rank; each takes the number of an event of the plan."""

    def __init__(self, walk: Walk):
        self._walk = walk
        self._events, self._loops = _found(walk.own)

    @property
    def state(self) -> State:
        """All that this rank holds: `state.step`, `state.shards["actor", "L0"]`, `state.metrics`."""
        return self._walk.state

    def value(self, buffer: str) -> Any:
        """What this rank holds of a value, as the plan writes it: value("gen.logprobs@s1"). It waits for what is still
        on its way."""
        if buffer not in self.state.store.names():
            raise self._none(f"value {buffer}", self.state.store.names())
        return self.state.store.take(buffer)

    def loop(self, id: str) -> Iterator[int]:
        """The iterations of a loop, from 1."""
        if id not in self._loops:
            raise self._none(f"loop {id}", self._loops)
        return self._walk.turns(self._loops[id])

    def _do(self, id: int, kind: str) -> None:
        event = self._events.get(id)
        if event is None or not isinstance(event, EVENTS[kind]):
            same = [i for i, e in self._events.items() if isinstance(e, EVENTS[kind])]
            raise self._none(f"{kind} {id}", same)
        self._walk.event(event)

    def _none(self, asked: str, there: Any) -> Failure:
        rank = self.state.world.rank
        return fail("RL0792", f"rank {rank} has no {asked} here", place=f"rank {rank}",
                    help=f"there are {', '.join(map(str, there)) or 'none'}; `rlc show PLAN --rank {rank}` tells more")

    load = partialmethod(_do, kind="load")
    fetch = partialmethod(_do, kind="fetch")
    lengths = partialmethod(_do, kind="lengths")
    transfer = partialmethod(_do, kind="transfer")
    realloc = partialmethod(_do, kind="realloc")
    offload = partialmethod(_do, kind="offload")
    onload = partialmethod(_do, kind="onload")
    generate = partialmethod(_do, kind="generate")
    infer = partialmethod(_do, kind="infer")
    train = partialmethod(_do, kind="train")
    compute = partialmethod(_do, kind="compute")
    select = partialmethod(_do, kind="select")
    collect = partialmethod(_do, kind="collect")
    save = partialmethod(_do, kind="save")
    checkpoint = partialmethod(_do, kind="checkpoint")
    log = partialmethod(_do, kind="log")
    free = partialmethod(_do, kind="free")


def _found(items: Sequence[Item]) -> tuple[dict[int, Event], dict[str, Loop]]:
    events: dict[int, Event] = {}
    loops: dict[str, Loop] = {}
    for item in items:
        if isinstance(item, Event):
            events[item.id] = item
            continue
        if isinstance(item, Loop):
            loops[item.id] = item
        inner = _found(item.body)
        events |= inner[0]
        loops |= inner[1]
    return events, loops
