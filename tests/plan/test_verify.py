"""The verifier against mutated plans: each is rejected with a code, or a plain simulator finds that it still runs."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.plan import movement
from rldsl.plan.events import Every, Event, Item, Loop, Offload, Onload
from rldsl.plan.model import Plan, RankClass
from rldsl.plan.project import class_of, events, participants, rank_classes, schedule, walk
from rldsl.plan.show import human, show
from rldsl.plan.verify import verify
from tests.plan.sample import grpo
from tests.plan.simulator import runs

Edit = Callable[[Event], Event | None]


def faults(plan: Plan) -> tuple[Diagnostic, ...]:
    try:
        verify(plan)
    except Failure as e:
        assert e.diagnostics and all(d.code[:4] in ("RL05", "RL06") and d.place for d in e.diagnostics)
        return e.diagnostics
    return ()


def edited(items: tuple[Item, ...], id: int, edit: Callable[[Event], tuple[Event, ...]]) -> tuple[Item, ...]:
    out: list[Item] = []
    for x in items:
        if isinstance(x, Event):
            out += edit(x) if x.id == id else (x,)
        else:
            out.append(replace(x, body=edited(x.body, id, edit)))
    return tuple(out)


def with_body(plan: Plan, body: tuple[Item, ...], project: bool = True) -> Plan:
    """The plan with another body; project: classes follow, as a compiler's mistake would have it."""
    if not project:
        return replace(plan, body=body)
    return replace(plan, body=body, classes=rank_classes(plan.meshes, body, plan.header.world, {}))


def change(plan: Plan, id: int, project: bool = True, **new: object) -> Plan:
    return with_body(plan, edited(plan.body, id, lambda e: (replace(e, **new),)), project)


def drop(plan: Plan, id: int, project: bool = True) -> Plan:
    return with_body(plan, edited(plan.body, id, lambda e: ()), project)


def moved(plan: Plan, id: int, before: int) -> Plan:
    event = next(e for e, _ in events(plan) if e.id == id)
    return with_body(plan, edited(drop(plan, id).body, before, lambda e: (event, e)))


def test_the_sample_verifies():
    plan = grpo()
    proof = verify(plan)
    assert (proof.events, proof.entries) == (18, sum(len(class_of(plan, r).events) for r in range(4)))
    assert len(proof.checks) == 8 and runs(plan)


@pytest.mark.parametrize(
    "mutant, code",
    [
        (lambda p: change(p, 4, bytes=7), "RL0526"),
        (lambda p: change(p, 4, digest="0"), "RL0526"),
        (lambda p: change(p, 5, mesh="fit"), "RL0613"),
        (lambda p: change(p, 5, mesh="nowhere"), "RL0610"),
        (lambda p: change(p, 8, reads=("ref@L3", "gen.tokens@s1")), "RL0614"),
        (lambda p: change(p, 8, what="values"), "RL0615"),
        (lambda p: drop(p, 0), "RL0520"),
        (lambda p: drop(p, 4), "RL0521"),
        (lambda p: drop(p, 7), "RL0513"),
        (lambda p: drop(p, 6), "RL0518"),
        (lambda p: drop(p, 16), "RL0516"),
        (lambda p: drop(p, 14, project=False), "RL0542"),
        (lambda p: moved(p, 16, 15), "RL0513"),
        (lambda p: moved(p, 14, 12), "RL0513"),
        (lambda p: moved(p, 0, 4), "RL0523"),
        (lambda p: replace(p, groups=p.groups[1:]), "RL0531"),
        (lambda p: replace(p, groups=p.groups + (replace(p.groups[0], id="g9"),)), "RL0532"),
        (lambda p: replace(p, classes=p.classes[1:]), "RL0541"),
        (lambda p: replace(p, classes=p.classes + p.classes[:1]), "RL0541"),
        (lambda p: replace(p, classes=(replace(p.classes[0], peak_bytes=-1), *p.classes[1:])), "RL0543"),
        (lambda p: replace(p, layouts=(replace(p.layouts[0], tp=4), *p.layouts[1:])), "RL0612"),
        (lambda p: replace(p, meshes=(replace(p.meshes[0], ranks=((0, 3), (2, 4))), *p.meshes[1:])), "RL0612"),
        (lambda p: replace(p, meshes=(replace(p.meshes[0], ranks=((0, 10**12),)), *p.meshes[1:])), "RL0612"),
        (lambda p: replace(p, values=p.values[1:]), "RL0610"),
        (lambda p: replace(p, values=p.values + p.values[:1]), "RL0611"),
        (
            lambda p: replace(p, programs=(replace(p.programs[0], outputs=(("adv", 1), ("reward", 3))), p.programs[1])),
            "RL0617",
        ),
        (
            lambda p: replace(p, programs=(replace(p.programs[0], nodes=p.programs[0].nodes[::-1]), p.programs[1])),
            "RL0616",
        ),
    ],
)
def test_a_mistake_has_its_code(mutant, code):
    found = faults(mutant(grpo()))
    assert code in {d.code for d in found}, [(d.code, d.title) for d in found]


