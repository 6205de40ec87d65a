"""`std.sdft` against straight-line torch, sequence by sequence, in float64 to 1e-10: value and gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.library.harness import Batch, Given, run_loss

TIGHT = dict(rtol=1e-10, atol=1e-10)
K = 5


def batch(edge: str = "") -> Batch:
    return replace(Batch.random(1, 4, 3, edge=edge), width=K)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def divergence(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """[T, K] each -> [T]."""
    if alpha in (0, 1):
        return kl(student, teacher) if alpha else kl(teacher, student)
    mixture = ((1 - alpha) * student.exp() + alpha * teacher.exp()).log()
    return alpha * kl(teacher, mixture) + (1 - alpha) * kl(student, mixture)


def with_rest(x: Tensor) -> Tensor:
    return torch.cat((x, (1 - x.exp().sum(-1, keepdim=True)).log()), -1)


WAYS = {"ignore": lambda x: x, "rest": with_rest, "renormalize": lambda x: x.log_softmax(-1)}


def averaged(terms: Tensor, lens: list[int], skip: int) -> Tensor:
    """The mean over sequences of the mean over their tokens from `skip` on; 0 of a sequence that has none."""
    rows = [x[skip:].mean() if len(x) > skip else x.sum() * 0 for x in terms.split(lens)]
    return torch.stack(rows).mean()


def rows_of(b: Batch) -> list[int]:
    return list(b.lens["gen"])


def bounded(now: Given, old: Given, most: float) -> Tensor:
    return (now.data - old.data).clamp(-20, 20).exp().clamp(max=most)


@pytest.mark.parametrize("edge", ["", "one_token", "alone"])
@pytest.mark.parametrize(("alpha", "others", "skip", "most"), [
    (0.5, "renormalize", 0, 2), (0, "ignore", 1, 1.1), (1, "rest", 2, 2), (0.2, "rest", 0, 1e30)])
@pytest.mark.parametrize(("dp", "mbs"), [(1, 1), (2, 2), (4, 7)])
def test_sdft(alpha: float, others: str, skip: int, most: float, edge: str, dp: int, mbs: int) -> None:
    b = batch(edge)
    student, teacher, now, old = b.alternatives(1), b.alternatives(2), b.logprobs(3), b.logprobs(4)
    done = run_loss("std.sdft", f'sdft(teacher=t, old=old, alpha={alpha}, others="{others}", skip={skip}, most={most})', b,
                    {"logprobs_at": student, "logprobs": now}, dp=dp, mbs=mbs, t=teacher, old=old)
    leaf = student.data.clone().requires_grad_()
    way = WAYS[others]
    terms = divergence(way(leaf.view(-1, K)), way(teacher.data.view(-1, K)), alpha) * bounded(now, old, most)
    loss = averaged(terms, rows_of(b), skip)
    loss.backward()
    torch.testing.assert_close(done.loss, loss.item(), **TIGHT)
    torch.testing.assert_close(done.grads["logprobs_at"], leaf.grad, **TIGHT)
    assert float(done.grads["logprobs"].abs().max()) == 0, "the ratio is a weight"


@pytest.mark.parametrize("edge", ["", "one_token", "alone"])
@pytest.mark.parametrize(("skip", "most"), [(0, 2), (1, 1.1), (3, 1e30)])
@pytest.mark.parametrize(("dp", "mbs"), [(1, 1), (2, 2), (4, 7)])
def test_sdft_sampled(skip: int, most: float, edge: str, dp: int, mbs: int) -> None:
    b = batch(edge)
    teacher, now, old = b.logprobs(2), b.logprobs(3), b.logprobs(4)
    done = run_loss("std.sdft", f"sdft_sampled(teacher=t, old=old, skip={skip}, most={most})", b, {"logprobs": now}, dp=dp,
                    mbs=mbs, t=teacher, old=old)
    leaf = now.data.clone().requires_grad_()
    loss = averaged((now.data - teacher.data) * leaf * bounded(now, old, most), rows_of(b), skip)
    loss.backward()
    torch.testing.assert_close(done.loss, loss.item(), **TIGHT)
    torch.testing.assert_close(done.grads["logprobs"], leaf.grad, **TIGHT)


@pytest.mark.parametrize("skip", [0, 1])
def test_a_token_that_the_teacher_rules_out_is_not_left_out(skip: int) -> None:
    """Its divergence is infinite, which stops a run. Without that token and those after it, the loss would be finite."""
    b = batch()
    student, teacher, now, old = b.alternatives(1), b.alternatives(2), b.logprobs(3), b.logprobs(4)
    out = teacher.data.clone().view(-1, K)
    at = 1 + next(sum(rows_of(b)[:i]) for i, n in enumerate(rows_of(b)) if n > 2)  # the second token of a sequence
    out[at, 0] = -torch.inf
    done = run_loss("std.sdft", f'sdft(teacher=t, old=old, alpha=1, others="ignore", skip={skip})', b,
                    {"logprobs_at": student, "logprobs": now}, t=replace(teacher, data=out.view_as(teacher.data)), old=old)
    assert done.loss == torch.inf
    ruled = b.logprobs(2)
    ruled.data[at] = -torch.inf
    done = run_loss("std.sdft", f"sdft_sampled(teacher=t, old=old, skip={skip})", b, {"logprobs": now}, t=ruled, old=old)
    assert abs(done.loss) == torch.inf


def test_other_numbers_would_be_seen() -> None:
    b = batch()
    student, teacher, now, old = b.alternatives(1), b.alternatives(2), b.logprobs(3), b.logprobs(4)
    values = [run_loss("std.sdft", f"sdft(teacher=t, old=old{more})", b, {"logprobs_at": student, "logprobs": now}, t=teacher,
                       old=old).loss for more in ("", ", alpha=0.4", ", skip=1", ", most=0.5", ', others="rest"')]
    assert len({round(x, 6) for x in values}) == 5
