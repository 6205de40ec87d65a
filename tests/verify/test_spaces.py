"""Forged spaces: trees that do not fit together, and frames that do not lie in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from rldsl.plan.model import Frame, Plan, Space
from tests.plan.sample import grpo
from tests.effort import calls
from tests.samples import thorough_between
from tests.verify.faults import codes, faults
from tests.verify.mutate import space_mutant
from tests.verify.plans import compiled
from tests.verify.stepper import simulate


def space(plan: Plan, id: str, **changes: object) -> Plan:
    return replace(plan, spaces=tuple(replace(s, **changes) if s.id == id else s  # type: ignore[arg-type]
                                      for s in plan.spaces))


def frame(plan: Plan, id: str, **changes: object) -> Plan:
    return replace(plan, frames=tuple(replace(f, **changes) if f.id == id else f  # type: ignore[arg-type]
                                      for f in plan.frames))


def doubled(plan: Plan) -> Plan:
    """Twice the rows everywhere: it fits together, but not with the data."""
    return replace(plan, spaces=tuple(replace(s, count=2 * s.count) for s in plan.spaces))


FORGED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "more rows than the fan": (lambda p: space(p, "gen", count=33), "RL0612"),
    "another fan": (lambda p: space(p, "gen", fan=2), "RL0612"),
    "no fan": (lambda p: space(p, "gen", fan=0, count=0), "RL0612"),
    "negative": (lambda p: space(p, "gen", fan=-4, count=-32), "RL0612"),
    "no rows": (lambda p: space(space(p, "gen", count=0), "prompt", count=0), "RL0612"),
    "other rows of the parent": (lambda p: space(p, "prompt", count=16), "RL0612"),
    "twice the rows": (doubled, "RL0615"),
    "an unknown parent": (lambda p: space(p, "gen", parent="nowhere"), "RL0610"),
    "its own parent": (lambda p: space(p, "gen", parent="gen", fan=1), "RL0612"),
    "each other's parents": (lambda p: space(space(p, "gen", count=8, fan=1), "prompt", parent="gen"), "RL0612"),
    "a root with a fan": (lambda p: space(p, "gen", parent=""), "RL0612"),
    "completions without prompts": (lambda p: space(p, "gen", parent="", fan=1), "RL0615"),
    "prompts below others": (lambda p: replace(space(p, "prompt", parent="above"), spaces=(
        Space("above", 8), Space("prompt", 8, "above"), Space("gen", 32, "prompt", 4))), "RL0615"),
    "iterations below a root": (lambda p: space(p, "gen", iterations=2), "RL0612"),
    "iterations that nothing collects": (lambda p: space(p, "prompt", iterations=2), "RL0536"),
    "iterations that do not divide": (lambda p: space(p, "prompt", iterations=3), "RL0612"),
    "a selection without a frame that is one": (lambda p: space(p, "prompt", of="gen"), "RL0612"),
    "a selection of an unknown space": (lambda p: space(p, "gen", of="nowhere"), "RL0610"),
    "a selection of itself": (lambda p: frame(space(p, "gen", of="gen"), "gen", selected_from="gen"), "RL0612"),
    "a frame that is a selection, in a space that is none": (
        lambda p: frame(p, "gen", selected_from="prompt", present_in="gen"), "RL0612"),
    "a frame without a space": (lambda p: frame(p, "gen", row_space="nowhere"), "RL0610"),
    "present as in other rows": (lambda p: frame(p, "prompt", present_in="gen"), "RL0612"),
    "a space twice": (lambda p: replace(p, spaces=(*p.spaces, p.spaces[0])), "RL0611"),
    "a space less": (lambda p: replace(p, spaces=p.spaces[1:]), "RL0610"),
    "completions among the prompts": (lambda p: frame(p, "gen", row_space="prompt"), "RL0616"),
}


def test_the_plans_verify() -> None:
    assert not faults(grpo()) and not faults(compiled()["dynamic"])


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_space_has_its_code(what: str) -> None:
    forge, code = FORGED[what]
    found = faults(forge(grpo()))
    assert code in {d.code for d in found}, [(d.code, d.title) for d in found]


@pytest.fixture(scope="module")
def dynamic() -> Plan:
    """With a selection and what a `repeat ... until` collects."""
    return compiled()["dynamic"]


def test_selections_and_collections_have_trees_of_their_own(dynamic: Plan) -> None:
    spaces = {s.id: s for s in dynamic.spaces}
    frames: dict[str, Frame] = {f.id: f for f in dynamic.frames}
    selected = [f for f in frames.values() if f.selected_from]
    assert selected and any(s.iterations > 1 for s in spaces.values())
    for f in selected:
        own, of = spaces[f.row_space], spaces[frames[f.selected_from].row_space]
        assert own.of == of.id and (own.count, own.fan) == (of.count, of.fan)
        assert not own.parent or spaces[own.parent].of == of.parent


@pytest.mark.parametrize(("changes", "code"), [
    ({"of": ""}, "RL0612"), ({"parent": ""}, "RL0612"), ({"fan": 1, "count": 1}, "RL0612"), ({"of": "nowhere"}, "RL0610"),
], ids=["of", "parent", "fan", "unknown"])
def test_every_selection_is_held_to_what_it_selects_from(dynamic: Plan, changes: dict[str, object], code: str) -> None:
    chosen = [s for s in dynamic.spaces if s.of and s.parent]
    assert chosen
    for s in chosen:
        assert code in {d.code for d in faults(space(dynamic, s.id, **changes))}, s.id


def test_every_number_of_iterations_is_that_of_its_loop(dynamic: Plan) -> None:
    roots = [s for s in dynamic.spaces if s.iterations > 1]
    assert roots
    for s in roots:
        for other in (1, s.count):
            assert {d.code for d in faults(space(dynamic, s.id, iterations=other))} & {"RL0536", "RL0612", "RL0615"}, s.id


@pytest.mark.parametrize("name", thorough_between(["sample", "grpo", "dpo", "eval", "dynamic"]))
def test_every_harmful_tree_is_refused(name: str) -> None:
    """Trees that are sound by themselves, but not those of the plan's events: what the simulator of all ranks calls
    harmful has a code."""
    plan = grpo() if name == "sample" else compiled()[name]
    draw, seen, refused = random.Random(len(name)), set[str](), 0
    for n in range(60):
        told, mutant = space_mutant(plan, draw)
        if told in seen or mutant == plan:
            continue
        seen.add(told)
        if found := faults(mutant):
            refused += 1
            assert all(d.code.startswith("RL0") for d in found)
        elif not (verdict := simulate(mutant, random.Random(n))).ends:
            raise AssertionError(f"{told}: {verdict.why}")
    assert refused >= 4


@pytest.mark.thorough
@pytest.mark.parametrize("link", ["parent", "of"])
def test_a_chain_without_end_is_refused_in_bounded_work(link: str) -> None:
    plan = grpo()
    ids = ["prompt", *(f"s{i}" for i in range(2000))]
    chain = tuple(Space(id, 8, **{link: following}) for id, following in zip(ids, (*ids[1:], ""), strict=True))
    forged = replace(plan, spaces=(*chain, *(s for s in plan.spaces if s.id != "prompt")))
    assert "RL0612" in codes(forged)
    assert calls(lambda: codes(forged)) < 20_000_000
