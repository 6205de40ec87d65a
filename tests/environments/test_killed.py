"""A run with environments, killed in every step while tools work, and started again, is the undisturbed run bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environments.kills import STEPS, Kill, compiled, differences, lines, prepared, start, survive


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("killed"))


@pytest.mark.thorough
def test_killed_while_tools_work(base: Path) -> None:
    """On two ranks: after the first turn, in the middle, and after the last one that the last rank has."""
    plan = compiled(base, "dp")
    start(plan, base, "whole")
    found = lines(base / "whole")
    assert len(found) == STEPS and all(line["turns"] == 3 for line in found)
    assert len({line["reward"] for line in found}) == STEPS, "otherwise equal steps prove little"
    survive(base, "killed", plan, [Kill(1, 0, "all"), Kill(2, 6, "rank"), Kill(3, 11, "all")])
    assert differences(base, "killed", "whole") == []
