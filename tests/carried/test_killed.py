"""A run that dies in every step, while responses wait and others have been generated ahead, ends as if it had not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.buffers.kills import SCOPES, compiled, differences, in_every_step, num_events, prepared, start, survive


@pytest.mark.thorough
def test_it_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    base = prepared(tmp_path / "base", lag=1, per_step=True)
    plan = compiled(base, "two")
    start(plan, base, "whole")
    assert survive(base, "killed", [plan], in_every_step(num_events(plan), SCOPES)) == 5
    assert differences(base, "killed", "whole") == []
