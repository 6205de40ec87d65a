"""Forged plans with states of rows that the verifier refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rldsl.diag import Failure
from rldsl.plan.events import Draw, Event, Fetch, Generate, Lookup, Loop, RowStates, Transfer, Update, split_buffer
from rldsl.plan.model import Plan
from rldsl.verify import verify
from tests.derive.test_forged import changed, events
from tests.verify.mutate import edited, projected
from tests.verify.plans import compiled

Forge = Callable[[Plan], Plan]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compiled()["rows"]


def codes(plan: Plan) -> set[str]:
    try:
        verify(plan)
    except Failure as failure:
        return {d.code for d in failure.diagnostics}
    return set()


def each(kind: type[Event], **changes: Any) -> Forge:
    return lambda plan: changed(plan, lambda e: replace(e, **changes) if isinstance(e, kind) else e)


def first(kind: type[Event], change: Callable[[Any], Event | None]) -> Forge:
    def forge(plan: Plan) -> Plan:
        chosen = next(e for e in events(plan) if isinstance(e, kind))
        return changed(plan, lambda e: change(e) if e is chosen else e)
    return forge


def moved(kind: type[Event], after: type[Event]) -> Forge:
    """The first event of a kind behind the first of another."""
    def forge(plan: Plan) -> Plan:
        mine = next(e for e in events(plan) if isinstance(e, kind))
        other = next(e for e in events(plan) if isinstance(e, after))
        gone = edited(plan.body, lambda x: () if x is mine else None)
        return projected(replace(plan, body=edited(gone, lambda x: (x, mine) if x is other else None)))
    return forge


def stated(**changes: Any) -> Forge:
    """Another record of the state `prompts.rate`."""
    return lambda plan: replace(plan, states=tuple(
        replace(s, **changes) if s.value == "prompts.rate" else s for s in plan.states))


def lonely(plan: Plan) -> Plan:
    """The state is held by one rank only, and everything on it too."""
    one = next(m for m in plan.meshes if m.size < 4)
    spread = replace(plan.spreads[0], id="lonely", mesh=one.id, layout="", frames=(), granularity="all")
    state = next(s for s in plan.states if s.value == "prompts.rate")

    def moved(e: Event) -> Event:
        new = {f: tuple("prompts.rate@lonely" if b == f"prompts.rate@{state.spread}" else b for b in getattr(e, f))
               for f in ("reads", "writes")}
        return replace(e, **new)

    return replace(changed(stated(spread="lonely")(plan), moved), spreads=(*plan.spreads, spread))


def computed_everywhere(plan: Plan) -> Plan:
    """What the first update writes is not sent by one owner: every rank computes all of it."""
    update = next(e for e in events(plan) if isinstance(e, Update))
    send = next(e for e in events(plan) if isinstance(e, Transfer) and e.values == (update.value,))
    source = send.src
    spreads = tuple(replace(s, granularity="all", layout="", frames=()) if s.id == source else s for s in plan.spreads)
    return replace(plan, spreads=spreads)


def weighed(change: Callable[[Any], Any]) -> Forge:
    """The nodes of the weight's program changed."""
    def forge(plan: Plan) -> Plan:
        draw = next(e for e in events(plan) if isinstance(e, Draw))
        return replace(plan, programs=tuple(change(p) if p.id == draw.program else p for p in plan.programs))
    return forge


FORGED: dict[str, tuple[Forge, str]] = {
    "an update before the read above it": (moved(Lookup, Update), "RL0545"),
    "a read says that it follows another update": (each(Lookup, follows=()), "RL0545"),
    "an update that names no update before it": (first(Update, lambda e: replace(e, follows=())), "RL0545"),
    "two updates at one place": (each(Update, at="f.rlf:1:1"), "RL0545"),
    "an update without a place": (first(Update, lambda e: replace(e, at="")), "RL0545"),
    "an update is left out": (first(Update, lambda e: None), "RL0545"),
    "a draw after the fetch": (moved(Draw, Generate), "RL0513"),
    "a draw is left out": (first(Draw, lambda e: None), "RL0614"),
    "a fetch reads other rows than were drawn": (
        lambda plan: changed(plan, lambda e: replace(e, reads=()) if isinstance(e, Fetch) and e.reads else e), "RL0615"),
    "a state of rows of other data": (stated(data="rows"), "RL0615"),
    "a state of rows of no data": (stated(data="nothing"), "RL0610"),
    "a state of rows as one number": (stated(data=""), "RL0612"),
    "ranks that fetch without the state": (lonely, "RL0545"),
    "a number with several owners": (computed_everywhere, "RL0545"),
    "a draw of more than is sent": (each(Draw, bytes=0), "RL0534"),
    "a weight of another state": (first(Draw, lambda e: replace(e, inputs=tuple(
        (n, "rows.seen" if v == "prompts.rate" else v) for n, v in e.inputs))), "RL0615"),
    "a weight of a column that is no number": (first(Draw, lambda e: replace(
        e, columns=tuple((n, "prompt") for n, _ in e.columns))), "RL0615"),
    "a weight that lacks an input": (first(Draw, lambda e: replace(e, columns=())), "RL0617"),
    "a weight under another name": (weighed(lambda p: replace(
        p, outputs=tuple(("wait", i) for _, i in p.outputs))), "RL0617"),
    "a weight with a text": (weighed(lambda p: replace(p, nodes=tuple(
        replace(n, op="const", attrs=(("value", "x"),)) if n.op == "input" else n for n in p.nodes))), "RL0617"),
    "a lookup of rows of another batch": (first(Lookup, lambda e: replace(e, frame="row")), "RL0615"),
    "a lookup that writes something else": (first(Lookup, lambda e: replace(e, value="prompt.number")), "RL0614"),
    "an update of rows of another batch": (first(Update, lambda e: replace(e, value="prompt.number")), "RL0614"),
    "a state in a metric": (lambda plan: changed(plan, lambda e: replace(
        e, metrics=(*e.metrics, ("x", lasting(plan))), reads=(*e.reads, lasting(plan))) if e.kind == "log" else e),
        "RL0545"),
    "a state that is freed": (lambda plan: changed(plan, lambda e: replace(
        e, buffers=(*e.buffers, lasting(plan))) if e.kind == "free" and e.mesh == everyone(plan) else e), "RL0545"),
    "a checkpoint without a state": (lambda plan: changed(plan, lambda e: replace(
        e, reads=tuple(b for b in e.reads if b != lasting(plan))) if e.kind == "checkpoint" else e), "RL0529"),
}


def lasting(plan: Plan) -> str:
    return next(f"{s.value}@{s.spread}" for s in plan.states if s.value == "prompts.rate")


def everyone(plan: Plan) -> str:
    return next(m.id for m in plan.meshes if m.size == plan.header.world)


@pytest.mark.parametrize("what", FORGED)
def test_it_is_refused(what: str, plan: Plan) -> None:
    forge, code = FORGED[what]
    forged = forge(plan)
    assert forged != plan and code in codes(forged), codes(forged)


def test_the_plan_itself_holds(plan: Plan) -> None:
    assert codes(plan) == set()
    used = [e for e in events(plan) if isinstance(e, RowStates)]
    assert {type(e) for e in used} == {Draw, Lookup, Update}
    assert all(split_buffer(b)[1] for e in used for b in e.writes) and any(isinstance(i, Loop) for i in plan.body)
