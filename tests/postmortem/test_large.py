"""A post-mortem is made in the moment in which a large run fails: it must not grow with ranks times ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rldsl.plan.model import Layout, Mesh, Plan
from rldsl.postmortem.analysis import Findings, RankTrace, analyze
from rldsl.postmortem.dumps import RankPosition
from rldsl.postmortem.findings_text import notes, place, report, title
from rldsl.postmortem.wait_order import WaitOrder
from tests.effort import calls
from tests.postmortem.hand import FETCH, GENERATE, LENGTHS, PLAN, SCORE, TRAIN, TRANSFER, at, partners
from tests.samples import thorough_between

WORLD = 4096


def large(world: int = WORLD) -> Plan:
    """The plan of `hand.py` for as many ranks: the left half generates and trains, the right half scores."""
    half = world // 2
    meshes = (Mesh("all", ((0, world),)), Mesh("left", ((0, half),)), Mesh("right", ((half, world),)))
    layouts = (Layout("L0", "left", dp=half // 2, pp=2), Layout("L1", "right", dp=half // 4, tp=4),
               Layout("L2", "all", dp=world // 8, tp=8))
    return replace(PLAN, header=replace(PLAN.header, world=world), meshes=meshes, layouts=layouts)


def waits(position: RankPosition) -> RankTrace:
    return RankTrace(0, position, dump=True, begun=(at(LENGTHS, 1).at, at(TRANSFER, 1).at))  # type: ignore[arg-type]


CASES = {
    "in one generate": lambda r: RankTrace(r, at(GENERATE, 1), dump=True),
    "in one train": lambda r: RankTrace(r, at(TRAIN, 1), dump=True),
    "a third behind": lambda r: RankTrace(r, at(LENGTHS, 1) if r % 3 else at(GENERATE, 1), dump=True),
    "in one transfer": lambda r: RankTrace(r, at(TRANSFER, 1), dump=True),
    "one behind, all wait for what it sends": lambda r: replace(
        waits(at(FETCH, 1) if not r else at(TRAIN if r < WORLD // 2 else SCORE, 1, phase="waits",
                                            awaits=at(TRANSFER, 1).at)), rank=r),
    "none left a dump": lambda r: RankTrace(r, at(TRAIN, 1), silent=3.0, process="gone" if r == 7 else "running"),
}


@pytest.mark.parametrize("case", thorough_between(CASES))
def test_the_work_grows_as_the_ranks(case: str) -> None:
    plan, found = large(), [CASES[case](r) for r in range(WORLD)]
    told: list[Findings] = []

    def tell() -> None:
        told.append(analyze(plan, found))
        assert notes(told[0]) and report(plan, told[0])

    assert calls(tell) < 200 * WORLD  # it was cubic once
    [findings] = told
    named = sum(len(w.on) + len(w.ranks) for w in findings.waits)
    assert named < 8 * WORLD, "what is said is not of ranks times ranks"


def test_a_plan_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what analyses it and by all that tells of it."""
    made: list[Plan] = []
    begin = WaitOrder.__init__
    monkeypatch.setattr(WaitOrder, "__init__", lambda order, plan: (made.append(plan), begin(order, plan))[1])
    plan = large(64)
    findings = analyze(plan, [RankTrace(r, at(TRAIN if r else GENERATE, 1), dump=True) for r in range(64)])
    assert title(findings) and place(findings) and notes(findings) and report(plan, findings)
    assert len(made) == 1


def test_partners_are_the_dp_shard_of_any_layout() -> None:
    """By the rank's place in its mesh, which need not begin at 0 nor be in ascending order."""
    mesh = Mesh("left", ((6, 8), (0, 2), (3, 5), (9, 11)))
    plan = replace(PLAN, meshes=(PLAN.meshes[0], mesh, PLAN.meshes[2]),
                   layouts=(Layout("L0", "left", dp=2, tp=2, pp=2), *PLAN.layouts[1:]))
    order = WaitOrder(plan)
    event = order.events[GENERATE]
    assert partners(order, event, 6) == (3, 4, 7) and partners(order, event, 0) == (1, 9, 10)
    assert partners(order, event, 5) == ()


def test_partners_share_experts() -> None:
    """Ranks of dp that hold each other's experts meet in every layer."""
    plan = replace(PLAN, layouts=(Layout("L0", PLAN.layouts[0].mesh, dp=4, ep=2), *PLAN.layouts[1:]))
    order = WaitOrder(plan)
    members = next(m for m in plan.meshes if m.id == PLAN.layouts[0].mesh).members()
    event = order.events[GENERATE]
    assert partners(order, event, members[0]) == (members[1],) and partners(order, event, members[3]) == (members[2],)
