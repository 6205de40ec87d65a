"""What is written for speed gives what its definition gives, straight down, on random layouts."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from rldsl.memory.reshard_buffers import _buffered_elements
from rldsl.passes.list_scheduling import Task, list_schedule
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.reshard import planning
from rldsl.reshard.arrivals import Share
from rldsl.reshard.box_classes import BoxClass, box_classes
from rldsl.reshard.in_place import buffer_elements, pieces_by_parameter, split_message
from rldsl.reshard.intra_node import elements_arriving
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.records import ReshardPlan
from rldsl.reshard.rounds import ROUNDS_IN_FLIGHT, Message, like_messages, num_rounds, rank_rounds
from rldsl.reshard.reshard_cache import ReshardCache, reshard_cache
from rldsl.reshard.transfer_slices import rank_slices
from rldsl.sharding.boxes import Box, Cell, contains, intersect, parameters, pieces_of_cell, stages, volume
from rldsl.sharding.rank_sets import Ranks, group_equal_ranks
from rldsl.verify.box_classes import _pairs_on_all, class_faults, overlapping
from tests.moe.test_boxes import MODEL as EXPERTS
from tests.plan_algebra.models import model
from tests.realloc.cases import packed_elements
from tests.verify.test_reshard_records import LAYERS, layouts


def cases(count: int, seed: int) -> Iterator[tuple[Model, Layout, Mesh, Layout, Mesh, int]]:
    draw = random.Random(seed)
    for n in range(count):
        made = draw.choice((model("gqa", layers=LAYERS), model("fused", layers=LAYERS), EXPERTS))
        first, ranks, start, wanting = draw.choice(((0, 16, 0, 32), (0, 24, 8, 16), (0, 8, 8, 24), (0, 32, 0, 32)))
        a, b = Mesh("a", ((first, first + ranks),)), Mesh("b", ((start, start + wanting),))
        src, dst = layouts("a", ranks, made, draw, n % 4), layouts("b", wanting, made, draw, draw.choice((0, 1, 3)))
        yield made, src, a, dst, b, draw.choice((2, 4, 8))


def cells_of(layout: Layout) -> list[Cell]:
    shards = layout.dp // layout.ep if layout.zero else 1
    return [Cell(pp, part, shard) for pp in range(layout.pp) for part in range(layout.tp * layout.ep)
            for shard in range(shards)]


def owners(made: Model, name: str, box: Box, layout: Layout) -> tuple[Cell, ...]:
    """Every cell with a piece around a box, asked one by one."""
    p = next(p for p in parameters(made) if p.name == name)
    return tuple(sorted(cell for cell in cells_of(layout)
                        if any(contains(x.box, box) for x in pieces_of_cell(p, made.layers, layout, cell))))


@pytest.mark.parametrize("seed", range(3))
def test_a_box_is_in_the_class_of_its_own_holders_and_needers(seed: int) -> None:
    for made, src, _, dst, _, _ in cases(4, seed):
        found = box_classes(made, src, dst)
        assert len({(c.holders, c.needers) for c in found}) == len(found), "no two classes have the same cells"
        total: dict[str, int] = defaultdict(int)
        for c in found:
            at = 0
            for segment in c.segments:
                assert segment.start == at
                at += volume(segment.box) * len(segment.layers)
                for i in (0, len(segment.layers) - 1):
                    assert owners(made, segment.name(i), segment.box, src) == c.holders
                    assert owners(made, segment.name(i), segment.box, dst) == c.needers
                for i in range(len(segment.layers)):
                    total[segment.name(i)] += volume(segment.box)
            assert at == c.size
        wanted = {p.name: volume(tuple((0, n) for n in p.spec.shape)) for p in parameters(made)
                  if stages(p, made.layers, dst)}
        assert total == wanted and not [*class_faults(made, src, dst, found)]


def boxes_of(c: BoxClass, start: int, stop: int) -> tuple[tuple[str, Box], ...]:
    """[start, stop) of a class, segment by segment and layer by layer, from the first on."""
    out: list[tuple[str, Box]] = []
    for segment in c.segments:
        for i in range(len(segment.layers)):
            size = volume(segment.box)
            first, past = (min(max(x - segment.start - i * size, 0), size) for x in (start, stop))
            lengths = [b - a for a, b in segment.box]
            dim = next((d for d, n in enumerate(lengths) if n >= 256 or n == max(lengths)), 0)
            low, high = segment.box[dim] if segment.box else (0, 1)
            row = size // (high - low)
            a, b = ((2 * x + row) // (2 * row) for x in (first, past))
            if a < b:
                part = (*segment.box[:dim], (low + a, low + b), *segment.box[dim + 1 :])
                out.append((segment.name(i), part if segment.box else ()))
    return tuple(out)


def messages(plan: ReshardPlan, slices: Sequence[tuple[int, int, int, int, int]], number: int,
             buckets: int) -> tuple[Message, ...]:
    short, by_peer = plan.busiest // (32 * buckets), defaultdict[int, list[tuple[str, Box]]](list)
    for step, peer, i, start, stop in slices:
        size = plan.classes[i].size
        for bucket in range(buckets):
            if bucket + ROUNDS_IN_FLIGHT * step == number:
                first, past = size * bucket // buckets, size * (bucket + 1) // buckets
                interval = tuple(first + x * (past - first) // size for x in (start, stop))
                if size <= short:
                    interval = (start, stop) if i % buckets == bucket else (0, 0)
                by_peer[peer] += boxes_of(plan.classes[i], *interval)
    return tuple(Message(peer, tuple(boxes)) for peer, boxes in sorted(by_peer.items()) if boxes)


@pytest.mark.parametrize("seed", range(3))
def test_rounds_are_the_parts_of_all_slices_that_travel_in_them(seed: int) -> None:
    for made, src, a, dst, b, devices in cases(3, 10 + seed):
        plan = plan_reshard(made, src, a, dst, b, devices)
        ranks = sorted({*a.members(), *b.members()})
        for rank in (ranks[0], ranks[len(ranks) // 2], ranks[-1]):
            shared = ReshardCache(plan)
            assert rank_slices(plan, rank, shared) == rank_slices(plan, rank) == rank_slices(plan, rank, shared)
            for buckets in (1, 3):
                sends, receives = rank_slices(plan, rank)
                assert [(r.sends, r.receives) for r in rank_rounds(plan, rank, buckets)] == [
                    (messages(plan, sends, n, buckets), messages(plan, receives, n, buckets))
                    for n in range(num_rounds(plan, buckets))]


@pytest.mark.parametrize("seed", range(3))
def test_what_a_device_receives_of_a_class_is_the_overlap_of_two_intervals(seed: int) -> None:
    for made, src, a, dst, b, devices in cases(4, 20 + seed):
        for group in plan_reshard(made, src, a, dst, b, devices).groups:
            arrivals = group.arrivals
            for one, held, bounds in zip(arrivals.wanted.lists, arrivals.held, arrivals.bounds, strict=True):
                at = 0
                for position, (i, size) in enumerate(zip(one.classes, one.sizes, strict=True)):
                    if position in held:
                        assert arrivals.parts(i) == ()
                        continue
                    parts = tuple(Share(device, max(low, at) - at, min(high, at + size) - at)
                                  for device, low, high in zip(one.needers, (0, *bounds), bounds, strict=False)
                                  if max(low, at) < min(high, at + size))
                    assert arrivals.parts(i) == parts
                    at += size
            assert arrivals.all_parts() == {i: arrivals.parts(i) for i in arrivals}
            assert bool(arrivals) == (len(arrivals) > 0)


@pytest.mark.parametrize("seed", range(3))
def test_buffers_are_those_of_all_messages_one_by_one(seed: int) -> None:
    """Messages that are alike are made once, and counted."""
    fewer = 0
    for n, (made, src, a, dst, b, devices) in enumerate(cases(6, 40 + seed)):
        plan, in_place = plan_reshard(made, src, a, dst, b, devices), (n % 3 != 1, n % 3 != 2)
        for rank in sorted({*a.members(), *b.members()})[::3]:
            held = tuple(pieces_by_parameter(made, layout, view.cell(rank)) if here else None
                         for layout, view, here in zip((src, dst), (plan.src, plan.dst), in_place, strict=True))
            for buckets in (1, 3):
                rounds = rank_rounds(plan, rank, buckets)
                first, last = (0, 1), (len(rounds) - 2, len(rounds) - 1)
                looked_at = {*first, len(rounds) // 2, len(rounds) // 2 + 1, *last}
                sizes = [packed_elements(x, (held[0], held[1])) if i in looked_at else (0, 0)
                         for i, x in enumerate(rounds)]
                assert _buffered_elements(plan, rank, buckets, made, (src, dst), in_place) == sum(
                    sum(buffer_elements(size[way] for size in sizes)) for way in (0, 1))
                kinds = reshard_cache(plan).alike
                alike = [*like_messages(plan, rank_slices(plan, rank)[1], 0, buckets, kinds)]
                assert sum(x.count for x in alike) == (len(rounds[0].receives) if rounds else 0)
                fewer += len(alike) < sum(x.count for x in alike)
    assert fewer


def wrong_somewhere(made: Model, src: Layout, dst: Layout, classes: Sequence[BoxClass]) -> bool:
    """Whether box classes state wrongly who holds or wants a box of some parameter, asked cell by cell."""
    named = {p.name: p for p in parameters(made)}
    got = defaultdict[tuple[Cell, str], list[Box]](list)
    for c in classes:
        at = 0
        for segment in c.segments:
            if segment.start != at:
                return True
            at += volume(segment.box) * len(segment.layers)
            for name in map(segment.name, range(len(segment.layers))):
                if name not in named or owners(made, name, segment.box, src) != tuple(sorted(c.holders)):
                    return True
                for cell in c.needers:
                    got[cell, name].append(segment.box)
        if at != c.size:
            return True
    for cell in cells_of(dst):
        for name, p in named.items():
            boxes, pieces = got.pop((cell, name), []), pieces_of_cell(p, made.layers, dst, cell)
            if (not all(any(contains(x.box, box) for x in pieces) for box in boxes) or overlapping(boxes)
                    or sum(map(volume, boxes)) != sum(volume(x.box) for x in pieces)):
                return True
    return bool(got)


def forged(classes: Sequence[BoxClass], draw: random.Random) -> tuple[BoxClass, ...]:
    """The same with one thing changed, which may leave all of it right."""
    i = draw.randrange(len(classes))
    c, other = classes[i], draw.choice(classes)
    at = draw.randrange(len(c.segments))
    segment = c.segments[at]
    low, high = segment.box[0] if segment.box else (0, 1)
    replaced = [
        replace(c, holders=c.holders[1:]), replace(c, needers=c.needers[:-1]), replace(c, holders=other.holders),
        replace(c, needers=other.needers), replace(c, needers=(*c.needers, c.needers[0])),
        replace(c, holders=tuple(x._replace(pp_rank=x.pp_rank + 1) for x in c.holders)),
        replace(c, segments=c.segments[:at] + c.segments[at + 1 :]), replace(c, size=c.size + 1),
        replace(c, holders=c.holders[::-1]), replace(c, segments=c.segments)]
    changed = [segment._replace(box=((low + 1, high + 1), *segment.box[1:]) if segment.box else ((0, 1),)),
               segment._replace(start=segment.start + 1), segment._replace(layers=segment.layers[1:] or (None,)),
               segment._replace(spec=other.segments[0].spec)]
    replaced += [replace(c, segments=(*c.segments[:at], x, *c.segments[at + 1 :])) for x in changed]
    return (*classes[:i], draw.choice(replaced), *classes[i + 1 :])


@pytest.mark.parametrize("seed", range(3))
def test_forged_box_classes_are_refused_as_by_asking_every_cell(seed: int) -> None:
    """Parameters with the same pieces, and pp ranks, are checked once; whatever is wrong with one of them is found."""
    draw, verdicts = random.Random(seed), Counter[bool]()
    for made, src, _, dst, _, _ in cases(3, 50 + seed):
        right = box_classes(made, src, dst)
        for _ in range(12):
            classes = forged(right, draw)
            try:
                refused = bool([*class_faults(made, src, dst, classes)])
            except ValueError:  # a box with too many dimensions
                refused = True
            other_shape = any(len(s.box) != len(x.shape) for c in classes for s in c.segments
                              for x in made.params if x.name == s.spec)
            assert refused == (other_shape or wrong_somewhere(made, src, dst, classes))
            verdicts[refused] += 1
    assert verdicts[True] >= 20 and verdicts[False]


@pytest.mark.parametrize("seed", range(4))
def test_trees_that_are_not_planned_would_be_refused(seed: int) -> None:
    """The bound that spares a plan of trees is never above its busiest sender, so the first that is light enough is
    chosen, as if all were planned."""
    spared = 0
    for made, src, a, dst, b, devices in cases(6, 30 + seed):
        plan = plan_reshard(made, src, a, dst, b, devices)
        received = max((x for group in plan.groups for x in elements_arriving(group).values()), default=0)
        if not received:
            continue
        largest = max(len(group.nodes) for group in plan.groups)
        sizes = [n for n in (1, 2, 4, 8, 16) if n < largest] + [largest]
        tried = {n: planning._division(plan, planning._copies(plan, n), received) for n in sizes}
        busiest = {n: planning._busiest_sender(plan, x) for n, x in tried.items()}
        least = {n: planning._busiest_at_least(plan, x.copies) for n, x in tried.items()}
        assert all(least[n] <= busiest[n] for n in sizes)
        enough = max(received, busiest[largest]) * planning.MIN_GAIN
        spared += sum(x > enough for x in least.values())
        first = next((n for n in sizes if busiest[n] <= enough), largest)
        made = planning._with_senders(plan, tried[first])
        assert (plan.groups, plan.sent_parts, plan.senders) == (made.groups, made.sent_parts, made.senders)
    assert spared or seed


def some_box(draw: random.Random, dims: int) -> Box:
    return tuple((low, low + draw.randint(1, 4)) for low in (draw.randint(0, 5) for _ in range(dims)))


def test_boxes_are_sets_of_indices() -> None:
    def indices(box: Box) -> set[tuple[int, ...]]:
        points: set[tuple[int, ...]] = {()}
        for start, stop in box:
            points = {(*p, x) for p in points for x in range(start, stop)}
        return points

    draw = random.Random(3)
    for _ in range(300):
        dims = draw.randint(0, 3)
        a, b = some_box(draw, dims), some_box(draw, dims)
        both = indices(a) & indices(b)
        assert contains(a, b) == (indices(b) <= indices(a)) and volume(a) == len(indices(a))
        assert (intersect(a, b) is None) == (not both) and (not both or indices(intersect(a, b) or ()) == both)
        some = [some_box(draw, 2) for _ in range(draw.randint(0, 4))]
        assert overlapping(some) == any(indices(x) & indices(y) for i, x in enumerate(some) for y in some[:i])
    with pytest.raises(ValueError):
        contains(((0, 1),), ())


def test_a_message_of_one_box_is_not_split() -> None:
    for size in (1, 1 << 17, 1 << 20):
        assert split_message(m := Message(3, (("w", ((0, size),)),))) == (m,)


def test_holders_are_the_same_pairs_on_every_stage_or_wrong() -> None:
    draw, right = random.Random(4), 0
    for _ in range(400):
        pp_ranks = draw.sample(range(3), draw.randint(1, 2))
        pairs = {(draw.randint(0, 2), draw.randint(0, 1)) for _ in range(2)}
        listed = [Cell(pp, *pair) for pp in pp_ranks for pair in pairs]
        match draw.randint(0, 3):
            case 0:
                listed.append(draw.choice(listed))
            case 1:
                listed.remove(draw.choice(listed))
            case 2:
                listed.append(Cell(draw.randint(0, 3), draw.randint(0, 3), 0))
            case _:
                draw.shuffle(listed)
        stated = _pairs_on_all(listed, pp_ranks)
        for other in (pairs, {(0, 0)}, {(1, 1), (2, 0)}):
            wanted = {Cell(pp, *pair) for pp in pp_ranks for pair in other}
            assert (stated == other) == ({*listed} == wanted and len({*listed}) == len(listed))
            right += stated == other
    assert right > 50


def test_the_order_of_events_is_that_of_their_ranks_one_by_one() -> None:
    """One rank of those in the same meshes stands for all of them."""
    draw = random.Random(5)
    for _ in range(300):
        world = draw.randint(1, 24)
        meshes = dict[str, Ranks]()
        for i in range(draw.randint(1, 5)):
            starts = draw.sample(range(world), min(world, 2))
            meshes[f"m{i}"] = Ranks.of([(x, x + draw.randint(1, 8)) for x in starts], world)
        firsts = defaultdict[str, set[int]](set)
        for inside, ranks in group_equal_ranks(meshes, world).items():
            for mesh in inside:
                firsts[mesh].add(ranks.first)
        every, few = list[Task](), list[Task]()
        for i in range(draw.randint(1, 12)):
            used = draw.sample(sorted(meshes), draw.randint(1, len(meshes)))
            after = set(draw.sample(range(i), draw.randint(0, min(i, 2))))
            cost, priority = draw.randint(0, 3), draw.randint(0, 3)
            every.append(Task(frozenset(r for m in used for r in meshes[m]), after, cost, priority))
            few.append(Task(frozenset(r for m in used for r in firsts[m]), after, cost, priority))
        assert list_schedule(every) == list_schedule(few)
