"""The proof of a reshard by its records, against the check of every rank.

Ranks count as equal where their node groups want the same and their cells send to the same groups. So in each mutant
one of many equal groups or cells differs from the others, wherever it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from rldsl.plan.model import Layout, Mesh, Model
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.records import ReshardPlan
from rldsl.reshard.reshard_cache import ReshardCache
from rldsl.reshard.transfer_slices import pair_slices, rank_slices
from rldsl.verify import saves, transfer_slices
from rldsl.verify.reshard_records import ClassIndex, record_faults
from rldsl.verify.transfer_slices import MeshCells, rank_faults, sampled_ranks
from tests.moe.test_boxes import MODEL as EXPERTS
from tests.plan_algebra.models import model
from tests.verify.test_sampled_ranks import numbers, put

LAYERS = 8
NONSENSE = (LookupError, ZeroDivisionError, AssertionError, TypeError, AttributeError, RuntimeError, ValueError)


def layouts(name: str, ranks: int, made: Model, draw: random.Random, zero: int) -> Layout:
    """Any degrees on so many ranks."""
    experts = max((p.experts for p in made.params), default=0)
    fits = [(pp, tp, cp) for pp, tp, cp in product((1, 2, 4), (1, 2, 4, 8), (1, 1, 2)) if not ranks % (pp * tp * cp)]
    pp, tp, cp = draw.choice(fits)
    dp = ranks // (pp * tp * cp)
    ep = draw.choice([e for e in (1, 2, 4) if experts and not experts % e and not dp % e] or [1])
    vpp = draw.choice([v for v in (1, 2) if not made.layers % (pp * v)] or [1]) if pp > 1 else 1
    return Layout(name, name, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero, vpp=vpp)


def reshards(count: int, seed: int) -> Iterator[tuple[ReshardPlan, MeshCells, MeshCells, int]]:
    """Random layouts with zero on one side or on both, on meshes that are apart, overlap or are the same."""
    draw = random.Random(seed)
    for n in range(count):
        made = draw.choice((model("gqa", layers=LAYERS), model("fused", layers=LAYERS), EXPERTS))
        first, ranks, start, wanting = draw.choice(((0, 32, 0, 64), (0, 48, 16, 32), (0, 16, 16, 48), (0, 64, 0, 64)))
        a, b = Mesh("a", ((first, first + ranks),)), Mesh("b", ((start, start + wanting),))
        src = layouts("a", ranks, made, draw, 1 + n % 3)
        dst = layouts("b", wanting, made, draw, draw.choice((0, 0, 1, 3)))
        yield (plan_reshard(made, src, a, dst, b, draw.choice((2, 4, 8))), MeshCells.of(src, a), MeshCells.of(dst, b),
               max(first + ranks, start + wanting))


def by_rank(plan: ReshardPlan, src: MeshCells, dst: MeshCells, world: int) -> set[str]:
    index, members = ClassIndex(plan.classes), sorted(src.cells.keys() | dst.cells.keys())
    return codes(lambda: (code for code, _, _ in rank_faults(plan, src, dst, world, index, members)))


def by_records(plan: ReshardPlan, src: MeshCells, dst: MeshCells, world: int) -> set[str]:
    """As in a large world."""
    index = ClassIndex(plan.classes)
    return codes(lambda: (code for code, _, _ in record_faults(plan, src.cells, dst.cells, index))) or codes(
        lambda: (code for code, _, _ in rank_faults(plan, src, dst, world, index, sampled_ranks(plan, src, dst), 3)))


def codes(found: Callable[[], Iterator[str]]) -> set[str]:
    try:
        return set(found())
    except NONSENSE as wrong:
        return {type(wrong).__name__}


@pytest.mark.thorough
def test_both_accept_what_the_planner_makes() -> None:
    several = 0
    for case in reshards(120, 1):
        assert by_records(*case) == set() == by_rank(*case)
        several += len(case[0].groups) > len({id(g.arrivals.wanted) for g in case[0].groups})
    assert several > 30, "plans in which node groups share a record"


@pytest.mark.thorough
def test_whatever_a_rank_shows_the_records_show() -> None:
    """Any number of the records one larger or smaller: of one group among equal ones, or of one cell."""
    draw, wrong, only_records = random.Random(2), 0, 0
    for case in reshards(60, 3):
        plan, *rest = case
        if not (ways := numbers(plan)):
            continue
        for _ in range(6):
            try:
                mutant = put(plan, draw.choice(ways), draw.choice((-1, 1)))
            except NONSENSE:  # no such record can be made
                continue
            shown = by_rank(mutant, *rest)
            assert not shown or by_records(mutant, *rest), mutant
            wrong += bool(shown)
            only_records += not shown and bool(by_records(mutant, *rest))
    assert wrong > 100, "mutants that are wrong on some rank"
    assert only_records < wrong, "what the records refuse is mostly wrong on a rank"


def test_a_pair_lists_what_its_ranks_list() -> None:
    for plan, src, dst, _ in reshards(12, 5):
        shared, members = ReshardCache(plan), sorted(src.cells.keys() | dst.cells.keys())
        every = {rank: rank_slices(plan, rank, shared) for rank in members}
        for a, b in product(members, members):
            assert pair_slices(plan, a, b, shared) == (tuple(x for x in every[a][0] if x.peer == b),
                                                       tuple(x for x in every[b][1] if x.peer == a))


# --------------------------------------------------------------------------------------------- one of many equal ones


def large() -> tuple[ReshardPlan, MeshCells, MeshCells]:
    """Sixteen equal nodes that hold different rows and want the same, in a world that is not checked rank by rank."""
    made, a, b = model("gqa", layers=LAYERS), Mesh("a", ((0, 128),)), Mesh("b", ((0, 256),))
    src, dst = Layout("a", "a", dp=16, tp=4, pp=2, zero=2), Layout("b", "b", dp=128, tp=2)
    return plan_reshard(made, src, a, dst, b, 8), MeshCells.of(src, a), MeshCells.of(dst, b)


def regrouped(plan: ReshardPlan, at: int, **new: Any) -> ReshardPlan:
    groups = list(plan.groups)
    groups[at] = replace(groups[at], **new)
    return replace(plan, groups=tuple(groups))


def unlisted(plan: ReshardPlan, at: int) -> ReshardPlan:
    """A node does not receive a class that none of its devices holds."""
    arrivals = plan.groups[at].arrivals
    free = next(p for p in range(len(arrivals.wanted.lists[0].classes)) if p not in arrivals.held[0])
    return regrouped(plan, at, arrivals=replace(
        arrivals, held=(tuple(sorted((*arrivals.held[0], free))), *arrivals.held[1:])))


def moved(plan: ReshardPlan, at: int) -> ReshardPlan:
    """The last part of a list ends an element early."""
    arrivals = plan.groups[at].arrivals
    first = arrivals.bounds[0]
    return regrouped(plan, at, arrivals=replace(
        arrivals, bounds=((*first[:-1], first[-1] - 1), *arrivals.bounds[1:])))


def other_wants(plan: ReshardPlan, at: int) -> ReshardPlan:
    """A node has a list of its own, without the last class."""
    arrivals = plan.groups[at].arrivals
    one, *rest = arrivals.wanted.lists
    short = replace(one, classes=one.classes[:-1], sizes=one.sizes[:-1])
    return regrouped(plan, at, arrivals=replace(arrivals, wanted=replace(arrivals.wanted, lists=(short, *rest))))


def uncopied(plan: ReshardPlan, at: int) -> ReshardPlan:
    """Devices of a node with something to copy leave out one copy."""
    at = 9 + at % 2
    assert plan.groups[at].local_copies
    return regrouped(plan, at, local_copies=plan.groups[at].local_copies[1:])


def less_sent(plan: ReshardPlan, at: int) -> ReshardPlan:
    """A cell in the middle sends each tree of its groups an element less."""
    cell = sorted(plan.senders)[at]
    supplies = plan.senders[cell].supplies
    (trees, amount), *rest = supplies.families
    return replace(plan, senders={**plan.senders, cell: replace(
        plan.senders[cell], supplies=replace(supplies, families=((trees, amount - 1), *rest)))})


def undivided(plan: ReshardPlan, at: int) -> ReshardPlan:
    """The holders of a class leave out its last element."""
    i = sorted(plan.sent_parts)[at]
    *rest, last = plan.sent_parts[i]
    return replace(plan, sent_parts={**plan.sent_parts, i: (*rest, last._replace(stop=last.stop - 1))})


@pytest.mark.parametrize("forge", [unlisted, moved, other_wants, uncopied, less_sent, undivided],
                         ids=lambda f: f.__name__)
@pytest.mark.parametrize("at", [5, 6, 9])
def test_one_of_many_equal_groups_or_cells_differs(forge: Callable[[ReshardPlan, int], ReshardPlan], at: int) -> None:
    """None of those that would be in a sample."""
    plan, src, dst = large()
    world = 256
    assert len(plan.groups) > 12 and len({id(g.arrivals.wanted) for g in plan.groups}) == 1
    assert not [*transfer_slices.slice_faults(plan, src, dst, world)]
    node = plan.groups[at].nodes[0]
    assert not {*range(8 * node, 8 * node + 8)} & {*sampled_ranks(plan, src, dst)}
    found = {code for code, _, _ in transfer_slices.slice_faults(forge(plan, at), src, dst, world)}
    assert found and found <= {"RL0527", "RL0533"}


# -------------------------------------------------------------------------------------------------------------- saves


def saved(made: Model, layout: Layout, mesh: Mesh) -> set[str]:
    return {code for code, _, _ in saves.examine_save(made, layout, mesh, len(mesh.members()))}


def test_saves_by_their_division_and_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    for n in range(40):
        made = draw.choice((model("gqa", layers=LAYERS), model("fused", layers=LAYERS), EXPERTS))
        ranks = draw.choice((8, 16, 32))
        mesh = Mesh("a", ((0, ranks),))
        layout = layouts("a", ranks, made, draw, n % 4)
        assert saved(made, layout, mesh) == set()
        with monkeypatch.context() as large_world:
            large_world.setattr(saves, "CHECK_ALL_UP_TO", 0)
            assert saved(made, layout, mesh) == set()


@pytest.mark.parametrize("change, code", [
    (lambda boxes: boxes[1:], "RL0527"), (lambda boxes: boxes + boxes[:1], "RL0527"),
    (lambda boxes: tuple((part, (zero_shard + 1) % 8, box) for part, zero_shard, box in boxes), "RL0533"),
    (lambda boxes: ((*boxes[5][:2], boxes[4][2]), *boxes[1:]), "RL0527"),
], ids=["missing", "twice", "elsewhere", "another"])
def test_a_division_that_is_none(change: Callable[..., Any], code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = saves.division
    monkeypatch.setattr(saves, "CHECK_ALL_UP_TO", 0)
    monkeypatch.setattr(saves, "division", lambda spec, layout: change(right(spec, layout)) if spec.split else right(
        spec, layout))
    made, mesh = model("gqa", layers=LAYERS), Mesh("a", ((0, 32),))
    assert code in saved(made, Layout("a", "a", dp=8, tp=2, pp=2, zero=2), mesh)


def test_an_owner_outside_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    right = saves.owners
    monkeypatch.setattr(saves, "CHECK_ALL_UP_TO", 0)
    monkeypatch.setattr(saves, "owners", lambda *given: dict.fromkeys(right(*given), 99))
    assert saved(model("gqa"), Layout("a", "a", dp=8, tp=2, zero=2), Mesh("a", ((0, 16),))) == {"RL0527"}
