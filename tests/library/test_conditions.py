"""Functions of the library take conditions, which count as 1 or 0."""

from __future__ import annotations

import pytest
import torch

from tests.library.harness import Batch, run_fn


@pytest.mark.parametrize(("module", "call"), [
    ("std.grpo", "group_norm({})"), ("std.grpo", "group_norm({}, by_std=false)"),
    ("std.grpo", "group_norm({}, alone=true)"),
    ("std.rloo", "leave_one_out({})"), ("std.rloo", "leave_one_out({}, by_std=true)"),
    ("std.opo", "optimal_baseline({}, len(gen))"),
])
def test_a_condition_is_a_reward_of_one_or_zero(module: str, call: str) -> None:
    batch = Batch.random(seed=4, prompts=5, n=4)
    found, wanted = (run_fn(module, call.format(x), batch) for x in ("len(gen) > 4", "where(len(gen) > 4, 1, 0)"))
    assert isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor)
    torch.testing.assert_close(found.double(), wanted.double())
