"""`simulate`: one steady step of a plan on a cluster.

In: a verified plan, a cluster, expected lengths. Out: a `Timeline`.
Errors: RL0096 the cluster is too small, RL0215 its file lacks rates, RL0205 durations of what the plan does not call,
RL0401 a serving engine has too little memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import pairwise, takewhile
from math import ceil, lcm

from rldsl.clusters import Cluster
from rldsl.diag import counted, fail
from rldsl.plan.conversing import conversing_models
from rldsl.plan.events import Compute, Generate, Loop, ModelCall, Offload, Onload, Save, When
from rldsl.plan.model import Plan
from rldsl.plan.notation import human
from rldsl.plan.projection import Path, event_paths, walk
from rldsl.progress import stage
from rldsl.simulate.critical_path import find_critical_path
from rldsl.simulate.engine import Pool, Timelines, run_programs
from rldsl.simulate.lengths import AT_MOST, Lengths, token_frames
from rldsl.simulate.model import PeriodicEvents, Span, Timeline
from rldsl.simulate.program import Occasions, build_programs, iterations_ahead, periodic_blocks, step_loop
from rldsl.simulate.time_costs import engine_room
from rldsl.simulate.work_counts import build_shard
from rldsl.simulate.world import World

STEPS = 3  # only the last one is steady: transfers at the top of a step overlap with the end of the step before


def simulate(plan: Plan, cluster: Cluster, lengths: Lengths = AT_MOST,
             durations: Mapping[str, float] | None = None) -> Timeline:
    """Time one step. durations: seconds that calls are known to take, by `known_events`. Errors: RL0096 the cluster has
    too few nodes, or too few devices in each, RL0215 its file says too little, RL0205 a duration of no call, RL0401 a
    serving engine has too little memory."""
    check_cluster(plan, cluster)
    known = known_events(plan, durations or {})
    stage("simulating a step")
    world = World(plan, cluster, lengths, durations=known)
    check_engines(world)
    return run(world)


def known_events(plan: Plan, durations: Mapping[str, float]) -> dict[int, float]:
    """Seconds of events by their ids. A name is that of a call (`actor.train`: of all calls that are called so), or of
    what a call or a computation makes (`gen`, `reward`). Errors: RL0205."""
    names: dict[str, list[int]] = defaultdict(list)
    for event, _ in event_paths(plan):
        if isinstance(event, ModelCall | Compute) and event.at:
            for name in dict.fromkeys((event.display_name, *event.result_names)):
                if "#" not in name:  # a part of an expression
                    names[name].append(event.id)
    found: dict[int, float] = {}
    for name, seconds in durations.items():
        if name not in names:
            raise fail("RL0205", f"the plan calls nothing that is named `{name}`", place=plan.header.program,
                       help=f"did you mean `{near[0]}`?" if (near := get_close_matches(name, names, n=1)) else
                       "durations can be given for " + ", ".join(f"`{known}`" for known in names))
        twice = next((x for x in durations if x != name and {*names.get(x, ())} & {*names[name]}), "")
        if twice:
            raise fail("RL0205", f"`{name}` and `{twice}` are the same call", place=plan.header.program,
                       help="give its duration once")
        found |= dict.fromkeys(names[name], seconds)
    return found


def run(world: World) -> Timeline:
    timelines = _simulated(world)
    begin, end, last = _last_step(timelines)
    seconds = end - begin
    lengths: dict[tuple[When, ...], float] = {(): seconds}
    found: list[PeriodicEvents] = []
    for path in periodic_blocks(step_loop(world).body):
        lengths[path] = _with_blocks(world, path, seconds)
        own = tuple(e.id for e, around in walk(path[-1].body) if not any(
            isinstance(b, When) and b.seldom for b in _outside_step_loop(around)))
        found.append(PeriodicEvents(lcm(*(e.period for e in path)), own, max(0.0, lengths[path] - lengths[path[:-1]]),
                                    min((e.first for e in path if e.first), default=0)))
    return Timeline(seconds, world.classes.ranks, _spans(timelines, begin), _idle(world, timelines, begin, end),
                    find_critical_path(timelines, last, end, begin), _token_count(world), tuple(found),
                    _estimated_models(world),
                    _free_rates(world))


def _outside_step_loop(path: Path) -> Path:
    """The blocks outside the first loop: those of which a `When` counts steps."""
    return tuple(takewhile(lambda block: not isinstance(block, Loop), path))


def _simulated(world: World, iterations: int = STEPS, also: Occasions = Occasions()) -> Timelines:  # noqa: B008 (immutable)
    cluster = world.cluster
    nodes = [r // world.per_node for r in world.classes.first]
    pool = Pool(max(1, cluster.cores // world.machine.threads), cluster.core_speed) if cluster.cores else None
    return run_programs(build_programs(world, iterations, also), nodes, pool)


def _with_blocks(world: World, blocks: tuple[When, ...], seconds: float) -> float:
    """What a step takes in which blocks run, each around the next. With a lag, parts of them run in the iterations
    before, and what these take longer counts. seconds: of a steady step."""
    earlier, period = iterations_ahead(blocks) if world.lag else 0, lcm(*(b.period for b in blocks))
    step = STEPS - 1 + earlier
    if period > 1 and earlier >= period:  # it begins again before it has ended
        ends = _ends_of_iterations(_simulated(world, step + 1 + STEPS * period, Occasions(blocks, step, period)))
        return ends[-1] - ends[-1 - period] - (period - 1) * seconds
    after = 1 if earlier else 0  # ranks that are late there still hold up those of the next iteration
    ends = _ends_of_iterations(_simulated(world, step + 1 + after, Occasions(blocks, step)))
    return ends[-1] - ends[STEPS - 2] - (earlier + after) * seconds


def check_cluster(plan: Plan, cluster: Cluster) -> None:
    """Check that the plan can be simulated on the cluster. Errors: RL0096, RL0215."""
    unknown = cluster.unknown()
    if unknown:
        raise fail("RL0215", f"`{cluster.name}` does not give the speed of its devices", place=cluster.place,
                   notes=(f"missing, or 0: {', '.join(unknown)}",),
                   help="start the file with a preset (`preset: h100x8`), add the numbers, or measure this machine "
                        "with `rlc profile`")
    header = plan.header
    if header.world > cluster.world:
        raise fail("RL0096",
                   f"the plan is for {counted(header.world, 'rank')}, but `{cluster.name}` has "
                   f"{counted(cluster.world, 'device')}", place=cluster.place,
                   help="use a larger cluster, or compile for this one")
    size = min(header.devices_per_node, header.world)
    nodes = -(-header.world // size)
    if size > cluster.gpus or nodes > cluster.nodes:
        raise fail("RL0096",
                   f"the plan is for {_machines(nodes, size)}, but `{cluster.name}` has "
                   f"{_machines(cluster.nodes, cluster.gpus)}", place=cluster.place,
                   help="links within a node are faster than links between nodes: compile with `cluster "
                        f"nodes={cluster.nodes} gpus={cluster.gpus}`, or with the name of this cluster")


def check_engines(world: World) -> None:
    """Check that serving engines have memory for the weights and the longest sequence. Errors: RL0401."""
    cluster = world.cluster
    for event, _ in event_paths(world.plan):
        if not cluster.cache_gb or not isinstance(event, Generate) or event.conversation is not None \
                or event.id in world.durations:
            continue
        row, model, layout = world.row(event.frame), world.models[event.model], world.layouts[event.layout]
        if (room := engine_room(cluster, model, layout)) >= row.prompt + row.longest:
            continue
        shards = [build_shard(model, layout, s) for s in range(layout.pp)]
        weights = max(s.weight_bytes for s in shards)
        sequence = max(s.layers * s.cache * s.item * s.attending for s in shards) * (row.prompt + row.longest)
        raise fail("RL0401", f"a serving engine of `{event.display_name}` has `cache_gb: {cluster.cache_gb:g}`, too "
                   f"little for {human(weights)} of weights and a sequence of {row.prompt + row.longest:,.0f} tokens",
                   place=cluster.place, notes=(f"the KV cache of that sequence: {human(ceil(sequence))}",
                                              f"there is room for {max(room, 0):,.0f} tokens next to the weights"),
                   help="state more in the cluster file, up to the memory of a device, or use larger tp or pp")


def _machines(nodes: int, devices: int) -> str:
    return f"{nodes} node{'s' * (nodes > 1)} of {devices} device{'s' * (devices > 1)}"


def _last_step(timelines: Timelines) -> tuple[float, float, int]:
    """Begin and end of the last step, and the class that ends it."""
    before, after = _ends_of_iterations(timelines)[STEPS - 2:STEPS]
    ends = _ends(timelines)
    return before, after, max(range(len(ends)), key=lambda c: ends[c][STEPS - 1])


def _ends(timelines: Timelines) -> list[list[float]]:
    """[class][iteration]"""
    return [[at for at_event, at in begins if at_event.event == -1] for begins in timelines.begins]


def _ends_of_iterations(timelines: Timelines) -> list[float]:
    """When the last class ends each iteration."""
    return [max(ends) for ends in zip(*_ends(timelines), strict=True)]


def _spans(timelines: Timelines, zero: float) -> tuple[Span, ...]:
    found = []
    for c, begins in enumerate(timelines.begins):
        busy: dict[int, float] = defaultdict(float)
        times = [start for _, start in begins]
        for interval in timelines.intervals[c]:
            busy[bisect_right(times, interval.start) - 1] += interval.busy
        for i, ((at_event, start), (_, stop)) in enumerate(pairwise(begins)):
            if at_event.step == STEPS - 1 and at_event.event >= 0:
                found.append(Span(c, at_event.event, start - zero, stop - zero, busy[i], at_event.iteration))
    return tuple(found)


def _idle(world: World, timelines: Timelines, begin: float, end: float) -> tuple[tuple[str, float], ...]:
    """(mesh, share of the step in which its ranks do nothing), of the meshes on which calls run."""
    busy = [sum(p.busy for p in intervals if p.begin.step == STEPS - 1) for intervals in timelines.intervals]
    meshes = dict.fromkeys(e.mesh for e, _ in event_paths(world.plan) if isinstance(e, ModelCall))
    found = []
    for mesh in meshes:
        members = world.meshes[mesh].members()
        worked = sum(busy[world.classes.of[r]] for r in members)
        found.append((mesh, max(0.0, 1 - worked / (len(members) * (end - begin))) if end > begin else 0.0))
    return tuple(found)


def _token_count(world: World) -> int:
    return round(sum(rows * world.lengths.of(f).tokens for f, rows in token_frames(world.plan)))


def _estimated_models(world: World) -> tuple[tuple[str, str], ...]:
    calls = dict.fromkeys((e.model, world.layouts[e.layout].tp) for e, _ in event_paths(world.plan)
                          if isinstance(e, ModelCall))
    names = dict.fromkeys(m for m, tp in calls if world.machine.measured(world.models[m], tp) is None)
    return tuple((m, world.machine.why_not_measured(world.models[m])) for m in names)


def _free_rates(world: World) -> tuple[str, ...]:
    """Rates that this plan needs and the cluster's file leaves out; they count as free."""
    header, machine = world.plan.header, world.machine
    used = {type(e) for e, _ in event_paths(world.plan)}
    asked = {"host_gb_s": bool(used & {Offload, Onload}) and not machine.shared, "disk_gb_s": Save in used,
             "link_us": world.per_node > 1, "network_us": header.world > world.per_node, "kernel_us": True,
             "row_us": True, **dict.fromkeys(("conversation_us", "turn_us"), bool(conversing_models(world.plan)))}
    return tuple(name for name, needed in asked.items() if needed and not getattr(world.cluster, name))
