"""Quantiles within prompts, sequences and tokens, in the flow and inside losses, against torch row by row in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rldsl.diag import Failure
from rldsl.runtime.interpreter.expression_ops import of_all_elements
from tests.library.harness import Batch, run_fn, run_loss

TIGHT = dict(rtol=1e-10, atol=1e-10)
SHARES = (0, 0.3, 0.5, 0.8, 1)


def each(x: Tensor, sizes: list[int], share: float) -> Tensor:
    return torch.stack([t.quantile(share) if len(t) else t.new_zeros(()) for t in x.split(sizes)])


def of_prompts(b: Batch) -> list[int]:
    return [sum(b.lens["gen"][i : i + b.n]) for i in range(0, b.rows, b.n)]


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("edge", ["", "one_token", "empty", "alone"])
@pytest.mark.parametrize("share", SHARES)
def test_in_the_flow(share: float, edge: str, dp: int) -> None:
    b = Batch.random(seed=1, prompts=5, n=3, edge=edge)
    x, r = b.tokens(1), b.seqs(2)
    for call, expected in ((f"quantile(x by seq, {share})", each(x.data, b.lens["gen"], share)),
                           (f"quantile(x by prompt, {share})", each(x.data, of_prompts(b), share)),
                           (f"quantile(r by prompt, {share})", each(r.data, [b.n] * (b.rows // b.n), share))):
        torch.testing.assert_close(run_fn("std.ppo", call, b, x=x, r=r, dp=dp), expected, **TIGHT)


def test_nan_infinities_and_a_share_that_is_computed() -> None:
    b = Batch({"gen": [3, 3, 2]}, n=1)
    x = b.given("token", [1.0, float("nan"), 2.0, float("-inf"), 5.0, float("inf"), 7.0, 9.0])
    found = run_fn("std.ppo", "quantile(x by seq, mean(0 * r) + 0.5)", b, x=x, r=b.seqs(1))
    assert isinstance(found, Tensor) and found[0].isnan() and found[1:].tolist() == [5.0, 8.0]


@pytest.mark.parametrize(("share", "want"), [(-0.5, None), (1.5, None), (1.001, None), (float("nan"), None),
                                             (float("inf"), None), (1 + 1e-7, 4.0), (-1e-7, 1.0)])
def test_a_computed_share_outside_0_to_1_is_nan_and_one_outside_by_rounding_is_the_bound(
        share: float, want: float | None) -> None:
    b = Batch({"gen": [4]}, n=1)
    x = b.given("token", [3.0, 1.0, 4.0, 2.0])
    by_seq = run_fn("std.ppo", "quantile(x by seq, mean(r))", b, x=x, r=b.given("seq", [share]))
    assert isinstance(by_seq, Tensor)
    for found in (by_seq[0], of_all_elements("quantile", x.data, (torch.tensor(share),))):
        assert bool(found.isnan()) if want is None else float(found) == want, found


LOSSES = {
    "mean(quantile(logprobs by seq, 0.3) * r)":
        lambda x, b, r: (each(x, b.lens["gen"], 0.3) * r).mean(),
    "mean(quantile(logprobs by prompt, 0.8) * sum(r by prompt))":
        lambda x, b, r: (each(x, of_prompts(b), 0.8) * r.view(-1, 3).sum(1)).mean(),
    "mean(where(logprobs > quantile(stop_gradient(logprobs) by prompt, 0.5), r * logprobs, 0))":
        lambda x, b, r: torch.where(x > each(x.detach(), of_prompts(b), 0.5).repeat_interleave(torch.tensor(of_prompts(b))),
                                    r.repeat_interleave(torch.tensor(b.lens["gen"])) * x, 0).mean(),
    "mean(quantile(logprobs by seq, sigmoid(mean(r))) * r)":
        lambda x, b, r: (each(x, b.lens["gen"], float(r.mean().sigmoid())) * r).mean(),
}


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("mbs", [1, 2, 7])
@pytest.mark.parametrize("body", LOSSES)
def test_inside_a_loss(body: str, dp: int, mbs: int) -> None:
    b = Batch.random(seed=5, prompts=5, n=3)
    x, r = b.logprobs(1), b.seqs(2)
    leaf = x.data.clone().requires_grad_()
    value = LOSSES[body](leaf, b, r.data)
    (grad,) = torch.autograd.grad(value, leaf)
    text = (f"loss own(logprobs: token; r: seq) {{\n  metric low = mean(quantile(logprobs by seq, 0.1))\n"
            f"  return {body}\n}}\n")
    done = run_loss("", "own(r=r)", b, dict(logprobs=x), dp=dp, mbs=mbs, text=text, r=r)
    torch.testing.assert_close(done.loss, float(value.detach()), **TIGHT)
    torch.testing.assert_close(done.grads["logprobs"], grad, **TIGHT)
    assert done.metrics["low"] == pytest.approx(float(each(x.data, b.lens["gen"], 0.1).mean()), rel=1e-10)


@pytest.mark.parametrize(("call", "code"), [
    ("quantile(x by token, 0.5)", "RL0208"), ("quantile(r by seq, 0.5)", "RL0208"), ("quantile(x by seq, 2)", "RL0205"),
    ("quantile(x by seq, r)", "RL0201"), ("quantile(x by seq)", "RL0204"), ("quantile(x by rows, 0.5)", "RL0101")])
def test_mistakes(call: str, code: str) -> None:
    b = Batch.random(seed=1)
    with pytest.raises(Failure) as failure:
        run_fn("std.ppo", call, b, x=b.tokens(1), r=b.seqs(2))
    assert [d.code for d in failure.value.diagnostics] == [code]
