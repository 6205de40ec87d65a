"""Ranks and meshes as people read them: one form, and never one that means something else in a program."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rldsl.diag import counted
from rldsl.inspect.show import show
from rldsl.plan.model import Layout, Mesh, Ranges
from rldsl.plan.notation import joined, layout_text, mesh_text, ranges_text, ranks_text
from rldsl.plan.projection import to_ranges
from tests.plan.sample import grpo


@pytest.mark.parametrize("ranges, ranks, mesh", [
    (((0, 1),), "0", "mesh(0:1)"), (((0, 8),), "0-7", "mesh(0:8)"), (((0, 4), (4, 8)), "0-7", "mesh(0:8)"),
    (((0, 4), (8, 12)), "0-3,8-11", "ranks 0-3,8-11"), (((1, 2), (0, 1)), "1,0", "ranks 1,0"), ((), "", "ranks ")])
def test_ranges(ranges: Ranges, ranks: str, mesh: str) -> None:
    assert (ranges_text(ranges), mesh_text(ranges)) == (ranks, mesh)


def test_two_runs_are_not_written_as_nodes_and_devices() -> None:
    """`mesh(0:4,8:12)` would be devices 8 to 11 of nodes 0 to 3."""
    assert layout_text(Layout("L", "m", dp=8), Mesh("m", ((0, 4), (8, 12)))) == "ranks 0-3,8-11 dp=8"
    assert layout_text(Layout("L", "m", dp=4, tp=2), Mesh("m", ((0, 8),))) == "mesh(0:8) dp=4 tp=2"


@given(st.lists(st.integers(0, 30), unique=True))
def test_ranks_and_ranges_say_the_same(ranks: list[int]) -> None:
    each = tuple((r, r + 1) for r in ranks)
    assert ranks_text(ranks) == ranges_text(each) and joined(each) == to_ranges(ranks)


def test_ten_thousand_million_ranks_are_no_burden() -> None:
    assert mesh_text(((0, 10**12),)) == "mesh(0:1000000000000)"


@pytest.mark.parametrize("number, noun, text", [
    (0, "rank", "0 ranks"), (1, "rank", "1 rank"), (2, "rank", "2 ranks"), (1, "entry", "1 entry"),
    (3, "entry", "3 entries")])
def test_one_of_a_thing_is_singular(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


def test_a_plan_for_one_rank_and_one_step_is_shown_in_the_singular() -> None:
    plan = grpo()
    several, one = (show(replace(plan, header=replace(plan.header, world=n, steps=n))).splitlines()[0] for n in (2, 1))
    assert "  2 ranks  2 steps  " in several and "  1 rank  1 step  " in one
