"""`std.gkd` against straight-line torch, token by token, in float64 to 1e-10: value and gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.library.harness import Batch, Given, run_fn, run_loss

TIGHT = dict(rtol=1e-10, atol=1e-10)
K = 5
Token = tuple[Tensor, Tensor]  # log-probs of K tokens, of the student and of the teacher


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


def jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Agarwal et al. 2023, section 2, with TRL's meaning of beta."""
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def with_rest(x: Tensor) -> Tensor:
    return torch.cat((x, (1 - x.exp().sum()).log()[None]))


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "ignore": lambda x: x, "rest": with_rest, "renormalize": lambda x: x.log_softmax(-1)}


def batch(edge: str = "") -> Batch:
    return replace(Batch.random(1, 4, 3, edge=edge), width=K)


def tokens(x: Tensor) -> Tensor:
    return x.view(-1, K)


def expected(student: Given, teacher: Given, beta: float, others: str) -> tuple[Tensor, Tensor]:
    leaf = student.data.clone().requires_grad_()
    way = WAYS[others]
    terms = [jsd(way(s), way(t), beta) for s, t in zip(tokens(leaf), tokens(teacher.data))]
    loss = torch.stack(terms).mean()
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("edge", ["", "one_token", "empty", "alone"])
@pytest.mark.parametrize("others", WAYS)
@pytest.mark.parametrize("beta", [0, 1, 0.5, 0.1])
def test_value_and_gradient_are_the_papers(beta: float, others: str, edge: str) -> None:
    b = batch(edge)
    student, teacher = b.alternatives(1), b.alternatives(2)
    done = run_loss("std.gkd", f'gkd(teacher=t, beta={beta}, others="{others}")', b, {"logprobs_at": student}, t=teacher)
    loss, grad = expected(student, teacher, beta, others)
    torch.testing.assert_close(torch.tensor(done.loss, dtype=torch.float64), loss, **TIGHT)
    torch.testing.assert_close(done.grads["logprobs_at"], grad, **TIGHT)


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("mbs", [1, 2, 7])
@pytest.mark.parametrize(("beta", "others"), [(0, "ignore"), (1, "rest"), (0.5, "renormalize")])
def test_shards_and_micro_batches_change_nothing(beta: float, others: str, dp: int, mbs: int) -> None:
    b = batch()
    student, teacher = b.alternatives(1), b.alternatives(2)
    done = run_loss("std.gkd", f'gkd(teacher=t, beta={beta}, others="{others}")', b, {"logprobs_at": student}, dp=dp,
                    mbs=mbs, t=teacher)
    loss, grad = expected(student, teacher, beta, others)
    torch.testing.assert_close(torch.tensor(done.loss, dtype=torch.float64), loss, **TIGHT)
    torch.testing.assert_close(done.grads["logprobs_at"], grad, **TIGHT)


def test_other_numbers_would_be_seen() -> None:
    b = batch()
    student, teacher = b.alternatives(1), b.alternatives(2)
    done = run_loss("std.gkd", "gkd(teacher=t, beta=0.5)", b, {"logprobs_at": student}, t=teacher)
    for beta, others in ((0.4, "ignore"), (0.5, "rest"), (0, "ignore")):
        assert abs(done.loss - float(expected(student, teacher, beta, others)[0])) > 1e-3


@pytest.mark.parametrize("beta", [0, 1, 0.5])
def test_with_the_rest_a_divergence_is_never_negative(beta: float) -> None:
    b = batch()
    for seed in range(5):
        terms = run_fn("std.gkd", f'divergence_of_given(x, y, {beta}, "rest")', b, x=b.alternatives(seed),
                       y=b.alternatives(seed + 9))
        assert isinstance(terms, Tensor) and float(terms.min()) >= 0
    same = run_fn("std.gkd", f'divergence_of_given(x, x, {beta}, "rest")', b, x=b.alternatives(1))
    assert isinstance(same, Tensor) and float(same.abs().max()) < 1e-12


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("mbs", [1, 2, 7])
def test_minillm(dp: int, mbs: int) -> None:
    """Gu et al. 2023, equation 8 with the clipped ratio of PPO and normalized lengths, row by row."""
    b = batch()
    student, teacher = b.alternatives(1), b.alternatives(2)
    fresh, old, sampled = b.logprobs(3), b.logprobs(4), b.logprobs(5)
    done = run_loss("std.gkd", "minillm(teacher=t, old=old, sampled=sampled)", b,
                    {"logprobs_at": student, "logprobs": fresh}, dp=dp, mbs=mbs, t=teacher, old=old, sampled=sampled)
    at, now = (g.data.clone().requires_grad_() for g in (student, fresh))
    terms = []
    single = [kl(s, t) for s, t in zip(tokens(at), tokens(teacher.data))]
    position = 0
    for length in b.lens["gen"]:
        gap = [float(sampled.data[position + i] - old.data[position + i]) for i in range(length)]
        for i in range(length):
            later = sum(gap[i + 1:]) / max(length - i - 1, 1)
            ratio = (now[position + i] - old.data[position + i]).exp()
            terms.append(single[position + i] - torch.min(ratio * later, ratio.clip(0.8, 1.2) * later))
        position += length
    loss = torch.stack(terms).mean()
    loss.backward()
    torch.testing.assert_close(done.loss, loss.item(), **TIGHT)
    torch.testing.assert_close(done.grads["logprobs_at"], at.grad, **TIGHT)
    torch.testing.assert_close(done.grads["logprobs"], now.grad, **TIGHT)


@pytest.mark.parametrize("to", ["token", "seq", "prompt"])
def test_logsumexp_and_other_reductions(to: str) -> None:
    b = batch()
    x = b.alternatives(7, 40.0)
    segments = {"token": [1] * sum(b.lens["gen"]), "seq": b.lens["gen"],
                "prompt": [sum(b.lens["gen"][i : i + b.n]) for i in range(0, b.rows, b.n)]}[to]
    parts = x.data.split([K * n for n in segments])
    for name, wanted in (("logsumexp", torch.logsumexp), ("sum", torch.sum), ("mean", torch.mean),
                         ("median", lambda p, _: torch.quantile(p, 0.5)), ("min", torch.amin), ("max", torch.amax)):
        got = run_fn("std.gkd", f"{name}(x by {to})", b, x=x, dp=2)
        want = torch.stack([wanted(p, 0) for p in parts])
        torch.testing.assert_close(got, want, **TIGHT)
    whole = run_fn("std.gkd", "logsumexp(x)", b, x=x, dp=4)
    torch.testing.assert_close(whole, x.data.logsumexp(0), **TIGHT)


def test_entries_meet_what_is_coarser() -> None:
    b = batch()
    x, t, s = b.alternatives(1), b.tokens(2), b.seqs(3)
    got = run_fn("std.gkd", "x * t + s", b, x=x, t=t, s=s, dp=2)
    of_token = torch.cat([t.data, ])
    row = torch.arange(b.rows).repeat_interleave(torch.tensor(b.lens["gen"]))
    want = tokens(x.data) * of_token[:, None] + s.data[row][:, None]
    torch.testing.assert_close(got, want.flatten(), **TIGHT)