def test_a_deadlock_is_shown_as_a_circle_with_ranks_and_lines():
    plan = grpo()
    a, b, *rest = plan.classes
    order = list(b.events)
    i, j = order.index(9), order.index(13)
    order[i], order[j] = order[j], order[i]
    (d,) = faults(replace(plan, classes=(a, replace(b, events=tuple(order)), *rest)))
    assert d.code == "RL0511" and any("ranks 0-3" in n for n in d.notes) and any("event" in n for n in d.notes)
    assert not runs(replace(plan, classes=(a, replace(b, events=tuple(order)), *rest)))


def test_onload_and_offload_alternate():
    plan = grpo()

    def around(*kinds: type[Event]) -> Plan:
        """Offload or onload `ref` before (even places) and after (odd places) its call."""
        extra = [k(id=90 + i, mesh="ref", model="ref", layout="L3") for i, k in enumerate(kinds)]
        return with_body(plan, edited(plan.body, 8, lambda e: (*extra[::2], e, *extra[1::2])))

    parked = edited(plan.body, 2, lambda e: (e, Offload(id=80, mesh="ref", model="ref", layout="L3")))
    good = edited(
        parked,
        8,
        lambda e: (
            Onload(id=81, mesh="ref", model="ref", layout="L3"),
            e,
            Offload(id=82, mesh="ref", model="ref", layout="L3"),
        ),
    )
    assert not faults(with_body(plan, good))
    for bad in (
        with_body(plan, parked),
        around(Offload),
        around(Onload),
        around(Offload, Onload),
        around(Onload, Offload),
    ):
        assert "RL0525" in {d.code for d in faults(bad)}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda moves: moves[1:],
        lambda moves: moves + moves[:1],
        lambda moves: (replace(moves[0], src=3), *moves[1:]),
        lambda moves: (replace(moves[0], box=((0, 1), *moves[0].box[1:])), *moves[1:]),
    ],
)
def test_a_planner_that_errs_is_caught(spoil, monkeypatch):
    """Coverage is tested on boxes, even where bytes and digest agree with the planner's own mistake."""
    plan, right = grpo(), movement.realloc_moves
    monkeypatch.setattr(movement, "realloc_moves", lambda *a: spoil(right(*a)))
    moves = movement.realloc_moves(plan.models[0], plan.layouts[0], plan.meshes[1], plan.layouts[1], plan.meshes[0], 4)
    total = movement.summary(moves, plan.models[0])
    wrong = change(plan, 4, bytes=total.bytes, messages=total.messages, digest=movement.digest(moves))
    assert {d.code for d in faults(wrong)} == {"RL0527"}


# ------------------------------------------------------------------------------------------------ mutation


def mutants(plan: Plan, rng: random.Random) -> Plan:
    """One random mutation: drop, duplicate, swap (body or one list), retarget, resize."""
    flat = [e for e, _ in events(plan)]
    e = rng.choice(flat)
    match rng.randrange(8):
        case 0:
            return drop(plan, e.id, rng.random() < 0.5)
        case 1:
            id = rng.choice((e.id, 99))
            return with_body(plan, edited(plan.body, e.id, lambda x: (x, replace(x, id=id))), rng.random() < 0.7)
        case 2:
            other = rng.choice(flat)
            return moved(plan, e.id, other.id) if other.id != e.id else drop(plan, e.id)
        case 3:
            c = rng.randrange(len(plan.classes))
            return replace(plan, classes=tuple(_shuffled(x, rng) if i == c else x for i, x in enumerate(plan.classes)))
        case 4 | 5:
            return change(plan, e.id, rng.random() < 0.7, **_retarget(plan, e, rng))
        case 6:
            return change(plan, e.id, bytes=e.bytes + rng.choice((-1000, -1, 1, 8)))
        case _:
            return _resize(plan, rng)


def _shuffled(c: RankClass, rng: random.Random) -> RankClass:
    order = list(c.events)
    i, j = rng.sample(range(len(order)), 2)
    order[i], order[j] = order[j], order[i]
    return replace(c, events=tuple(rng.choice((order, order[1:], order + order[:1]))))


def _retarget(plan: Plan, e: Event, rng: random.Random) -> dict[str, object]:
    pools = {
        "mesh": [m.id for m in plan.meshes],
        "layout": [x.id for x in plan.layouts],
        "spread": [s.id for s in plan.spreads],
        "model": [m.name for m in plan.models],
        "frame": ["gen", "prompt"],
        "output": [v.id for v in plan.values],
    }
    pools["src"] = pools["dst"] = pools["spread" if hasattr(e, "values") else "layout"]
    name = rng.choice(
        [f.name for f in fields(e) if f.name in (*pools, "reads", "writes", "buffers") and getattr(e, f.name)]
    )
    if name in pools:
        return {name: rng.choice([x for x in pools[name] if x != getattr(e, name)])}
    items = list(getattr(e, name))
    at = rng.randrange(len(items))
    left, _, right = items[at].rpartition("@")
    side = [s for s in pools["layout" if right.startswith("L") else "spread"] if s != right]
    items[at : at + 1] = rng.choice(([], [f"{left}@{rng.choice(side)}"], [items[at], items[at]]))
    return {name: tuple(items)}


