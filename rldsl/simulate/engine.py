"""Discrete events under rendezvous: every class of ranks walks its own list of acts.

In: for each class a list of acts. Out: what each did when, and when each message went. An act is work (`Run`), saying
that one is ready for a message (`Post`), or waiting until it has arrived (`Wait`). A message begins when all its
parties are ready and then takes its time beside whatever they do: that is how `runtime/comm/exchange.py` posts early
and waits late, and a collective is a message for which everybody waits at once.

Where ranks share the cores of a machine (a pool), work and messages in it slow each other down: with more of them than
cores each gets an equal share.

A loop of many turns is not played turn by turn: between a `Mark` and an `Again` a class goes through one turn, and the
turns that are left take as long as that one did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class Run:
    """Work of `seconds` alone on a core. share: fraction of these seconds in which this rank computes, and not another
    stage of its pipeline."""

    seconds: float
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Post:
    """Ready for message `key`, which takes `seconds` once all of `parties` (classes) are. share: of a core that it
    keeps busy while it is on its way."""

    key: Hashable
    parties: tuple[int, ...]
    seconds: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    key: Hashable


@dataclass(frozen=True, slots=True)
class Begin:
    """From here on the class is in an event. step: of the simulation; turn: of the event within the step."""

    event: int
    step: int
    turn: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A turn of a loop begins here. depth: of the loop; inner ones have larger ones."""

    depth: int


@dataclass(frozen=True, slots=True)
class Again:
    """What happened since the mark of this depth happens `times` more. runs: event -> how often a turn runs it."""

    depth: int
    times: int
    runs: Mapping[int, int]


Act = Run | Post | Wait | Begin | Mark | Again


@dataclass(frozen=True, slots=True)
class Pool:
    """Cores that ranks share. speed: of a core when all are busy, against one alone."""

    cores: int
    speed: float = 1.0

    def rate(self, load: float) -> float:
        """How fast each goes when the work of `load` cores is under way."""
        if load <= 1:
            return 1.0
        crowded = min((load - 1) / (self.cores - 1), 1.0) if self.cores > 1 else 0.0
        return (1 - crowded * (1 - self.speed)) * min(1.0, self.cores / load)


@dataclass(slots=True)
class Piece:
    """Of what a class did: from start to stop, in one event. key: of the message that it waited for; None for work, and
    for turns that were not played. busy: seconds of own work."""

    start: float
    stop: float
    begin: Begin
    key: Hashable | None
    busy: float


@dataclass(slots=True)
class Message:
    """last: the class that was ready last, at `began`. at: the event in which it was posted."""

    ready: set[int] = field(default_factory=set)
    waiting: list[int] = field(default_factory=list)
    last: int = -1
    at: Begin | None = None
    began: float = -1.0
    done: float = -1.0


@dataclass(slots=True)
class Played:
    pieces: list[list[Piece]]
    messages: dict[Hashable, Message]
    begins: list[list[tuple[Begin, float]]]
    ends: list[float]


@dataclass(slots=True, eq=False)
class _Task:
    """owner: a class at work, or None for a message. left: seconds alone. load: cores that it wants."""

    owner: int | None
    key: Hashable
    left: float
    load: float
    begun: float
    version: int = 0


@dataclass(frozen=True, slots=True)
class _Turn:
    """Where a turn began: when, and how many pieces and begins of the class there were."""

    start: float
    pieces: int
    begins: int


class Deadlock(Exception):
    """Classes wait for each other; never for a verified plan."""


def play(programs: Sequence[Sequence[Act]], pools: Sequence[int], pool: Pool | None = None) -> Played:
    """pools: class -> number of the machine whose cores it shares (unused without `pool`)."""
    engine = _Engine(programs, pools, pool)
    engine.run()
    return engine.played


