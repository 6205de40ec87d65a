"""A discrete-event simulator with rendezvous: every class of ranks executes its own list of ops.

In: a list of ops per class. Out: what each class did when, and when each message was under way. An op is work
(`Compute`), the posting of a message (`Isend`; a receiver posts too), or waiting for its arrival (`Wait`). A message
begins when all its parties have posted it, and then takes its time while they do other work, as in
`runtime/comm/exchange.py`; a collective is a message that every party waits for at once.

Where ranks share the cores of a machine (a pool), work and messages slow each other down: if there are more of them
than cores, each gets an equal share.

A loop of many iterations is extrapolated: between a `LoopBegin` and a `RepeatExtrapolated` a class executes one
iteration, and the remaining ones take as long as that one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class Compute:
    """Work."""

    seconds: float  # on a core that nothing else uses
    share: float = 1.0  # of these seconds, in which this rank computes, and not another stage of its pipeline


@dataclass(frozen=True, slots=True)
class Isend:
    """This class is ready for a message. The op returns at once."""

    key: Hashable  # of the message
    parties: tuple[int, ...]  # the classes that must post it before it begins
    seconds: float = 0.0  # that it then takes
    share: float = 0.0  # of a core that it keeps busy meanwhile


@dataclass(frozen=True, slots=True)
class Wait:
    """Blocks until a message has arrived."""

    key: Hashable  # of the message


@dataclass(frozen=True, slots=True)
class EventBegin:
    """From here on the class is in an event."""

    event: int  # -1: the end of a step
    step: int  # of the simulation
    iteration: int  # how often the event ran before in this step


@dataclass(frozen=True, slots=True)
class LoopBegin:
    """An iteration of a loop begins here."""

    depth: int  # of the loop; inner loops have larger ones


@dataclass(frozen=True, slots=True)
class RepeatExtrapolated:
    """What happened since the `LoopBegin` of this depth happens `times` more, and takes as long each time."""

    depth: int  # of the loop
    times: int  # iterations that are left
    runs: Mapping[int, int]  # event -> how often an iteration runs it


Op = Compute | Isend | Wait | EventBegin | LoopBegin | RepeatExtrapolated


@dataclass(frozen=True, slots=True)
class Pool:
    """Cores that ranks share."""

    cores: int  # number of cores
    speed: float = 1.0  # of a core when all are busy, relative to one alone

    def rate(self, load: float) -> float:
        """The speed of each task when the work of `load` cores is under way."""
        if load <= 1:
            return 1.0
        crowded = min((load - 1) / (self.cores - 1), 1.0) if self.cores > 1 else 0.0
        return (1 - crowded * (1 - self.speed)) * min(1.0, self.cores / load)


@dataclass(slots=True)
class Interval:
    """What a class did from start to stop, in one event."""

    start: float  # seconds
    stop: float  # seconds
    begin: EventBegin  # of the event that it belongs to
    key: Hashable | None  # of the message that it waited for; None for work, and for extrapolated iterations
    busy: float  # seconds of own work


@dataclass(slots=True)
class Message:
    """The state of a message."""

    ready: set[int] = field(default_factory=set)  # classes that have posted it
    waiting: list[int] = field(default_factory=list)  # classes that wait for its arrival
    last: int = -1  # the class that posted it last
    at: EventBegin | None = None  # the event in which that class posted it
    began: float = -1.0  # -1: not all parties have posted it
    done: float = -1.0  # -1: not arrived


@dataclass(slots=True)
class Timelines:
    """The result: one timeline per class."""

    intervals: list[list[Interval]]  # class -> what it did, in order
    messages: dict[Hashable, Message]  # by key
    begins: list[list[tuple[EventBegin, float]]]  # class -> (event, when it began)
    ends: list[float]  # class -> when its last op ended


@dataclass(slots=True, eq=False)
class _Task:
    """Work or a message that is under way."""

    owner: int | None  # the class at work; None for a message
    key: Hashable  # of the message; None for work
    left: float  # remaining seconds at full speed
    load: float  # cores that it keeps busy
    begun: float  # when it began
    version: int = 0  # rises when the speed changes; older entries of the heap are void


@dataclass(frozen=True, slots=True)
class _Iteration:
    """Where an iteration began."""

    start: float  # seconds
    intervals: int  # how many the class had
    begins: int  # how many the class had


class Deadlock(Exception):
    """Classes wait for each other. A verified plan never does this."""


def run_programs(programs: Sequence[Sequence[Op]], pools: Sequence[int], pool: Pool | None = None) -> Timelines:
    """Execute a list of ops per class. pools: class -> number of the machine whose cores it shares (unused without
    `pool`). Errors: Deadlock."""
    engine = _Engine(programs, pools, pool)
    engine.run()
    return engine.timelines


class _Engine:
    def __init__(self, programs: Sequence[Sequence[Op]], pools: Sequence[int], pool: Pool | None):
        self.programs, self.pools, self.pool = programs, pools, pool
        count = len(programs)
        self.now = 0.0
        self.at = [0] * count  # class -> its next op
        self.since = [0.0] * count  # class -> when it began to wait
        self.begin = [EventBegin(-1, 0, 0)] * count  # class -> the event that it is in
        self.loops: list[dict[int, _Iteration]] = [{} for _ in range(count)]  # class -> depth -> current iteration
        self.timelines = Timelines([[] for _ in range(count)], {}, [[] for _ in range(count)], [0.0] * count)
        self.runnable = deque(range(count))  # classes that can continue
        self.heap: list[tuple[float, int, int, _Task]] = []  # (end, order of pushing, version, task)
        self.pushed = 0
        self.active: dict[int, list[_Task]] = {}  # machine -> what shares its cores
        self.updated: dict[int, float] = {}  # machine -> when `left` of its tasks was computed

    def run(self) -> None:
        while self.runnable or self.heap:
            while self.runnable:
                self.advance(self.runnable.popleft())
            if self.heap:
                when, _, version, task = heappop(self.heap)
                if version == task.version:
                    self.now = when
                    self.end(task)
        stuck = [c for c, ops in enumerate(self.programs) if self.at[c] < len(ops)]
        if stuck:
            raise Deadlock(f"classes {stuck} wait: {[self.programs[c][self.at[c]] for c in stuck[:4]]}")

    def advance(self, c: int) -> None:
        """Execute ops of class `c` until it works, waits or is done."""
        ops = self.programs[c]
        while self.at[c] < len(ops):
            op = ops[self.at[c]]
            match op:
                case Compute():
                    if op.seconds > 0:
                        self.start(self.pools[c], _Task(c, None, op.seconds, op.share, self.now))
                        return
                case Isend():
                    self.post(c, op)
                case Wait():
                    message = self.timelines.messages.setdefault(op.key, Message())
                    if message.done < 0:
                        message.waiting.append(c)
                        self.since[c] = self.now
                        return
                case EventBegin():
                    self.begin[c] = op
                    self.timelines.begins[c].append((op, self.now))
                case LoopBegin():
                    intervals, begins = len(self.timelines.intervals[c]), len(self.timelines.begins[c])
                    self.loops[c][op.depth] = _Iteration(self.now, intervals, begins)
                case RepeatExtrapolated():
                    left = (self.now - self.loops[c][op.depth].start) * op.times
                    if left > 0:  # no load: the iteration was timed with shared cores already
                        self.start(self.pools[c], _Task(c, None, left, 0.0, self.now))
                        return
            self.at[c] += 1
        self.timelines.ends[c] = self.now

    def post(self, c: int, op: Isend) -> None:
        message = self.timelines.messages.setdefault(op.key, Message())
        message.ready.add(c)
        if len(message.ready) < len(op.parties):
            return
        message.last, message.at, message.began = c, self.begin[c], self.now
        if op.seconds > 0:
            self.start(self.pools[c], _Task(None, op.key, op.seconds, op.share, self.now))
        else:
            self.arrive(op.key, message)

    def end(self, task: _Task) -> None:
        """Work is done, or a message has arrived."""
        c = task.owner
        if self.pool is not None:
            self.share(self.pools[self.timelines.messages[task.key].last if c is None else c], without=task)
        if c is None:
            self.arrive(task.key, self.timelines.messages[task.key])
            return
        op = self.programs[c][self.at[c]]
        if isinstance(op, RepeatExtrapolated):
            self.extrapolate(c, op, task.begun)
        else:
            busy = (self.now - task.begun) * (op.share if isinstance(op, Compute) else 1.0)
            self.timelines.intervals[c].append(Interval(task.begun, self.now, self.begin[c], None, busy))
        self.at[c] += 1
        self.runnable.append(c)

    def extrapolate(self, c: int, op: RepeatExtrapolated, begun: float) -> None:
        """Stretch the iteration that ended at `begun` until now: each of its events and intervals in proportion."""
        first = self.loops[c][op.depth]
        longer = (self.now - begun) / (begun - first.start)

        def later(when: float) -> float:
            return self.now if when == begun else begun + (when - first.start) * longer

        known: dict[int, EventBegin] = {}
        for begin, when in self.timelines.begins[c][first.begins :]:
            known[id(begin)] = replace(begin, iteration=begin.iteration + op.runs.get(begin.event, 1))
            self.timelines.begins[c].append((known[id(begin)], later(when)))
        for p in self.timelines.intervals[c][first.intervals :]:
            begin = known.get(id(p.begin), p.begin)
            self.timelines.intervals[c].append(Interval(later(p.start), later(p.stop), begin, None, p.busy * longer))

    def arrive(self, key: Hashable, message: Message) -> None:
        message.done = self.now
        for c in message.waiting:
            if self.since[c] < self.now:
                self.timelines.intervals[c].append(Interval(self.since[c], self.now, self.begin[c], key, 0.0))
            self.at[c] += 1
            self.runnable.append(c)

    def start(self, machine: int, task: _Task) -> None:
        if self.pool is None:
            self.push(task, 1.0)
        else:
            self.share(machine, new=task)

    def share(self, machine: int, new: _Task | None = None, without: _Task | None = None) -> None:
        """The load of a machine changes: all its tasks continue at another speed."""
        if self.pool is None:
            raise ValueError("only machines with a pool share cores")
        tasks = self.active.setdefault(machine, [])
        passed = (self.now - self.updated.get(machine, 0.0)) * self.pool.rate(sum(t.load for t in tasks))
        for task in tasks:
            task.left = max(task.left - passed, 0.0)
        self.updated[machine] = self.now
        if without is not None:
            tasks.remove(without)
        if new is not None:
            tasks.append(new)
        rate = self.pool.rate(sum(t.load for t in tasks))
        for task in tasks:
            task.version += 1
            self.push(task, rate)

    def push(self, task: _Task, rate: float) -> None:
        self.pushed += 1
        heappush(self.heap, (self.now + task.left / rate, self.pushed, task.version, task))