def _resize(plan: Plan, rng: random.Random) -> Plan:
    def one(field: str, **pick: Callable[[object], object]) -> Plan:
        rows = list(getattr(plan, field))
        i = rng.randrange(len(rows))
        name = rng.choice(list(pick))
        rows[i] = replace(rows[i], **{name: pick[name](getattr(rows[i], name))})
        return replace(plan, **{field: tuple(rows)})

    match rng.randrange(4):
        case 0:
            degree = lambda n: rng.choice([x for x in (0, 1, 2, 3, 4, 8) if x != n])  # noqa: E731
            return one("layouts", dp=degree, tp=degree, pp=degree)
        case 1:
            return one(
                "meshes",
                ranks=lambda r: rng.choice((((r[0][0], r[0][1] + 1),), ((r[0][0], r[0][1] - 1),), ((0, 1),), ())),
            )
        case 2:
            return one("frames", count=lambda n: n + rng.choice((-1, 1, 8)), per_prompt=lambda n: n + 1)
        case _:
            return one(
                "classes", ranks=lambda r: rng.choice((((r[0][0], r[0][1] + 1),), ((r[0][0], r[0][1] - 1),), ((0, 4),)))
            )


def test_a_thousand_mutants_are_rejected_or_still_run():
    plan, rng = grpo(), random.Random(7)
    codes: Counter[str] = Counter()
    for n in range(1000):
        mutant = mutants(plan, rng)
        found = faults(mutant)
        codes.update({d.code for d in found} or {"accepted"})
        if not found:
            assert runs(mutant), f"mutant {n} is accepted and does not run"
    assert codes["accepted"] < 200 and len(codes) >= 15, codes


# ------------------------------------------------------------------------------------------------ the rest


def test_projection():
    plan = grpo()
    for rank in range(4):
        mine = [e.id for e, _ in walk(schedule(plan.body, plan.meshes, rank))]
        assert (
            mine
            == list(class_of(plan, rank).events)
            == [e.id for e, _ in events(plan) if rank in participants(plan, e)]
        )
    assert [c.ranks for c in plan.classes] == [((0, 2),), ((2, 4),)]
    assert not any(isinstance(x, Every) for x in schedule(plan.body, plan.meshes, 3)[-1].body)
    assert [c.ranks for c in rank_classes(plan.meshes, plan.body, 4, {0: 1, 3: 1})] == [
        ((0, 1),),
        ((1, 2),),
        ((2, 3),),
        ((3, 4),),
    ]
    with pytest.raises(Failure):
        class_of(plan, 4)


def test_show():
    plan = grpo()
    text = show(plan)
    assert "loop step x10 {" in text and "because gen reads actor on L2" in text and "grpo.rlf:9" in text
    assert "infer" not in show(plan, rank=0) and "infer" in show(plan, rank=2)
    assert "participants: ranks 2-3" in show(plan, event=8)
    assert [human(n) for n in (-1, 0, 1023, 1536, 3 << 30)] == ["?", "0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
    for bad in ({"rank": 4}, {"event": 99}):
        with pytest.raises(Failure):
            show(plan, **bad)


def test_a_hundred_thousand_entries_verify_quickly():
    """1,024 ranks in 1,024 classes (peaks differ), each with 98 events."""
    from rldsl.plan.events import Fetch, Free
    from rldsl.plan.model import Mesh, Spread

    p, world, count = grpo(), 1024, 49
    body: list[Item] = []
    for i in range(count):
        body += [
            Fetch(id=2 * i, mesh="m", writes=("prompt.tokens@s", "prompt.lengths@s"), data="tasks", frames=("prompt",)),
            Free(id=2 * i + 1, mesh="m", buffers=("prompt.tokens@s", "prompt.lengths@s")),
        ]
    mesh = (Mesh("m", ((0, world),)),)
    loop = (Loop("step", 3, tuple(body)),)
    plan = replace(
        p,
        header=replace(p.header, world=world),
        meshes=mesh,
        layouts=(),
        models=(),
        groups=(),
        functions=(),
        programs=(),
        spreads=(Spread("s", "m", unit="all"),),
        body=loop,
        classes=rank_classes(mesh, loop, world, {r: r for r in range(world)}),
    )
    start = time.process_time()
    assert verify(plan).entries == 2 * count * world > 100_000
    assert time.process_time() - start < 4
