"""The examples that follow papers compute the same numbers wherever their calls run: one rank against six placements,
over three steps, with the same responses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.programs import Metrics
from tests.papers.programs import program, root, run_all

EXAMPLES = ("self_rewarding", "online_ipo", "sppo", "pf_ppo", "critique", "vineppo")
SMALL = dict(steps=3, batch=4, tokens=4)
# a wrong update shows in the next step, a rounding error does not
QUICK = (r"adamw\(lr=[^)]*\)", "adamw(lr=0.01, eps=1e-3)")
EDITS = {"vineppo": ((r"at=cut, most=most", "every=1, most=most"),)}  # texts are not words
SETS = {"vineppo": dict(group=2, tails=2, most=3)}
PLACES = {
    "dp": "place *.* on mesh(0:2) dp=2",
    "tp": "place *.* on mesh(0:2) tp=2",
    "pp": "place *.* on mesh(0:2) pp=2 mbs=16",
    "cp": "place *.generate on mesh(0:2) dp=2\nplace *.train on mesh(0:2) cp=2",
    "apart": "place @gen on mesh(3:4)\nplace *.generate on mesh(0:2) dp=2\nplace *.train on mesh(2:4) dp=2 zero=2",
    "mixed": "place *.generate on mesh(0:4) dp=2 tp=2\nplace *.train on mesh(0:4) dp=2 pp=2",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metrics]:
    """The metrics of each example, alone and under each placement, in one world of each size."""
    base = root(tmp_path_factory.mktemp("placements"))
    made = {name: program(base, name, QUICK, *EDITS.get(name, ()), **SMALL, **SETS.get(name, {})) for name in EXAMPLES}
    found = run_all(1, {name: made[name].compiled("place *.* on mesh(0:1)") for name in EXAMPLES}, base)
    for size in (2, 4):
        plans = {f"{name} {place}": made[name].compiled(rules) for name in EXAMPLES for place, rules in PLACES.items()
                 if (place in ("apart", "mixed")) == (size == 4)}
        found |= run_all(size, plans, base, {plan: found[plan.split()[0]].responses for plan in plans})
    return found


@pytest.mark.many
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_placement_changes_no_number(runs: dict[str, Metrics], name: str, place: str) -> None:
    alone, other = runs[name], runs[f"{name} {place}"]
    assert len(alone) == len(other) == 3
    for mine, theirs in zip(other, alone, strict=True):
        assert mine == {k: pytest.approx(v, rel=2e-4, abs=2e-5) for k, v in theirs.items()}, place


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_steps_differ(runs: dict[str, Metrics], name: str) -> None:
    """The comparison above is not one of constants."""
    first, second, third = runs[name]
    assert first["actor/grad_norm"] != second["actor/grad_norm"] != third["actor/grad_norm"]
