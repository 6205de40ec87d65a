"""Plans and positions made by hand: a small choreography in which everything that matters for waiting occurs."""

from __future__ import annotations

from rldsl.plan.codec import encode, plan_id
from rldsl.plan.events import (
    Event,
    When,
    Fetch,
    Generate,
    Infer,
    Lengths,
    Loop,
    Realloc,
    Sampling,
    Save,
    Train,
    Transfer,
)
from rldsl.plan.model import FORMAT, Header, Layout, Mesh, Plan, Spread
from rldsl.postmortem.dumps import EventRun, Heartbeat, Phase, RankDump, RankPosition, RingEntry
from rldsl.postmortem.wait_order import WaitOrder

# Ranks 0-3 generate in two replicas of two stages, 4-7 score; 0-3 train. An evaluation has turns of its own.
ALL, LEFT, RIGHT = Mesh("all", ((0, 8),)), Mesh("left", ((0, 4),)), Mesh("right", ((4, 8),))
FETCH, GENERATE, LENGTHS, TRANSFER, SCORE, TRAIN, REALLOC, TURN, SAVE = range(9)

PLAN = Plan(
    header=Header(FORMAT, "test", "p.rlf", "f", 8, 8, 9, 1), meshes=(ALL, LEFT, RIGHT),
    layouts=(Layout("L0", "left", dp=2, pp=2), Layout("L1", "right", tp=4), Layout("L2", "all", tp=8)),
    spreads=(Spread("s0", "left", "L0"), Spread("s1", "right", "L1")), models=(), data=(), spaces=(), frames=(),
    values=(), functions=(), programs=(), groups=(), classes=(),
    body=(Loop("steps", 9, (
        Fetch(id=FETCH, mesh="left", at="p.rlf:5:3", data="rows", frames=("rows",)),
        Generate(id=GENERATE, mesh="left", at="p.rlf:6:3", model="actor", layout="L0", spread="s0", prompts="rows",
                 frame="gen", sampling=Sampling(), writes=("gen.tokens@s0",)),
        Lengths(id=LENGTHS, mesh="all", at="p.rlf:6:3", because="the rows of gen are divided by length",
                frame="gen", spread="s0"),
        Transfer(id=TRANSFER, mesh="all", at="p.rlf:7:3", because="judge.score reads gen.tokens on mesh 4:8",
                 values=("gen.tokens",), src="s0", dst="s1", reads=("gen.tokens@s0",), writes=("gen.tokens@s1",)),
        Infer(id=SCORE, mesh="right", at="p.rlf:7:3", model="judge", layout="L1", spread="s1", frame="gen",
              output_name="scores", value="score", reads=("gen.tokens@s1",)),
        Train(id=TRAIN, mesh="left", at="p.rlf:8:3", model="actor", layout="L0", spread="s0", frames=("gen",), loss="l",
              model_outputs=(), data_inputs=(), outputs=(), reads=("gen.tokens@s0",)),
        Realloc(id=REALLOC, mesh="all", at="p.rlf:7:3", because="judge is updated from actor", model="judge", src="L0",
                dst="L1", source="actor", writes=("judge@L1",)),
        Loop("turns", 3, (Infer(id=TURN, mesh="right", at="p.rlf:10:5", model="judge", layout="L1", spread="s1",
                                frame="gen", output_name="values", value="v", reads=("judge@L1",)),)),
        When(2, (Save(id=SAVE, mesh="left", at="p.rlf:12:13", model="actor", layout="L0", path="x"),)),
    )),))
DATA = encode(PLAN)


def partners(order: WaitOrder, event: Event, rank: int) -> tuple[int, ...]:
    """The other ranks without which `rank` cannot end the event."""
    return tuple(q for q in order.group(event, rank).ranks if q != rank)


def at(event: int, *turns: int, phase: Phase = "begins", call: str = "all_reduce", seconds: float = 41.0,
       awaits: EventRun | None = None, function: str = "") -> RankPosition:
    return RankPosition(EventRun(event, turns), phase, seconds, awaits, function, call)


def dump(rank: int, position: RankPosition, **more: object) -> RankDump:
    given = dict(plan=plan_id(DATA), start="s", rank=rank, world=8, machine="host/1", pid=100 + rank, time=1000.0,
                 first=False, code="", reason="", position=position,
                 ring=(RingEntry(position.seconds, position.at, position.phase, position.awaits, position.function),))
    return RankDump(**(given | more))  # type: ignore[arg-type]


def sign(rank: int, position: RankPosition, **more: object) -> Heartbeat:
    given = dict(beat=9, machine="host/1", pid=100 + rank, time=960.0, position=position, silent=2.5)
    return Heartbeat(**(given | more))  # type: ignore[arg-type]
