"""Objectives of preferences beyond those of `test_preference.py`, in the same way: against straight-line torch, sequence
by sequence, in float64 to 1e-10."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.library.harness import Batch, Given, run_fn, run_loss
from tests.library.test_preference import (
    CASES,
    EDGES,
    Case,
    Seqs,
    agree,
    averaged,
    batch_of,
    dpo,
    fresh_of,
    labelled,
    log_sigmoid,
    margins,
    mean,
    of_pairs,
    refs,
    sums,
    wpo,
)
from tests.samples import thorough_between

TIGHT = dict(rtol=1e-10, atol=1e-10)
SCORES = {  # the derivative of f at a ratio t = exp(x): Wang et al. 2023
    "forward_kl": lambda x: -1 / x.exp(),
    "jensen_shannon": lambda x: torch.log(2 * x.exp() / (1 + x.exp())),
    "alpha": lambda x: x.exp() ** -0.3 / -0.3,
}


def f_dpo(w: Seqs, l: Seqs, rw: Seqs, rl: Seqs, name: str, beta: float) -> Tensor:
    f = SCORES[name]
    return averaged([-log_sigmoid(beta * (f((a - b).sum()) - f((c - d).sum()))) for a, b, c, d in zip(w, rw, l, rl)])


def ld_dpo(w: Seqs, l: Seqs, rw: Seqs, rl: Seqs, beta: float, alpha: float) -> Tensor:
    """Liu et al. 2024: the shared length in full, the rest with weight alpha."""
    terms = []
    for a, b, c, d in zip(w, rw, l, rl):
        n = min(len(a), len(c))
        of = lambda x: x[:n].sum() + alpha * x[n:].sum()  # noqa: E731, B023
        terms.append(-log_sigmoid(beta * (of(a) - of(b) - of(c) + of(d))))
    return averaged(terms)


def alphapo(w: Seqs, l: Seqs, beta: float, gamma: float, alpha: float) -> Tensor:
    """Gupta et al. 2025: r = beta (1 - p ** -alpha) / alpha of the mean probability p."""
    r = lambda x: beta * (1 - mean(x).exp() ** -alpha) / alpha  # noqa: E731
    return averaged([-log_sigmoid(r(a) - r(b) - gamma) for a, b in zip(w, l)])


def aot(x: list[Tensor], y: list[Tensor], beta: float, smoothing: float = 0.0) -> Tensor:
    """Melnyk et al. 2024: values of a minibatch in order, compared one by one."""
    gaps = beta * (torch.stack(x).sort().values - torch.stack(y).sort().values)
    return averaged([-(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h) for h in gaps])


def totals(*sides: Seqs) -> list[Tensor]:
    """For each row the sum of the first side minus that of the second."""
    return [a.sum() - b.sum() for a, b in zip(*sides)]


def bco(y: Seqs, ref: Seqs, label: Tensor, shift: float, beta: float) -> Tensor:
    """Jung et al. 2024: cross-entropy of a classifier."""
    terms = []
    for i in range(len(y)):
        p = torch.sigmoid(beta * (y[i] - ref[i]).sum() - shift)
        terms.append(-torch.log(p) if label[i] > 0 else -torch.log(1 - p))
    return averaged(terms)


def of_answers(b: Batch) -> dict[str, Given | float]:
    found = labelled(b)
    found["shift"] = found.pop("z0")
    return found


F_DPO = {name: Case("std.f_dpo", f'f_dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3, divergence="{name}"{more})',
                    lambda c, r, d, name=name: f_dpo(c, r, d["rw"], d["rl"], name, 0.3), refs)
         for name, more in (("forward_kl", ""), ("jensen_shannon", ""), ("alpha", ", alpha=0.7"))}
MORE = {
    "bco_pair": Case("std.side_losses", "bco_pair(ref_chosen=rw, ref_rejected=rl, beta=0.3)",
                     lambda c, r, d: of_pairs(c, r, d["rw"], d["rl"], lambda a, b: -log_sigmoid(a) - log_sigmoid(-b)),
                     refs),
    "bco": Case("std.bco", "bco(ref=ref, label=label, shift=shift, beta=0.3)",
                lambda y, d: bco(y, d["ref"], d["label"], 0.7, 0.3), of_answers, "gen"),
    **{f"f_dpo {name}": case for name, case in F_DPO.items()},
    "ld_dpo": Case("std.ld_dpo", "ld_dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3, alpha=0.4)",
                   lambda c, r, d: ld_dpo(c, r, d["rw"], d["rl"], 0.3, 0.4), refs),
    "dpo of means": Case("std.dpo", "dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3, average=true)",
                         lambda c, r, d: dpo(c, r, d["rw"], d["rl"], 0.3, reduce=mean), refs),
    "aot": Case("std.aot", "aot(ref_chosen=rw, ref_rejected=rl, beta=0.3)",
                lambda c, r, d: aot(totals(c, r), totals(d["rw"], d["rl"]), 0.3), refs),
    "aot smoothed": Case("std.aot", "aot(ref_chosen=rw, ref_rejected=rl, beta=0.3, smoothing=0.2)",
                         lambda c, r, d: aot(totals(c, r), totals(d["rw"], d["rl"]), 0.3, 0.2), refs),
    "aot_unpaired": Case("std.aot", "aot_unpaired(ref_chosen=rw, ref_rejected=rl, beta=0.3)",
                         lambda c, r, d: aot(totals(c, d["rw"]), totals(r, d["rl"]), 0.3), refs),
    "alphapo": Case("std.alphapo", "alphapo()", lambda c, r, d: alphapo(c, r, 2.5, 0.1, 0.25)),
    "alphapo more": Case("std.alphapo", "alphapo(beta=1.5, gamma=0.4, alpha=-0.5, nll=0.3)",
                         lambda c, r, d: alphapo(c, r, 1.5, 0.4, -0.5) - 0.3 * torch.cat(c).sum() / max(1, sum(map(len, c)))),
    "wpo unbounded": Case("std.wpo", "wpo(ref_chosen=rw, ref_rejected=rl, weight=wt, beta=0.3, most=1e30)",
                          lambda c, r, d: averaged([d["wt"][i] * wpo(c[i : i + 1], r[i : i + 1], d["rw"][i : i + 1],
                                                                     d["rl"][i : i + 1], torch.ones(1), 0.3)
                                                    for i in range(len(c))]),
                          lambda b: refs(b) | {"wt": margins(b)["wt"]}),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", MORE)
def test_value_and_gradient_are_the_papers(name: str, edge: str) -> None:
    case = MORE[name]
    b = batch_of(case, edge)
    agree(case, b, fresh_of(case, b), case.data(b))


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("mbs", [1, 2, 7])
@pytest.mark.parametrize("name", thorough_between(MORE))
def test_shards_and_micro_batches_change_nothing(name: str, dp: int, mbs: int) -> None:
    case = MORE[name]
    b = batch_of(case, seed=2)
    agree(case, b, fresh_of(case, b), case.data(b), dp, mbs)


@pytest.mark.parametrize("name", ["bco_pair", "ld_dpo", "wpo unbounded", "aot", "aot_unpaired"])
def test_extreme_log_ratios(name: str) -> None:
    case = MORE[name]
    b = batch_of(case)
    agree(case, b, fresh_of(case, b, 500.0), case.data(b))


@pytest.mark.parametrize(("one", "other"), [
    ('f_dpo(ref_chosen=rw, ref_rejected=rl, divergence="reverse_kl")', "dpo(ref_chosen=rw, ref_rejected=rl)"),
    ('f_dpo(ref_chosen=rw, ref_rejected=rl, divergence="alpha", alpha=1)', "dpo(ref_chosen=rw, ref_rejected=rl)"),
    ('f_dpo(ref_chosen=rw, ref_rejected=rl, divergence="alpha", alpha=0)', "f_dpo(ref_chosen=rw, ref_rejected=rl)"),
    ("ld_dpo(ref_chosen=rw, ref_rejected=rl, alpha=1)", "dpo(ref_chosen=rw, ref_rejected=rl)"),
    ("alphapo(alpha=0, beta=2, gamma=0.7)", "simpo(beta=2, gamma=0.7)")])
def test_at_an_end_of_a_range_they_are_what_is_known(one: str, other: str) -> None:
    b = batch_of(CASES["dpo"], seed=3)
    fresh, modules = fresh_of(CASES["dpo"], b), "std.f_dpo std.ld_dpo std.alphapo std.dpo std.simpo"
    data = refs(b) if "ref" in one else {}
    mine, theirs = (run_loss(modules, call, b, fresh, **data) for call in (one, other))
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-12)
    for name, grad in theirs.grads.items():
        torch.testing.assert_close(mine.grads[name], grad, **TIGHT)


def test_no_power_of_an_alpha_divergence_overflows() -> None:
    """Log-ratios of thousands: the exponents of both sides are at their bound, and nothing is infinite."""
    b = Batch({"pair.chosen": [3, 1], "pair.rejected": [2, 4]})
    fresh = {n: Given("token", g.frame, 3000 * g.data) for n, g in fresh_of(CASES["dpo"], b).items()}
    call = 'f_dpo(ref_chosen=rw, ref_rejected=rl, divergence="alpha", alpha=0.5)'
    done = run_loss("std.f_dpo", call, b, fresh, **refs(b))
    assert math.isfinite(done.loss) and all(g.isfinite().all() for g in done.grads.values())


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_shift_of_bco(dp: int) -> None:
    b = Batch.random(3)
    x, ref, label = b.tokens(1), b.tokens(2), labelled(b)["label"]
    got = run_fn("std.bco", "bco_shift(x, ref, label, beta=0.3)", b, dp=dp, x=x, ref=ref, label=label)
    reward = 0.3 * (sums(b, x) - sums(b, ref))
    good = label.data > 0  # type: ignore[union-attr]
    assert float(got) == pytest.approx(float(reward[good].mean() + reward[~good].mean()) / 2, rel=1e-12)


@pytest.mark.parametrize("label", [1.0, 0.0])
def test_the_shift_of_answers_of_one_kind_is_half_their_mean(label: float) -> None:
    b = Batch.random(3)
    x, ref = b.tokens(1), b.tokens(2)
    got = run_fn("std.bco", "bco_shift(x, ref, label)", b, x=x, ref=ref, label=b.given("seq", [label] * b.rows))
    assert float(got) == pytest.approx(0.05 * float((sums(b, x) - sums(b, ref)).mean()), rel=1e-12)


@pytest.mark.parametrize(("call", "word"), [
    ('f_dpo(ref_chosen=rw, ref_rejected=rl, divergence="js")', "RL0205"),
    ("ld_dpo(ref_chosen=rw, ref_rejected=rl, ld_alpha=0.5)", "RL0107"),
    ("bco_pair(ref_chosen=rw)", "RL0215")])
def test_a_wrong_call_is_told(call: str, word: str) -> None:
    from rldsl.diag import Failure

    b = batch_of(CASES["dpo"])
    with pytest.raises(Failure) as failure:
        run_loss("std.f_dpo std.ld_dpo std.side_losses", call, b, fresh_of(CASES["dpo"], b), **refs(b))
    assert word in {d.code for d in failure.value.diagnostics}
