"""Objectives over several answers to each prompt (`answers=k`), against straight-line torch in float64: TPO, and DPO for
rankings. The rows of the frame `gen` stand for the answers, n of each prompt."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.library.harness import Batch, Given, run_loss

TIGHT = dict(rtol=1e-10, atol=1e-10)
Seqs = list[Tensor]


def tpo(y: Seqs, beta: float, alpha: float, gamma: float, average: bool, smoothing: float) -> Tensor:
    """Saeidi et al. 2024: row by row, the gold answers' tokens in one mean."""
    score = [x.mean() if average else x.sum() for x in y]
    gaps = [beta * (score[i] - score[i + 1]) - gamma for i in range(0, len(y), 3)]
    terms = [-(1 - smoothing) * torch.nn.functional.logsigmoid(g) - smoothing * torch.nn.functional.logsigmoid(-g)
             for g in gaps]
    return torch.stack(terms).mean() - alpha * torch.cat(y[2::3]).mean()


def ranked(y: Seqs, ref: Seqs, n: int, beta: float) -> Tensor:
    """Plackett and Luce: the probability of one order of each row's answers."""
    losses = []
    for i in range(0, len(y), n):
        scores = torch.stack([beta * (a - b).sum() for a, b in zip(y[i : i + n], ref[i : i + n])])
        losses.append(-sum(scores[j] - scores[j:].logsumexp(0) for j in range(n)))
    return torch.stack(losses).mean()


def index(b: Batch) -> Given:
    return b.given("seq", [float(i % b.n) for i in range(b.rows)])


def agree(module: str, call: str, expected: object, b: Batch, dp: int, mbs: int, **given: Given) -> None:
    y = b.logprobs(1)
    leaf = y.data.clone().requires_grad_()
    value = expected(list(leaf.split(b.lens["gen"])))  # type: ignore[operator]
    (grad,) = torch.autograd.grad(value, leaf)
    done = run_loss(module, call, b, dict(logprobs=y), dp=dp, mbs=mbs, **given)
    torch.testing.assert_close(done.loss, float(value.detach()), **TIGHT)
    torch.testing.assert_close(done.grads["logprobs"], grad, **TIGHT)


# as docs/algorithms.md writes them
CALLS = {"tpo(index=index, beta=0.3)", "tpo(index=index, beta=0.3, alpha=0.5, smoothing=0.2)",
         "tpo(index=index, beta=2, gamma=0.5, average=true)", "dpo_ranked(ref=ref, beta=0.3)"}
TPO = {"beta=0.3": (0.3, 1.0, 0.0, False, 0.0), "": (0.01, 1.0, 0.0, False, 0.0), "beta=0.3, alpha=0.5, smoothing=0.2": (0.3, 0.5, 0.0, False, 0.2),
       "beta=2, gamma=0.5, average=true": (2.0, 1.0, 0.5, True, 0.0)}


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("mbs", [1, 2, 7])
@pytest.mark.parametrize("options", TPO)
def test_tpo(options: str, dp: int, mbs: int) -> None:
    b = Batch.random(seed=3, prompts=5, n=3)
    agree("std.tpo", f"tpo(index=index{', ' * bool(options)}{options})", lambda y: tpo(y, *TPO[options]), b, dp, mbs,
          index=index(b))


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("mbs", [1, 2, 7])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_rankings(n: int, dp: int, mbs: int) -> None:
    b = Batch.random(seed=4, prompts=4, n=n)
    ref = b.logprobs(2)
    agree("std.listwise", "dpo_ranked(ref=ref, beta=0.3)", lambda y: ranked(y, b.split(ref), n, 0.3), b, dp, mbs, ref=ref)


def test_two_answers_are_dpo() -> None:
    b = Batch.random(seed=5, prompts=4, n=2)
    ref = b.logprobs(2)
    done = run_loss("std.listwise", "dpo_ranked(ref=ref, beta=0.3)", b, dict(logprobs=b.logprobs(1)), ref=ref)
    gaps = [(0.3 * (y - r).sum()).item() for y, r in zip(b.split(b.logprobs(1)), b.split(ref))]
    expected = [math.log1p(math.exp(bad - good)) for good, bad in zip(gaps[::2], gaps[1::2])]
    assert done.loss == pytest.approx(sum(expected) / 4, rel=1e-12)


def test_the_probabilities_of_all_orders_add_up_to_1() -> None:
    b = Batch({"gen": [1] * 24}, n=4)
    scores = b.logprobs(6).data[:4]
    total = 0.0
    for order in itertools.permutations(range(4)):
        y = b.given("token", torch.cat([scores[list(order)]] * 6))
        done = run_loss("std.listwise", "dpo_ranked(ref=ref, beta=1)", b, dict(logprobs=y), ref=b.given("token", [0.0] * 24))
        total += math.exp(-done.loss)
    assert total == pytest.approx(1, rel=1e-12)


def test_scores_far_apart_are_finite() -> None:
    b = Batch({"gen": [1, 1, 1]}, n=3)
    y = b.given("token", [0.0, -2000.0, -4000.0])
    done = run_loss("std.listwise", "dpo_ranked(ref=ref, beta=1)", b, dict(logprobs=y), ref=b.given("token", [0.0] * 3))
    assert math.isfinite(done.loss) and bool(done.grads["logprobs"].isfinite().all()) and done.metrics["accuracy"] == 1


# ------------------------------------------------------------------------ neighbors among the sequences of a prompt


NEIGHBORS = {
    "cumsum(x by prompt)": lambda t: t.cumsum(0),
    "discount(x by prompt, 0.7)": lambda t: torch.stack([sum(0.7 ** (j - i) * t[j] for j in range(i, len(t)))
                                                         for i in range(len(t))]),
    "next(x by prompt)": lambda t: torch.cat([t[1:], t.new_zeros(1)]),
    "prev(x by prompt)": lambda t: torch.cat([t.new_zeros(1), t[:-1]]),
    "0 * x + last(x by prompt)": lambda t: t[-1].expand(len(t)),
}


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("mbs", [1, 2, 7])
@pytest.mark.parametrize("body", NEIGHBORS)
def test_neighbors_inside_a_loss(body: str, dp: int, mbs: int) -> None:
    b = Batch.random(seed=7, prompts=5, n=3)
    text = f"loss own(logprobs: token) {{\n  x = sum(logprobs by seq)\n  return mean(x * x * ({body}))\n}}\n"

    def expected(y: Seqs) -> Tensor:
        x = torch.stack([s.sum() for s in y])
        return (x * x * torch.cat([NEIGHBORS[body](t) for t in x.split(3)])).mean()

    y = b.logprobs(1)
    leaf = y.data.clone().requires_grad_()
    value = expected(list(leaf.split(b.lens["gen"])))
    (grad,) = torch.autograd.grad(value, leaf)
    done = run_loss("", "own()", b, dict(logprobs=y), dp=dp, mbs=mbs, text=text)
    torch.testing.assert_close(done.loss, float(value.detach()), **TIGHT)
    torch.testing.assert_close(done.grads["logprobs"], grad, **TIGHT)