class _Engine:
    def __init__(self, programs: Sequence[Sequence[Act]], pools: Sequence[int], pool: Pool | None):
        self.programs, self.pools, self.pool = programs, pools, pool
        count = len(programs)
        self.now = 0.0
        self.at = [0] * count  # the next act of each class
        self.since = [0.0] * count  # when it began to wait
        self.begin = [Begin(-1, 0, 0)] * count
        self.turns: list[dict[int, _Turn]] = [{} for _ in range(count)]  # of each class, by depth of the loop
        self.played = Played([[] for _ in range(count)], {}, [[] for _ in range(count)], [0.0] * count)
        self.going = deque(range(count))  # classes that can go on
        self.heap: list[tuple[float, int, int, _Task]] = []
        self.pushed = 0
        self.active: dict[int, list[_Task]] = {}  # machine -> what shares its cores
        self.updated: dict[int, float] = {}

    def run(self) -> None:
        while self.going or self.heap:
            while self.going:
                self.advance(self.going.popleft())
            if self.heap:
                when, _, version, task = heappop(self.heap)
                if version == task.version:
                    self.now = when
                    self.end(task)
        stuck = [c for c, acts in enumerate(self.programs) if self.at[c] < len(acts)]
        if stuck:
            raise Deadlock(f"classes {stuck} wait: {[self.programs[c][self.at[c]] for c in stuck[:4]]}")

    def advance(self, c: int) -> None:
        """Go on with class `c` until it works, waits or is done."""
        acts = self.programs[c]
        while self.at[c] < len(acts):
            act = acts[self.at[c]]
            match act:
                case Run():
                    if act.seconds > 0:
                        self.start(self.pools[c], _Task(c, None, act.seconds, act.share, self.now))
                        return
                case Post():
                    self.post(c, act)
                case Wait():
                    message = self.played.messages.setdefault(act.key, Message())
                    if message.done < 0:
                        message.waiting.append(c)
                        self.since[c] = self.now
                        return
                case Begin():
                    self.begin[c] = act
                    self.played.begins[c].append((act, self.now))
                case Mark():
                    pieces, begins = len(self.played.pieces[c]), len(self.played.begins[c])
                    self.turns[c][act.depth] = _Turn(self.now, pieces, begins)
                case Again():
                    left = (self.now - self.turns[c][act.depth].start) * act.times
                    if left > 0:  # the cores have been shared already when the turn was timed
                        self.start(self.pools[c], _Task(c, None, left, 0.0, self.now))
                        return
            self.at[c] += 1
        self.played.ends[c] = self.now

    def post(self, c: int, act: Post) -> None:
        message = self.played.messages.setdefault(act.key, Message())
        message.ready.add(c)
        if len(message.ready) < len(act.parties):
            return
        message.last, message.at, message.began = c, self.begin[c], self.now
        if act.seconds > 0:
            self.start(self.pools[c], _Task(None, act.key, act.seconds, act.share, self.now))
        else:
            self.arrive(act.key, message)

    def end(self, task: _Task) -> None:
        """Work is done, or a message has arrived."""
        c = task.owner
        if self.pool is not None:
            self.share(self.pools[self.played.messages[task.key].last if c is None else c], without=task)
        if c is None:
            self.arrive(task.key, self.played.messages[task.key])
            return
        act = self.programs[c][self.at[c]]
        if isinstance(act, Again):
            self.again(c, act, task.begun)
        else:
            assert isinstance(act, Run)
            busy = (self.now - task.begun) * act.share
            self.played.pieces[c].append(Piece(task.begun, self.now, self.begin[c], None, busy))
        self.at[c] += 1
        self.going.append(c)

    def again(self, c: int, act: Again, begun: float) -> None:
        """The turn that ended at `begun`, drawn out until now: each of its events and pieces has its part of it."""
        turn = self.turns[c][act.depth]
        longer = (self.now - begun) / (begun - turn.start)

        def later(when: float) -> float:
            return self.now if when == begun else begun + (when - turn.start) * longer

        known: dict[int, Begin] = {}
        for mark, when in self.played.begins[c][turn.begins :]:
            known[id(mark)] = replace(mark, turn=mark.turn + act.runs.get(mark.event, 1))
            self.played.begins[c].append((known[id(mark)], later(when)))
        for p in self.played.pieces[c][turn.pieces :]:
            mark = known.get(id(p.begin), p.begin)
            self.played.pieces[c].append(Piece(later(p.start), later(p.stop), mark, None, p.busy * longer))

    def arrive(self, key: Hashable, message: Message) -> None:
        message.done = self.now
        for c in message.waiting:
            if self.since[c] < self.now:
                self.played.pieces[c].append(Piece(self.since[c], self.now, self.begin[c], key, 0.0))
            self.at[c] += 1
            self.going.append(c)

    def start(self, machine: int, task: _Task) -> None:
        if self.pool is None:
            self.push(task, 1.0)
        else:
            self.share(machine, new=task)

    def share(self, machine: int, new: _Task | None = None, without: _Task | None = None) -> None:
        """Who uses the cores of a machine changes: all go on at another rate."""
        assert self.pool is not None
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
