"""`across(x by prompt)`: for each token the sum over the same position of the responses to its prompt."""

from __future__ import annotations

import pytest
import torch

from rldsl.diag import Failure
from tests.library.harness import Batch, run_fn, run_loss

RAGGED = Batch({"gen": [3, 2, 5, 1, 0, 4, 6, 6, 1, 0, 0, 2]}, 3)


def by_hand(b: Batch, x: torch.Tensor) -> torch.Tensor:
    rows, found = list(x.split(b.lens["gen"])), []
    for i, row in enumerate(rows):
        group = rows[i // b.n * b.n : i // b.n * b.n + b.n]
        found += [sum(r[at] for r in group if len(r) > at) for at in range(len(row))]
    return torch.stack(found)


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("b", [RAGGED, Batch.random(2, 5, 4), Batch.random(edge="alone"), Batch.random(3, edge="empty")],
                         ids=["ragged", "groups of four", "alone", "empty"])
def test_the_sum_at_each_position(b: Batch, dp: int) -> None:
    x = b.tokens(1)
    got = run_fn("std.ppo", "across(x by prompt)", b, dp=dp, x=x)
    torch.testing.assert_close(got, by_hand(b, x.data), rtol=1e-12, atol=1e-12)


def test_no_tokens_at_all() -> None:
    b = Batch({"gen": [0, 0, 0]}, 3)
    assert run_fn("std.ppo", "across(x by prompt)", b, x=b.tokens(1)).numel() == 0


def test_a_nan_stays_at_its_position() -> None:
    b = Batch({"gen": [2, 2, 1]}, 3)
    x = b.given("token", [1.0, float("nan"), 2.0, 3.0, 4.0])
    got = run_fn("std.ppo", "across(x by prompt)", b, x=x)
    assert got[[0, 2, 4]].tolist() == [7.0] * 3 and bool(got[[1, 3]].isnan().all())


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("mbs", [1, 2, 7])
def test_in_a_loss_its_gradient_is_exact(dp: int, mbs: int) -> None:
    text = "loss spread(logprobs: token; old: token) {\n  return mean((across(logprobs by prompt) - old) ** 2)\n}"
    x, old = RAGGED.tokens(1), RAGGED.tokens(2)
    fresh = x.data.clone().requires_grad_(True)
    want = ((by_hand(RAGGED, fresh) - old.data) ** 2).mean()
    want.backward()
    done = run_loss("std.ppo", "spread(old=old)", RAGGED, {"logprobs": x}, dp=dp, mbs=mbs, text=text, old=old)
    assert done.loss == pytest.approx(float(want.detach()), rel=1e-10)
    torch.testing.assert_close(done.grads["logprobs"], fresh.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("call", ["across(x)", "across(x by seq)", "across(r by prompt)", "across(1 by prompt)"])
def test_what_has_no_positions_is_told(call: str) -> None:
    with pytest.raises(Failure) as failure:
        run_fn("std.ppo", call, RAGGED, x=RAGGED.tokens(1), r=RAGGED.seqs(2))
    assert {d.code for d in failure.value.diagnostics} <= {"RL0208", "RL0203"}
