"""What a program that `rlc emit` writes calls: the events and loops of a rank, by their numbers in the plan.

In: a rank's interpreter, and numbers. Out: nothing; every operation is the one that a run executes.
Codes: RL0791 a program of another plan, RL0792 what this rank does not have.
"""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rldsl.diag import Failure, fail
from rldsl.plan.events import EVENTS, Event, Item, Loop
from rldsl.runtime.interpreter.interpreter import Interpreter
from rldsl.runtime.interpreter.rank_state import RankState
from rldsl.runtime.plan_file import PlanFile


@dataclass(frozen=True, slots=True)
class Program:
    """An emitted program."""

    # the id of the plan that it was emitted from
    plan: str
    # the path of that plan
    file: str
    # (schedule, the ranks that follow it); a rank without one goes through its list as in any run
    schedules: tuple[tuple[Callable[[Rank], None], Sequence[range]], ...]

    def check_plan(self, file: PlanFile) -> None:
        """RL0791: the program was emitted from another plan."""
        if file.id != self.plan:
            raise fail("RL0791", f"this program was emitted from plan {self.plan}, but this is plan {file.id}",
                       place=file.name, help=f"emit it again: rlc emit {file.name} --rank all")

    def run(self, interpreter: Interpreter) -> None:
        """Go through the schedule of this rank. Leaving the debugger ends the run, as Ctrl-C does."""
        rank = interpreter.state.context.rank
        schedule = next((body for body, ranks in self.schedules if any(rank in r for r in ranks)), None)
        if schedule is None:
            return interpreter.run()
        try:
            schedule(Rank(interpreter))
        except BdbQuit:
            raise KeyboardInterrupt from None


class Rank:
    """The operations of one rank: a method for each kind of event, which takes the number of an event of the plan, as
    in `run.generate(8)`; its loops; and what it holds."""

    def __init__(self, interpreter: Interpreter):
        self._interpreter = interpreter
        self._events, self._loops = _by_id(interpreter.items)

    @property
    def state(self) -> RankState:
        """Everything that this rank holds: `state.step.number`, `state.models.shards["actor", "L0"]`,
        `state.step.logged`."""
        return self._interpreter.state

    def value(self, buffer: str) -> Any:
        """What this rank holds of a value, by its name in the plan: value("gen.logprobs@s1"). Waits until the value has
        arrived."""
        buffers = self.state.step.buffers
        if buffer not in buffers.names():
            raise self._none(f"value {buffer}", buffers.names())
        return buffers.get(buffer)

    def loop(self, id: str) -> Iterator[int]:
        """The iterations of a loop, from 1."""
        if id not in self._loops:
            raise self._none(f"loop {id}", self._loops)
        return self._interpreter.iterate(self._loops[id])

    def is_due(self, iteration: int, ahead: int) -> bool:
        """Whether events that run `ahead` steps ahead run in an iteration of the step loop."""
        return self._interpreter.is_due(iteration, ahead)

    def __getattr__(self, kind: str) -> Callable[[int], None]:
        if kind not in EVENTS:
            raise AttributeError(f"no operation {kind!r}; there are {', '.join(sorted(EVENTS))}", name=kind, obj=self)
        return partial(self._do, kind)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *EVENTS]

    def _do(self, kind: str, id: int) -> None:
        event = self._events.get(id)
        if event is None or not isinstance(event, EVENTS[kind]):
            of_kind = [i for i, e in self._events.items() if isinstance(e, EVENTS[kind])]
            raise self._none(f"{kind} {id}", of_kind)
        self._interpreter.run_event(event)

    def _none(self, asked: str, available: Iterable[object]) -> Failure:
        rank = self.state.context.rank
        return fail("RL0792", f"rank {rank} has no {asked} here", place=f"rank {rank}",
                    help=f"available: {', '.join(map(str, available)) or 'none'}; for details run `rlc show PLAN "
                         f"--rank {rank}`")


def _by_id(items: Sequence[Item]) -> tuple[dict[int, Event], dict[str, Loop]]:
    events: dict[int, Event] = {}
    loops: dict[str, Loop] = {}
    for item in items:
        if isinstance(item, Event):
            events[item.id] = item
            continue
        if isinstance(item, Loop):
            loops[item.id] = item
        inner = _by_id(item.body)
        events |= inner[0]
        loops |= inner[1]
    return events, loops
