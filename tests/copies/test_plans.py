"""Copies that are not kept, in plans: freed after their last use, once, and seen by memory, verifier and diff."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from rldsl import api
from rldsl.inspect.diff import diff
from rldsl.inspect.show import show
from rldsl.memory import curves
from rldsl.memory.curve import during, peak
from rldsl.plan.events import Event, When, Free, Generate, Infer, Item, Load, Loop, Realloc, Train
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from tests.copies.programs import FLOWS, program
from tests.verify.faults import codes, edited, faults, moved, with_body
from tests.verify.plans import folder


@cache
def plan(flow: str, keep: bool = False) -> Plan:
    with folder() as here:
        (here / "copies.rlf").write_text(program(flow, keep))
        return api.compile("copies.rlf")


def copy_of(p: Plan) -> str:
    """The buffer that generation reads."""
    return next(b for e, _ in event_paths(p) if isinstance(e, Generate) for b in e.reads if b.startswith("actor@"))


def frees(p: Plan) -> list[Free]:
    """Of copies."""
    return [e for e, _ in event_paths(p) if isinstance(e, Free) and copy_of(p) in e.buffers]


def walked(items: tuple[Item, ...], copy: str, there: bool = False) -> bool:
    """Go through a block once, as a rank does; whether the copy is there at its end."""
    for item in items:
        if isinstance(item, When | Loop):
            assert walked(item.body, copy, there) == there, "a block leaves what it found"
        elif isinstance(item, Free) and copy in item.buffers:
            assert there, "freed, but not there"
            there = False
        elif copy in item.writes:
            assert not there, "brought, but there"
            there = True
        elif copy in item.reads:
            assert there, f"{type(item).__name__} uses what is not there"
    return there


@pytest.mark.parametrize("flow", FLOWS)
def test_a_copy_is_there_when_it_is_used_and_gone_when_it_is_not(flow: str) -> None:
    p = plan(flow)
    assert frees(p) and not walked(p.body, copy_of(p))
    assert all(f.because.startswith("keep=false, last used by ") and f.at for f in frees(p) if "block" not in f.because)


@pytest.mark.parametrize("flow", FLOWS)
def test_a_copy_that_is_kept_is_never_freed(flow: str) -> None:
    assert not frees(plan(flow, keep=True))


@pytest.mark.parametrize("flow", FLOWS)
def test_a_free_stands_right_behind_a_use(flow: str) -> None:
    """Not at the end of the step: no other event comes between the last that uses the copy and its free."""
    p, copy = plan(flow), copy_of(plan(flow))

    def block(items: tuple[Item, ...]) -> None:
        for before, item in zip(items, items[1:]):
            if isinstance(item, Free) and copy in item.buffers:
                own = [before] if isinstance(before, Event) else [e for e, _ in event_paths(replace(p, body=(before,)))]
                assert any(copy in e.reads or isinstance(e, Free) for e in own), show(p, event=item.id)
        for item in items:
            if isinstance(item, When | Loop):
                block(item.body)

    block(p.body)


def test_no_realloc_is_added_where_nothing_is_trained_in_between() -> None:
    for flow in ("step", "twice", "until", "eval"):
        assert len([e for e, _ in event_paths(plan(flow)) if isinstance(e, Realloc)]) <= 1 + len(
            [e for e, _ in event_paths(plan(flow, keep=True)) if isinstance(e, Realloc)]), flow


# ------------------------------------------------------------------------------------------------ what sees it


def test_memory_counts_it_while_it_is_there() -> None:
    p, kept = plan("step"), plan("step", keep=True)
    what = "parameters of actor (dp=4)"
    for curve, other in zip(curves(p, "cpu"), curves(kept, "cpu")):
        for e, _ in event_paths(p):
            if e.id in curve.events:
                held = dict(during(curve, e.id))
                assert (what in held) == isinstance(e, Realloc | Generate | Free) or not isinstance(
                    e, Realloc | Generate | Train | Infer)
        size = dict(during(other, next(e.id for e, _ in event_paths(kept) if isinstance(e, Train))))[what]
        train = [next(e.id for e, _ in event_paths(x) if isinstance(e, Train)) for x in (p, kept)]
        a, b = (sum(n for _, n in during(c, t)) for c, t in zip((curve, other), train))
        assert b - a == size > 0
        assert peak(curve).bytes <= peak(other).bytes


def test_a_diff_and_a_preview_tell() -> None:
    changed = diff(plan("step", keep=True), plan("step"))
    assert [(c.now.kind, c.now.about) for c in changed.inserted] == [("free", "actor")] and not changed.same
    back = diff(plan("step"), plan("step", keep=True))
    assert [c.before is not None and c.after is None for c in back.inserted] == [True]
    assert diff(plan("step"), plan("step")).same
    assert "free" in show(plan("step"), event=frees(plan("step"))[0].id) and "keep=false" in show(plan("step"))


# ------------------------------------------------------------------------------------------------ mistakes in plans


def first(p: Plan, kind: type[Event]) -> Event:
    return next(e for e, _ in event_paths(p) if isinstance(e, kind))


def freeing(p: Plan, buffer: str, mesh: str, behind: int) -> Plan:
    more = Free(id=900, mesh=mesh, buffers=(buffer,))
    return with_body(p, edited(p.body, lambda e: (e, more) if e.id == behind else (e,)))


def test_reading_after_the_free_is_rejected() -> None:
    p = plan("step")
    assert "RL0521" in codes(moved(p, frees(p)[0].id, first(p, Generate).id))


def test_freeing_twice_is_rejected() -> None:
    p = plan("step")
    (free,) = frees(p)
    assert codes(freeing(p, copy_of(p), free.mesh, free.id)) >= {"RL0515"}


def test_freeing_before_it_comes_is_rejected() -> None:
    p = plan("step")
    assert "RL0515" in codes(moved(p, frees(p)[0].id, first(p, Realloc).id))


def test_freeing_in_a_block_that_may_run_twice_is_rejected() -> None:
    p = plan("step")
    (free,) = frees(p)
    again = edited(p.body, lambda e: () if e.id == free.id else (e,))
    steps = again[-1]
    assert isinstance(steps, Loop)
    at = next(i for i, x in enumerate(steps.body) if isinstance(x, Generate))
    body = (*steps.body[: at + 1], Loop("again", 2, (free,)), *steps.body[at + 1 :])
    assert "RL0515" in codes(with_body(p, (*again[:-1], replace(steps, body=body))))


def test_freeing_the_only_copy_is_rejected() -> None:
    p = plan("sync")
    train = first(p, Train)
    assert codes(freeing(p, f"actor@{train.layout}", train.mesh, train.id)) >= {"RL0615"}
    ref = next(e for e, _ in event_paths(p) if isinstance(e, Infer) and e.model == "other")
    assert codes(freeing(p, f"other@{ref.layout}", ref.mesh, ref.id)) >= {"RL0615"}
    frozen = next(e for e, _ in event_paths(p) if isinstance(e, Load) and e.model == "other")
    assert codes(freeing(p, f"other@{frozen.layout}", frozen.mesh, frozen.id)) >= {"RL0615"}


def test_freeing_on_other_ranks_is_rejected() -> None:
    p = plan("step")
    other = next(m.id for m in p.meshes if m.id != frees(p)[0].mesh)
    assert "RL0613" in codes(with_body(p, edited(p.body, lambda e: (
        replace(e, mesh=other),) if e.id == frees(p)[0].id else (e,))))


def test_a_copy_that_is_not_freed_shows_in_the_peak() -> None:
    p = plan("step")
    assert not faults(p) and faults(with_body(p, edited(p.body, lambda e: () if e.id == frees(p)[0].id else (e,)))), \
        "the verifier finds the peaks again"
