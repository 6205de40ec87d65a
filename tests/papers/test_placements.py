"""The examples that follow papers compute the same numbers wherever their calls run: one rank against six placements, over
three steps, with the same responses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.programs import Metrics
from tests.papers.programs import program, root, run_all

EXAMPLES = ("self_rewarding", "online_ipo", "sppo", "pf_ppo", "critique")
SMALL = dict(steps=3, batch=4, tokens=5)
CLUSTER = (r"(data prompts)", r"cluster nodes=1 gpus=4\n\n\1")
QUICK = (r"adamw\(lr=[^)]*\)", "adamw(lr=0.005)")  # so that a wrong update of one step shows in the next
PLACES = {
    "dp": "place *.* on mesh(0:4) dp=4",
    "tp": "place *.* on mesh(0:2) tp=2",
    "pp": "place *.* on mesh(0:2) pp=2 mbs=2",
    "apart": "place *.generate on mesh(0:2) dp=2\nplace @gen on mesh(3:4)\nplace *.train on mesh(2:4) dp=2 zero=2",
    "mixed": "place *.generate on mesh(0:4) dp=2 tp=2\nplace *.train on mesh(0:4) dp=2 pp=2",
    "cp": "place *.generate on mesh(0:4) dp=4\nplace *.train on mesh(0:4) dp=2 cp=2",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metrics]:
    """The metrics of each example, alone and under each placement: in one world of one rank, and one of four."""
    base = root(tmp_path_factory.mktemp("placements"))
    alone = {name: program(base, name, QUICK, **SMALL) for name in EXAMPLES}
    found = run_all(1, {name: made.compiled("place *.* on mesh(0:1)") for name, made in alone.items()}, base)
    wide = {name: program(base, name, QUICK, CLUSTER, kind="wide", **SMALL) for name in EXAMPLES}
    plans = {f"{name} {place}": made.compiled(rules) for name, made in wide.items() for place, rules in PLACES.items()}
    return found | run_all(4, plans, base, {name: found[name.split()[0]].responses for name in plans})


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
