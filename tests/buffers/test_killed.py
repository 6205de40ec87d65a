"""A run with a replay buffer, a state of rows, continuations and pairs, killed in every step, one rank or all ranks,
and started again: metrics, tokens and every checkpoint are those of the undisturbed run, bit for bit; started again
under other placements, the rows and states are the same and the rest within rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.buffers.kills import (
    SCOPES,
    STEPS,
    Kill,
    compiled,
    differences,
    in_every_step,
    lines,
    num_events,
    prepared,
    rounded_differences,
    rows_of,
    start,
    survive,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an undisturbed run on two ranks, and one on one rank."""
    return prepared(tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="module")
def two(base: Path) -> bytes:
    plan = compiled(base, "two")
    start(plan, base, "whole")
    return plan


@pytest.mark.thorough
@pytest.mark.many
def test_killed_in_every_step(base: Path, two: bytes) -> None:
    assert survive(base, "killed", [two], in_every_step(num_events(two), SCOPES)) == STEPS
    assert differences(base, "killed", "whole") == []


def test_the_program_uses_its_memory(base: Path, two: bytes) -> None:
    """The comparisons are not of empty buffers and constant states; rows leave, too."""
    added = [int(rows_of(base, "whole", step)["rows of buffer|good|number of rows added"]) for step in range(1, STEPS + 1)]
    assert 0 < added[0] < added[-1] and added[-1] > 8
    first, last = (rows_of(base, "whole", step) for step in (1, STEPS))
    (rate,) = (key for key in last if "state" in key)
    assert not torch.equal(first[rate], last[rate]) and len({line["drawn"] for line in lines(base / "whole")}) > 3


def test_killed_and_resumed_under_other_placements(base: Path, two: bytes) -> None:
    plans = [compiled(base, place) for place in ("one", "tp", "zero")]
    assert survive(base, "moved", plans, [Kill(1, 9, "all"), Kill(3, 22, "all")], like="whole") == 2
    assert rounded_differences(base, "moved", "whole") == []
    wrong = differences(base, "moved", "whole")
    assert "metrics" in wrong and any("actor|param" in x for x in wrong), "the comparison of bits can fail"
