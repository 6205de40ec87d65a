"""`rlc explain-placement` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.search.commands import folder, rlc, searched


def test_why_not_this_one() -> None:
    said = rlc("explain-placement", "grpo.rlf", "--cluster", "two.yaml", "--on", "*.* on mesh(0:2) tp=2 mbs=8")
    assert said.exit_code == 0, said.output
    for word in ("proposed", "best", "bound", "slower than the best", "if only this call were placed as in the best placement", "tp=2",
                 "the call itself"):
        assert word in said.output, word


def test_the_best_beside_itself(folder: Path) -> None:
    searched("-o", "p.rlf")
    said = rlc("explain-placement", "grpo.rlf", "--cluster", "two.yaml", "--place", "p.rlf")
    assert said.exit_code == 0 and "this is the same placement" in said.output, said.output


def test_one_that_does_not_fit_is_told_so() -> None:
    said = rlc("explain-placement", "grpo.rlf", "--cluster", "two.yaml", "--memory", "30", "--json",
               "--on", "*.* on mesh(0:2) dp=2")
    found = json.loads(said.output)
    assert found["bytes"] > 30e9 >= found["best_bytes"] and {c["call"] for c in found["calls"]} >= {"actor.train"}
