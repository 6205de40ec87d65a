"""Losses that need the whole minibatch against straight-line torch in float64, in value and gradient to 1e-10: on 1, 2
and 4 dp ranks, in micro-batches of 1, 2 and 7 rows, with empty responses and single rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.library.harness import Batch, Given, run_fn, run_loss

TIGHT = dict(rtol=1e-10, atol=1e-10)
BATCH = Batch.random(3, 4, 3)
N = sum(BATCH.lens["gen"])
LENS = torch.tensor(BATCH.lens["gen"])
ROW = torch.arange(BATCH.rows).repeat_interleave(LENS)
PROMPT = torch.arange(4).repeat_interleave(3)
CUTS = [(dp, mbs) for dp in (1, 2, 4) for mbs in (1, 2, 7)]


def of_rows(x: Tensor) -> Tensor:
    """The sums of token values."""
    return x.new_zeros(len(LENS)).index_add(0, ROW, x)


def of_prompts(x: Tensor) -> Tensor:
    return torch.stack([p.mean() for p in x.split(3)])


def midrank(x: Tensor) -> Tensor:
    return torch.stack([(x < y).sum() + ((x == y).sum() - 1) / 2 for y in x.detach()]).double()


Straight = Callable[[Tensor, Tensor, Tensor], Tensor]
# What a loss returns of its fresh log-probs `lp`, data `a` of tokens and `r` of sequences -> the same in torch.
LOSSES: dict[str, Straight] = {
    "exp(mean(lp))": lambda lp, a, r: lp.mean().exp(),
    "mean(lp * a) / mean(exp(lp))": lambda lp, a, r: (lp * a).mean() / lp.exp().mean(),
    "std(lp) + max(lp) * min(lp * a)": lambda lp, a, r: lp.std() + lp.max() * (lp * a).min(),
    "mean(((lp - mean(lp)) / std(lp)) ** 4)": lambda lp, a, r: (((lp - lp.mean()) / lp.std()) ** 4).mean(),
    "mean(where(stop_gradient(lp) > quantile(stop_gradient(lp), 0.7), lp * a, 0))": lambda lp, a, r: torch.where(
        lp.detach() > lp.detach().quantile(0.7), lp * a, 0.0).mean(),
    "quantile(lp, 0.3) + median(lp * a) + mean(median(lp by seq))": lambda lp, a, r: lp.quantile(0.3) + (
        lp * a).quantile(0.5) + torch.stack([s.quantile(0.5) for s in lp.split(LENS.tolist())]).mean(),
    "mean(sum(lp by seq) * (r - mean(r by prompt)))": lambda lp, a, r: (
        of_rows(lp) * (r - of_prompts(r)[PROMPT])).mean(),
    "mean(log(mean(exp(sum(lp by seq)) by prompt)))": lambda lp, a, r: of_prompts(of_rows(lp).exp()).log().mean(),
    "mean(logsumexp(sum(lp by seq) by prompt)) + mean(std(sum(lp by seq) by prompt))": lambda lp, a, r: torch.stack(
        [s.logsumexp(0) + s.std() for s in of_rows(lp).split(3)]).mean(),
    "-mean(lp * (a - mean(a)) / std(a))": lambda lp, a, r: -(lp * (a - a.mean()) / a.std()).mean(),
    "mean(lp * rank(a))": lambda lp, a, r: (lp * midrank(a)).mean(),
    "mean(sum(lp by seq) * rank(r by prompt))": lambda lp, a, r: (
        of_rows(lp) * torch.cat([midrank(x) for x in r.split(3)])).mean(),
    "mean(logsigmoid(sort(sum(lp by seq)) - sort(r)))": lambda lp, a, r: torch.nn.functional.logsigmoid(
        of_rows(lp).sort().values - r.sort().values).mean(),
    "mean(sort(lp by seq) * a) + mean(sort(sum(lp by seq) by prompt) * r)": lambda lp, a, r: (
        torch.cat([s.sort().values for s in lp.split(LENS.tolist())]) * a).mean() + (
        torch.cat([s.sort().values for s in of_rows(lp).split(3)]) * r).mean(),
    "mean(lp * where(rank(stop_gradient(lp) by seq) < 2, 1, 0))": lambda lp, a, r: (
        lp * torch.cat([(midrank(s.detach()) < 2).double() for s in lp.split(LENS.tolist())])).mean(),
}


def given(seed: int) -> tuple[Given, Given, Given]:
    a = BATCH.tokens(seed + 1)
    a = replace(a, data=(a.data * 4).round() / 4)  # with equal elements
    return BATCH.logprobs(seed), a, BATCH.seqs(seed + 2)


@pytest.mark.parametrize(("dp", "mbs"), CUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient(loss: str, dp: int, mbs: int) -> None:
    lp, a, r = given(5)
    text = f"loss mine(logprobs: token; a: token, r: seq) {{\n  lp = logprobs\n  metric m = std(lp)\n  return {loss}\n}}"
    done = run_loss("", "mine(a=a, r=r)", BATCH, {"logprobs": lp}, dp=dp, mbs=mbs, text=text, a=a, r=r)
    leaf = lp.data.clone().requires_grad_()
    expected = LOSSES[loss](leaf, a.data, r.data)
    expected.backward()
    torch.testing.assert_close(done.loss, expected.item(), **TIGHT)
    torch.testing.assert_close(done.grads["logprobs"], leaf.grad, **TIGHT)
    torch.testing.assert_close(done.metrics["m"], lp.data.std().item(), **TIGHT)
    assert float(leaf.grad.abs().max()) > 1e-4


def test_cuts_change_no_bit() -> None:
    lp, a, r = given(6)
    text = ("loss mine(logprobs: token; a: token, r: seq) {\n  x = logprobs - mean(logprobs)\n"
            "  return mean(exp(x) * a) / std(logprobs) + mean(sum(x by seq) * rank(r by prompt))\n}")
    each = [run_loss("", "mine(a=a, r=r)", BATCH, {"logprobs": lp}, dp=dp, mbs=mbs, text=text, a=a, r=r)
            for dp, mbs in CUTS]
    assert len({x.loss for x in each}) == 1
    assert all(torch.equal(x.grads["logprobs"], each[0].grads["logprobs"]) for x in each)


@pytest.mark.parametrize("edge", ["one_token", "empty", "alone"])
@pytest.mark.parametrize(("dp", "mbs"), [(1, 1), (2, 2), (4, 7)])
def test_edges(edge: str, dp: int, mbs: int) -> None:
    b = Batch.random(4, 3, 4, edge=edge)
    lp, r = b.logprobs(1), b.seqs(2)
    rows = torch.arange(b.rows).repeat_interleave(torch.tensor(b.lens["gen"]))
    text = ("loss mine(logprobs: token; r: seq) {\n  s = sum(logprobs by seq)\n"
            "  return log(mean(exp(-s))) + mean((s - mean(s by prompt)) * rank(r))\n}")
    done = run_loss("", "mine(r=r)", b, {"logprobs": lp}, dp=dp, mbs=mbs, text=text, r=r)
    leaf = lp.data.clone().requires_grad_()
    s = leaf.new_zeros(b.rows).index_add(0, rows, leaf)
    means = s.view(-1, b.n).mean(1).repeat_interleave(b.n)
    expected = (-s).exp().mean().log() + ((s - means) * midrank(r.data)).mean()
    expected.backward()
    torch.testing.assert_close(done.loss, expected.item(), **TIGHT)
    torch.testing.assert_close(done.grads["logprobs"], leaf.grad, **TIGHT)


@pytest.mark.parametrize(("dp", "mbs"), CUTS)
def test_pairs_conditions_and_values_of_prompts(dp: int, mbs: int) -> None:
    b = Batch.pairs(3, 8)
    chosen, rejected = b.logprobs(1), b.logprobs(2, "pair.rejected")
    keep, w = replace(b.seqs(3), data=b.seqs(3).data > 0), b.seqs(4)
    text = ("loss aot(chosen: token, rejected: token; keep: seq, w: seq, beta = 0.1) {\n"
            "  better = sort(sum(chosen by seq))\n  worse = sort(sum(rejected by seq))\n"
            "  metric gap = median(better - worse)\n"
            "  return -mean(where(keep > 0, w, 1) * logsigmoid(beta * (better - worse)))\n}")
    done = run_loss("", "aot(keep=keep, w=w, beta=0.5)", b, {"chosen": chosen, "rejected": rejected}, dp=dp, mbs=mbs,
                    text=text, keep=keep, w=w)
    x, y = (g.data.clone().requires_grad_() for g in (chosen, rejected))
    sums = [torch.stack([t.sum() for t in z.split(b.lens[f])]) for z, f in zip((x, y), b.lens, strict=True)]
    gap = sums[0].sort().values - sums[1].sort().values
    expected = -(torch.where(keep.data, w.data, 1.0) * torch.nn.functional.logsigmoid(0.5 * gap)).mean()
    expected.backward()
    torch.testing.assert_close(done.loss, expected.item(), **TIGHT)
    torch.testing.assert_close(done.grads["chosen"], x.grad, **TIGHT)
    torch.testing.assert_close(done.grads["rejected"], y.grad, **TIGHT)
    torch.testing.assert_close(done.metrics["gap"], gap.quantile(0.5).item(), **TIGHT)


@pytest.mark.parametrize(("dp", "mbs"), CUTS)
def test_values_of_prompts_count_once(dp: int, mbs: int) -> None:
    lp, w = BATCH.logprobs(1), BATCH.of_prompts(9)
    text = "loss mine(logprobs: token; w: prompt) {\n  return mean(logprobs * w) * sum(w) + mean(logprobs) * rank_sum(w)\n}"
    text = text.replace("rank_sum(w)", "sum(rank(w) * w)")
    done = run_loss("", "mine(w=w)", BATCH, {"logprobs": lp}, dp=dp, mbs=mbs, text=text, w=w)
    leaf = lp.data.clone().requires_grad_()
    expected = (leaf * w.data[PROMPT][ROW]).mean() * w.data.sum() + leaf.mean() * (midrank(w.data) * w.data).sum()
    expected.backward()
    torch.testing.assert_close(done.loss, expected.item(), **TIGHT)
    torch.testing.assert_close(done.grads["logprobs"], leaf.grad, **TIGHT)


@pytest.mark.parametrize(("dp", "mbs"), CUTS)
def test_entries(dp: int, mbs: int) -> None:
    b = replace(BATCH, width=5)
    student, teacher = b.alternatives(1), b.alternatives(2)
    text = ("loss mine(logprobs_at: entry; t: entry) {\n  d = sum(exp(t) * (t - logprobs_at) by token)\n"
            "  top = max(sort(logprobs_at by token) by seq)\n"
            "  return mean(where(d > quantile(d, 0.5), d, 0)) + std(logprobs_at) + mean(top)\n}")
    done = run_loss("", "mine(t=t)", b, {"logprobs_at": student}, dp=dp, mbs=mbs, text=text, t=teacher)
    leaf = student.data.clone().requires_grad_()
    s, t = leaf.view(-1, 5), teacher.data.view(-1, 5)
    d = (t.exp() * (t - s)).sum(1)
    best = torch.stack([x.max() for x in s.split(b.lens["gen"])])
    expected = torch.where(d > d.quantile(0.5), d, 0.0).mean() + leaf.std() + best.mean()
    expected.backward()
    torch.testing.assert_close(done.loss, expected.item(), **TIGHT)
    torch.testing.assert_close(done.grads["logprobs_at"], leaf.grad, **TIGHT)


def test_a_nan_is_seen_everywhere() -> None:
    lp = BATCH.logprobs(1)
    lp.data[7] = torch.nan
    text = "loss mine(logprobs: token) {\n  metric most = max(logprobs)\n  return exp(mean(logprobs))\n}"
    done = run_loss("", "mine()", BATCH, {"logprobs": lp}, dp=4, mbs=1, text=text)
    assert done.loss != done.loss and done.metrics["most"] != done.metrics["most"]


# ------------------------------------------------------------------------------------------------ orders in the flow


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("edge", ["", "one_token", "empty", "alone"])
def test_orders_in_the_flow(dp: int, edge: str) -> None:
    b = Batch.random(5, 4, 3, edge=edge)
    x = b.tokens(1)
    x = replace(x, data=(x.data * 2).round())
    s, p, w = b.seqs(2), b.of_prompts(3), replace(b, width=3)
    e = w.alternatives(4)
    lens, n = b.lens["gen"], b.n
    prompts = [sum(lens[i:i + n]) for i in range(0, b.rows, n)]

    def each(op: Callable[[Tensor], Tensor], data: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([op(part) for part in data.split(sizes)]) if len(data) else data

    for name, op in (("sort", lambda t: t.sort().values), ("rank", lambda t: midrank(t) if len(t) else t)):
        for by, data, sizes, arg in (("", x, [len(x.data)], "x"), (" by seq", x, lens, "x"), (" by prompt", x, prompts, "x"),
                                     ("", s, [b.rows], "s"), (" by prompt", s, [n] * (b.rows // n), "s"),
                                     ("", p, [b.rows // n], "p")):
            got = run_fn("", f"{name}({arg}{by})", b, dp=dp, **{arg: data})
            torch.testing.assert_close(got, each(op, data.data, sizes), **TIGHT)
        got = run_fn("", f"{name}(e by token)", w, dp=dp, e=e)
        torch.testing.assert_close(got, each(op, e.data, [3] * sum(lens)), **TIGHT)


def test_nan_has_no_rank() -> None:
    x = replace(BATCH.seqs(1), data=torch.tensor([3.0, torch.nan, 1.0] * 4, dtype=torch.float64))
    got = run_fn("", "rank(x by prompt)", BATCH, x=x, dp=2)
    torch.testing.assert_close(got, torch.tensor([1.0, torch.nan, 0.0] * 4, dtype=torch.float64), equal_nan=True)
