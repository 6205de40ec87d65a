"""Events run as far ahead of the step loop as the lag of the run says, and what lasts changes only at its own step.

In: tables with sound references. Out: diagnostics RL0539. Rules:
- the step loop begins `lag` iterations early, and no other loop does;
- every generate of a step runs ahead by exactly the lag, so the policy that samples the rows of step s is the one of
  its place in iteration s - lag; one that says so runs in its own step;
- so does what generation is made from and what reads a model, state or buffer that changes during the run; nothing else
  that reads one runs ahead. Where a Python reward or the log-probs of a frozen model run changes no number: they may
  run up to the lag ahead;
- what makes parameters or a state, or writes to the log or to disk, does not run ahead;
- a `repeat ... until` runs ahead as a whole, with all that is needed to know how often it runs, and no other loop does;
  in an `every` each event runs ahead by its own number of steps;
- all fetches of a source run ahead by the same number of steps, so each step has the rows that it has without a lag;
- copies of parameters are refreshed, moved and freed in every iteration.
That what is read has been made, and not yet freed, is checked over iterations by `dataflow.py` and `versions.py`.

So it is known how old each token is that a step trains on (`generation.py`, `ages`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from rldsl.diag import Diagnostic
from rldsl.plan.events import EVERY_ITERATION, Event, Loop, When, aheads_in, split_buffer
from rldsl.plan.projection import Path, walk
from rldsl.plan.references import Role, references
from rldsl.verify.tables import Tables, name, problem


def check_lag(t: Tables) -> Iterator[Diagnostic]:
    lag = t.plan.header.lag
    if lag < 0:
        yield problem("RL0539", f"the plan has a lag of {lag} steps")
        return
    yield from _loops(t, lag)
    blocks = {id(x): (x, path[1:i]) for _, path in t.events for i, x in enumerate(path) if isinstance(x, When)}
    for block, around in blocks.values():
        wanted = () if not lag or any(isinstance(x, Loop) for x in around) else aheads_in(block)
        if block.aheads != wanted:
            yield problem("RL0539", f"{block.head} says that its events run {_listed(block.aheads)} steps ahead, but "
                          f"they run {_listed(wanted)} steps ahead")
    of_source: dict[str, int] = {}
    needed = _needed_for_generation(t) if lag else frozenset[str]()
    for event, path in t.events:
        wrong = _wrong(t, event, path, lag) or _reads_of_another_iteration(t, event, path, lag, needed)
        for source in () if wrong or _evaluates(path) else _read_in_order(event):
            ahead = of_source.setdefault(source, event.ahead)
            wrong = f"another event that reads {source} runs {_shown(ahead)}" if event.ahead != ahead else ""
        if wrong:
            yield problem("RL0539", f"{name(event)} runs {_shown(event.ahead)}, but {wrong}", event,
                          ranks=t.event_ranks(event))


def _loops(t: Tables, lag: int) -> Iterator[Diagnostic]:
    outer = [x for x in t.plan.body if isinstance(x, Loop)]
    inner = {id(x): x for _, path in t.events for x in path[1:] if isinstance(x, Loop)}
    for loop, first in (*((x, 1 - lag) for x in outer), *((x, 1) for x in inner.values())):
        if loop.first != first:
            yield problem("RL0539", f"loop {loop.id} begins with iteration {loop.first}, but with a lag of {lag} it "
                                    f"begins with iteration {first}")


def _read_in_order(e: Event) -> list[str]:
    """The sources of which it reads the next batch."""
    return [r.id for r in references(e) if r.role is Role.DATA] if e.traits.family == "data" and not e.reads else []


def _evaluates(path: Path) -> bool:
    return any(isinstance(x, Loop) and x.over for x in path)


def _loop_of(path: Path) -> Loop | None:
    """The outermost loop inside a step around an event."""
    return next((x for x in path[1:] if isinstance(x, Loop)), None)


def _of_loop(loop: Loop, lag: int) -> int:
    """By how many steps a loop runs ahead, as what it generates says; others collect nothing that runs ahead."""
    if not loop.until:
        return 0
    return max((e.wanted_ahead(lag) or 0 for e, _ in walk(loop.body)), default=0)


def _wrong(t: Tables, e: Event, path: Path, lag: int) -> str:
    """What contradicts the steps by which an event runs ahead; "" if nothing does."""
    if not EVERY_ITERATION <= e.ahead <= lag or e.ahead == EVERY_ITERATION and not lag:
        return f"the lag is {lag}"
    if not path:
        return "it comes before the first step" if e.ahead else ""
    wanted, loop = e.wanted_ahead(lag), _loop_of(path)
    if loop is not None and e.ahead != (whole := _of_loop(loop, lag)):
        return f"loop {loop.id}, around it, runs {_shown(whole)}"
    if loop is None and lag and _is_of_copies(t, e) != (e.ahead == EVERY_ITERATION):
        return ("it moves a copy of parameters, which belongs to no step" if e.ahead != EVERY_ITERATION
                else "it belongs to a step")
    if wanted is not None and e.ahead != wanted and not _evaluates(path):
        return f"its responses are generated {_shown(wanted)}"
    if e.ahead > 0:
        if e.versions().defs or e.logged or e.traits.family == "disk":
            return "it belongs to its own step"
        if lasting := sorted({*e.writes, *e.frees}.intersection(t.plan.lasting)):
            return f"it changes {lasting[0]}, which lasts from step to step"
    return ""


def _needed_for_generation(t: Tables) -> frozenset[str]:
    """The values that some generation of a step is made from, directly or not, and those that it makes; and all of a
    loop that generates."""
    lag = t.plan.header.lag
    own = [(e, _loop_of(path)) for e, path in t.events if path and not _evaluates(path)]
    made_from = defaultdict[str, list[str]](list)  # of all events that write a value: transfers move what others make
    for e, _ in own:
        for value in _values(t, e.writes):
            made_from[value] += _values(t, e.reads)
    found = set[str]()
    waiting = [v for e, loop in own if e.wanted_ahead(lag) or loop is not None and _of_loop(loop, lag)
               for v in _values(t, (*e.reads, *e.writes))]
    while waiting:
        if (value := waiting.pop()) not in found:
            found.add(value)
            waiting += made_from[value]
    return frozenset(found)


def _values(t: Tables, buffers: tuple[str, ...]) -> list[str]:
    """The values in some buffers that do not last from step to step."""
    return [split_buffer(b)[0] for b in buffers if b not in t.plan.lasting and split_buffer(b)[0] in t.values]


def _reads_of_another_iteration(t: Tables, e: Event, path: Path, lag: int, needed: frozenset[str]) -> str:
    """What an event would read as it is in another iteration than the program means; "" if nothing."""
    if not path or _evaluates(path) or e.ahead == EVERY_ITERATION or e.refreshes:
        return ""
    own = lag if needed.intersection(_values(t, e.writes)) else 0
    changing = [m for m, _ in e.copies() if t.models[m].train_layout or t.models[m].updated_from]
    changing += [split_buffer(b)[0] for b in e.reads if b in t.plan.lasting]
    if changing and e.ahead != own and not e.logged:
        return f"it reads {changing[0]}, which changes, and belongs {_shown(own)}"
    return ""


def _is_of_copies(t: Tables, e: Event) -> bool:
    """Whether it only brings, moves or frees copies of parameters."""
    freed = {split_buffer(b)[0] for b in e.frees}
    return e.refreshes or bool(freed) and freed <= t.models.keys()


def _listed(ahead: tuple[int, ...]) -> str:
    return ", ".join(map(str, ahead)) or "no"


def _shown(ahead: int) -> str:
    return "in every iteration" if ahead == EVERY_ITERATION else f"{ahead} steps ahead" if ahead else "in its own step"
