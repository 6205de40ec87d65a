"""`simulate`: a plan's steady step on a cluster."""

from __future__ import annotations

from collections import defaultdict

from rldsl.clusters import Cluster
from rldsl.diag import fail
from rldsl.plan.events import Every, Generate, Infer, Train
from rldsl.plan.model import Plan
from rldsl.plan.project import events, walk
from rldsl.simulate.critical import critical
from rldsl.simulate.engine import Played, Pool, play
from rldsl.simulate.lengths import Lengths, made
from rldsl.simulate.model import Occasion, Span, Timeline
from rldsl.simulate.program import occasions, programs, step_of
from rldsl.simulate.world import World

STEPS = 3  # the last one is steady: movement that stands at the top of a step overlaps with the end of the one before


def simulate(plan: Plan, cluster: Cluster, lengths: Lengths = Lengths()) -> Timeline:
    """Errors: RL0096 the cluster has another number of devices, RL0215 its file says too little."""
    check(plan, cluster)
    return run(World(plan, cluster, lengths))


def run(world: World) -> Timeline:
    played = _played(world)
    begin, end, last = _step(played)
    seconds = end - begin
    found = [Occasion(each.period, tuple(e.id for e, _ in walk(each.body)), max(0.0, _length(world, each) - seconds))
             for each in occasions(step_of(world).body)]
    return Timeline(seconds, world.classes.ranks, _spans(played, begin), _idle(world, played, begin, end),
                    critical(played, last, end, begin), _tokens(world), tuple(found), _estimated(world))


def _played(world: World, also: Every | None = None) -> Played:
    cluster = world.cluster
    nodes = [r // world.per_node for r in world.classes.first]
    pool = Pool(max(1, cluster.cores // world.machine.threads), cluster.core_speed) if cluster.cores else None
    return play(programs(world, STEPS, also), nodes, pool)


def _length(world: World, also: Every) -> float:
    begin, end, _ = _step(_played(world, also))
    return end - begin


def check(plan: Plan, cluster: Cluster) -> None:
    """Whether the plan can be simulated on the cluster."""
    unknown = cluster.unknown()
    if unknown:
        raise fail("RL0215", f"`{cluster.name}` does not say how fast it is", place=cluster.name,
                   notes=(f"missing: {', '.join(unknown)}",), help="begin the file with a preset "
                   "(`preset: h100x8`), give the numbers, or measure this machine with `rlc profile`")
    header = plan.header
    if header.world > cluster.world:
        raise fail("RL0096", f"the plan is for {header.world} ranks, `{cluster.name}` has {cluster.world} "
                   f"device{'s' * (cluster.world > 1)}", place=cluster.name,
                   help="name a larger cluster, or compile for this one")


def _step(played: Played) -> tuple[float, float, int]:
    """Begin and end of the last step, and the class that ends it."""
    ends = [[at for mark, at in begins if mark.event == -1] for begins in played.begins]
    before, after = (max(e[k] for e in ends) for k in (STEPS - 2, STEPS - 1))
    return before, after, max(range(len(ends)), key=lambda c: ends[c][STEPS - 1])


def _spans(played: Played, zero: float) -> tuple[Span, ...]:
    found = []
    for c, begins in enumerate(played.begins):
        busy: dict[tuple[int, int], float] = defaultdict(float)
        for piece in played.pieces[c]:
            if piece.begin.step == STEPS - 1:
                busy[piece.begin.event, piece.begin.turn] += piece.busy
        for (mark, start), (_, stop) in zip(begins, begins[1:]):
            if mark.step == STEPS - 1 and mark.event >= 0:
                found.append(Span(c, mark.event, start - zero, stop - zero, busy[mark.event, mark.turn], mark.turn))
    return tuple(found)


def _idle(world: World, played: Played, begin: float, end: float) -> tuple[tuple[str, float], ...]:
    """Of the meshes on which calls run."""
    busy = [sum(p.busy for p in pieces if p.begin.step == STEPS - 1) for pieces in played.pieces]
    meshes = dict.fromkeys(e.mesh for e, _ in events(world.plan) if isinstance(e, Generate | Infer | Train))
    found = []
    for mesh in meshes:
        members = world.meshes[mesh].members()
        worked = sum(busy[world.classes.of[r]] for r in members)
        found.append((mesh, max(0.0, 1 - worked / (len(members) * (end - begin))) if end > begin else 0.0))
    return tuple(found)


def _tokens(world: World) -> int:
    return round(sum(f.count * world.lengths.of(f).tokens for f in made(world.plan)))


def _estimated(world: World) -> tuple[str, ...]:
    calls = dict.fromkeys((e.model, world.layouts[e.layout].tp) for e, _ in events(world.plan)
                          if isinstance(e, Generate | Infer | Train))
    return tuple(dict.fromkeys(m for m, tp in calls if world.machine.measured(world.models[m], tp) is None))
