"""What the verifier says of plans whose evaluations do more than look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import When, Fetch, Generate, Item, Loop, Save
from rldsl.plan.model import Plan
from rldsl.verify import verify
from tests.evaluation.programs import whole
from tests.tiny import make_all


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("plans")
    make_all(folder)
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        (folder / "p.rlf").write_text(whole(True))
        return api.compile("p.rlf", {}, None)


def changed(plan: Plan, change: Callable[[Loop], Loop]) -> Plan:
    """`plan` with another evaluation."""
    def within(items: tuple[Item, ...]) -> tuple[Item, ...]:
        return tuple(change(i) if isinstance(i, Loop) and i.over else replace(i, body=within(i.body))
                     if isinstance(i, Loop | When) else i for i in items)
    return replace(plan, body=within(plan.body))


def codes(plan: Plan) -> set[str]:
    try:
        verify(plan)
    except Failure as failure:
        return {d.code for d in failure.diagnostics}
    return set()


def test_a_plan_is_proved_and_survives_its_file(plan: Plan) -> None:
    assert codes(plan) == set()
    assert decode(encode(plan), "x.plan") == plan
    loops = [x for step in plan.body if isinstance(step, Loop) for e in step.body if isinstance(e, When)
             for x in e.body if isinstance(x, Loop)]
    assert [(x.over, x.trips) for x in loops] == [("heldout", 4)]


def fetch(loop: Loop) -> Fetch:
    return next(e for e in loop.body if isinstance(e, Fetch))


def save(loop: Loop) -> Save:
    e = next(e for e in loop.body if isinstance(e, Generate))
    return Save(id=999, mesh=e.mesh, reads=(f"{e.model}@{e.layout}",), model=e.model, layout=e.layout, path="{out}/x")


MISTAKES = {
    "no_fetch": (lambda x: replace(x, body=tuple(e for e in x.body if not isinstance(e, Fetch))), "RL0530"),
    "two_fetches": (lambda x: replace(x, body=(fetch(x), *x.body)), "RL0611"),
    "another_source": (lambda x: replace(x, over="prompts"), "RL0530"),
    "unknown_source": (lambda x: replace(x, over="nothing"), "RL0610"),
    "a_plain_loop": (lambda x: replace(x, over=""), "RL0615"),
    "a_save": (lambda x: replace(x, body=(*x.body, save(x))), "RL0530"),
    "a_block": (lambda x: replace(x, body=(When(1, x.body),)), "RL0530"),
}


@pytest.mark.parametrize("change,code", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_found(plan: Plan, change: Callable[[Loop], Loop], code: str) -> None:
    assert code in codes(changed(plan, change))
