"""Every policy-gradient objective of the library against a straight-line reference written from its paper: one loop
over sequences and tokens, in plain torch scalars, sharing nothing with the system. Value and gradient, float64,
1e-10."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.library.harness import Batch, Done, Given, run_loss
from tests.samples import thorough_between

TIGHT = dict(rtol=1e-10, atol=1e-10)
BATCHES = {
    "ragged": Batch.random(seed=1, prompts=4, n=3), "one_token": Batch.random(seed=2, edge="one_token"),
    "empty": Batch.random(seed=3, edge="empty"), "alone": Batch.random(seed=4, edge="alone"),
    "all_masked_but_one": Batch({"gen": [0, 0, 5, 0, 0, 0]}, n=3),
}
Rows = list[Tensor]  # the tokens of each sequence
Reference = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """module: in the library. call: as a program writes it. data: of which level its arguments are. want: the loss from
    the fresh values and the data, each a list of the tokens of every sequence (of one number, at seq level)."""

    name: str
    module: str
    call: str
    want: Reference
    data: dict[str, str] = field(default_factory=dict)
    head: str = "causal_lm"


def given(case: Case, batch: Batch) -> tuple[dict[str, Given], dict[str, Given]]:
    """Log-probabilities near the old ones, on both sides of every clip."""
    fresh = "values" if case.head == "value_model" else "logprobs"
    near = {"old": 11, "ref": 12}
    base = batch.logprobs(10)
    data = {}
    for i, (name, level) in enumerate(case.data.items()):
        if name in near:
            noise = batch.tokens(near[name], scale=0.5)
            data[name] = Given("token", base.frame, base.data + noise.data)
        else:
            data[name] = batch.tokens(20 + i) if level == "token" else batch.seqs(20 + i)
    return {fresh: base}, data


def reference(case: Case, batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss and gradient."""
    fresh, data = given(case, batch)
    x = next(iter(fresh.values())).data.clone().requires_grad_(True)
    lens = batch.lens["gen"]
    split = {n: list(g.data.split(lens)) if g.level == "token" else list(g.data.split(1)) for n, g in data.items()}
    loss = case.want(list(x.split(lens)), **split) + 0 * x.sum()  # may be constant: everything clipped
    (grad,) = torch.autograd.grad(loss, x)
    return loss.detach(), grad


def ours(case: Case, batch: Batch, dp: int = 1, mbs: int = 0) -> Done:
    fresh, data = given(case, batch)
    return run_loss(case.module, case.call, batch, fresh, head=case.head, dp=dp, mbs=mbs, **data)


# --------------------------------------------------------------------------- the papers' formulas, token by token


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def token_mean(rows: list[list[Tensor]]) -> Tensor:
    flat = [t for row in rows for t in row]
    return sum(flat, zero()) / len(flat)


def seq_mean_token_mean(rows: list[list[Tensor]]) -> Tensor:
    return sum((sum(row, zero()) / max(len(row), 1) for row in rows), zero()) / len(rows)


def seq_mean_token_sum(rows: list[list[Tensor]]) -> Tensor:
    return sum((sum(row, zero()) for row in rows), zero()) / len(rows)


def horizon(length: float) -> Callable[[list[list[Tensor]]], Tensor]:
    return lambda rows: seq_mean_token_sum(rows) / length


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    return x if low <= float(x.detach()) <= high else torch.tensor(low if float(x.detach()) < low else high, dtype=torch.float64)


def surrogate(rho: Tensor, a: Tensor, low: float, high: float, dual: float = 0) -> Tensor:
    """-min(rho A, clip(rho) A); with a dual clip -max(that, c A) where A < 0."""
    kept = torch.minimum(rho * a, clamp(rho, 1 - low, 1 + high) * a)
    return -(torch.maximum(kept, dual * a) if dual and float(a) < 0 else kept)


def ppo(agg=token_mean, low=0.2, high=0.2, dual=0.0, bound=1e9, kl=None, beta=0.0) -> Reference:
    def loss(lp: Rows, old: Rows, adv: Rows, ref: Rows | None = None) -> Tensor:
        rows = []
        for i in range(len(lp)):
            row = []
            for t in range(len(lp[i])):
                a = adv[i][t] if len(adv[i]) == len(lp[i]) and len(adv[i]) != 1 else adv[i][0]
                x = surrogate(clamp(lp[i][t] - old[i][t], -bound, bound).exp(), a, low, high, dual)
                row.append(x + beta * kl(lp[i][t] - ref[i][t]) if kl else x)
            rows.append(row)
        return agg(rows)
    return loss


def k3(d: Tensor) -> Tensor:
    return torch.exp(-d) - 1 + d


def k3_clamped(inner: float, outer: float) -> Callable[[Tensor], Tensor]:
    return lambda d: clamp(k3(clamp(d, -inner, inner)), -outer, outer)


def through_k2(d: Tensor) -> Tensor:
    """Value k3, gradient that of k2."""
    return k3(d).detach() + 0.5 * d * d - (0.5 * d * d).detach()


def value_loss(eps: float) -> Reference:
    def loss(v: Rows, old: Rows, ret: Rows) -> Tensor:
        rows = []
        for i in range(len(v)):
            row = []
            for t in range(len(v[i])):
                near = old[i][t] + clamp(v[i][t] - old[i][t], -eps, eps)
                row.append(torch.maximum((v[i][t] - ret[i][t]) ** 2, (near - ret[i][t]) ** 2) / 2)
            rows.append(row)
        return token_mean(rows)
    return loss


def gspo(low=3e-4, high=4e-4, most=1e9, agg=seq_mean_token_mean) -> Reference:
    def loss(lp: Rows, old: Rows, adv: Rows) -> Tensor:
        rows = []
        for x, o, a in zip(lp, old, adv):
            s = clamp((x - o).sum() / max(len(x), 1), -1e9, most).exp()
            rows.append([surrogate(s, a[0], low, high)] * len(x))
        return agg(rows)
    return loss


def gspo_token(lp: Rows, old: Rows, adv: Rows, low=3e-4, high=4e-4) -> Tensor:
    rows = []
    for x, o, a in zip(lp, old, adv):
        s = ((x - o).sum() / max(len(x), 1)).exp().detach()
        rows.append([surrogate(s * x[t].exp() / x[t].exp().detach(), a[t], low, high) for t in range(len(x))])
    return seq_mean_token_mean(rows)


def cispo(low: float, high: float, agg=token_mean, bound=1e9) -> Reference:
    return lambda lp, old, adv: agg([[-clamp(clamp(x[t] - o[t], -bound, bound).exp(), 1 - low, 1 + high).detach() * a[t]
                                      * x[t] for t in range(len(x))] for x, o, a in zip(lp, old, adv)])


def gmpo(lp: Rows, old: Rows, adv: Rows, low=0.4, high=0.4) -> Tensor:
    """-(prod of min-clipped ratios) ** (1 / length) * A."""
    total = zero()
    for x, o, a in zip(lp, old, adv):
        product = zero() + 1
        for t in range(len(x)):
            rho = (x[t] - o[t]).exp()
            kept = clamp(rho, math.exp(-low), math.exp(high))
            product = product * (torch.minimum(rho, kept) if float(a[0]) >= 0 else torch.maximum(rho, kept))
        total = total - a[0] * product ** (1 / max(len(x), 1))
    return total / len(lp)


def sapo(lp: Rows, old: Rows, adv: Rows, pos=1.0, neg=1.05) -> Tensor:
    rows = []
    for x, o, a in zip(lp, old, adv):
        row = []
        for t in range(len(x)):
            tau = pos if float(a[t]) > 0 else neg
            row.append(-a[t] * (4 / tau) / (1 + torch.exp(-tau * (torch.exp(x[t] - o[t]) - 1))))
        rows.append(row)
    return seq_mean_token_mean(rows)


def reinforce(agg=seq_mean_token_sum) -> Reference:
    return lambda lp, adv: agg([[-(a[t] if len(a) == len(x) else a[0]) * x[t] for t in range(len(x))]
                                for x, a in zip(lp, adv)])


def clip_cov(lp: Rows, old: Rows, adv: Rows, chosen: Rows) -> Tensor:
    return token_mean([[zero() if float(c[t]) > 0 else surrogate((x[t] - o[t]).exp(), a[t], 0.2, 0.2)
                        for t in range(len(x))] for x, o, a, c in zip(lp, old, adv, chosen)])


def kl_cov(lp: Rows, old: Rows, adv: Rows, chosen: Rows) -> Tensor:
    return token_mean([[-a[t] * (x[t] - o[t]).exp() + (abs(x[t] - o[t]) if float(c[t]) > 0 else 0)
                        for t in range(len(x))] for x, o, a, c in zip(lp, old, adv, chosen)])


OLD_ADV = {"old": "token", "adv": "token"}
SEQ_ADV = {"old": "token", "adv": "seq"}
REF = {**OLD_ADV, "ref": "token"}
CHOSEN = {**OLD_ADV, "chosen": "token"}
SUM_NORM = 'agg="seq-mean-token-sum-norm", horizon=32'
CASES = [
    # PPO: the paper's, then what each system computes by default
    Case("ppo", "std.ppo", "ppo_clip(old=old, adv=adv)", ppo(), OLD_ADV),
    Case("ppo_verl", "std.ppo", "ppo_clip(old=old, adv=adv, dual=3, bound=20)", ppo(dual=3.0, bound=20), OLD_ADV),
    Case("ppo_openrlhf", "std.ppo", "ppo_clip(old=old, adv=adv, bound=20)", ppo(bound=20), OLD_ADV),
    Case("ppo_real", "std.ppo", "ppo_stop(old=old, adv=adv, most_ratio=5)", ppo(), OLD_ADV),
    Case("ppo_trl", "std.ppo", "ppo_clip(old=old, adv=adv, eps=0.2)", ppo(), OLD_ADV),
    Case("ppo_tight", "std.ppo", "ppo_clip(old=old, adv=adv, eps=0.1, high=0.3, dual=1.5, bound=0.4)",
         ppo(low=0.1, high=0.3, dual=1.5, bound=0.4), OLD_ADV),
    Case("ppo_seq_mean", "std.ppo", 'ppo_clip(old=old, adv=adv, agg="seq-mean-token-mean")', ppo(seq_mean_token_mean),
         OLD_ADV),
    Case("ppo_seq_sum", "std.ppo", 'ppo_clip(old=old, adv=adv, agg="seq-mean-token-sum")', ppo(seq_mean_token_sum),
         OLD_ADV),
    Case("ppo_sum_norm", "std.ppo", f"ppo_clip(old=old, adv=adv, {SUM_NORM})", ppo(horizon(32)), OLD_ADV),
    Case("value", "std.ppo", "value_clip(old=old, ret=ret)", value_loss(0.2), {"old": "token", "ret": "token"},
         "value_model"),
    Case("value_verl", "std.ppo", "value_clip(old=old, ret=ret, eps=0.5)", value_loss(0.5),
         {"old": "token", "ret": "token"}, "value_model"),
    # GRPO and its variants
    Case("grpo", "std.grpo", "grpo(old=old, adv=adv, ref=ref)", ppo(seq_mean_token_mean, kl=k3, beta=0.04), REF),
    Case("grpo_trl", "std.grpo", 'grpo_free(old=old, adv=adv, agg="token-mean")', ppo(), OLD_ADV),
    Case("grpo_trl_delta", "std.grpo", "grpo_free(old=old, adv=adv, dual=1.6)", ppo(seq_mean_token_mean, dual=1.6),
         OLD_ADV),
    Case("grpo_verl", "std.grpo", 'grpo(old=old, adv=adv, ref=ref, beta=0.001, dual=3, bound=20, kl_bound=20, kl_most=10, '
         'agg="token-mean")', ppo(dual=3.0, bound=20, kl=k3_clamped(20, 10), beta=0.001), REF),
    Case("grpo_openrlhf", "std.grpo", 'grpo(old=old, adv=adv, ref=ref, beta=0.01, bound=20, kl_most=10, '
         'agg="token-mean")', ppo(bound=20, kl=k3_clamped(1e9, 10), beta=0.01), REF),
    Case("grpo_real", "std.grpo", 'grpo(old=old, adv=adv, ref=ref, beta=0.1, agg="token-mean")',
         ppo(kl=k3, beta=0.1), REF),
    Case("grpo_clamped", "std.grpo", "grpo(old=old, adv=adv, ref=ref, beta=1, kl_bound=0.5, kl_most=0.1)",
         ppo(seq_mean_token_mean, kl=k3_clamped(0.5, 0.1), beta=1.0), REF),
    Case("grpo_k1", "std.grpo", 'grpo(old=old, adv=adv, ref=ref, beta=1, kl_kind="k1")',
         ppo(seq_mean_token_mean, kl=lambda d: d, beta=1.0), REF),
    Case("grpo_k2", "std.grpo", 'grpo(old=old, adv=adv, ref=ref, beta=1, kl_kind="k2")',
         ppo(seq_mean_token_mean, kl=lambda d: d * d / 2, beta=1.0), REF),
    Case("grpo_abs", "std.grpo", 'grpo(old=old, adv=adv, ref=ref, beta=1, kl_kind="abs")',
         ppo(seq_mean_token_mean, kl=abs, beta=1.0), REF),
    Case("grpo_through", "std.grpo", "grpo(old=old, adv=adv, ref=ref, beta=1, kl_through=true)",
         ppo(seq_mean_token_mean, kl=through_k2, beta=1.0), REF),
    Case("grpo_free", "std.grpo", "grpo_free(old=old, adv=adv)", ppo(seq_mean_token_mean), SEQ_ADV),
    Case("dr_grpo", "std.grpo", "dr_grpo(old=old, adv=adv, horizon=64)", ppo(horizon(64)), SEQ_ADV),
    Case("dapo", "std.dapo", "dapo(old=old, adv=adv)", ppo(high=0.28), SEQ_ADV),
    Case("dapo_verl", "std.dapo", "dapo(old=old, adv=adv, dual=10)", ppo(high=0.28, dual=10.0), OLD_ADV),
    Case("dapo_bound", "std.dapo", "dapo(old=old, adv=adv, bound=0.1)", ppo(high=0.28, bound=0.1), OLD_ADV),
    Case("gspo", "std.gspo", "gspo(old=old, adv=adv)", gspo(), SEQ_ADV),
    Case("gspo_verl", "std.gspo", "gspo(old=old, adv=adv, low=0.2, high=0.2, most=10)", gspo(0.2, 0.2, 10), SEQ_ADV),
    Case("gspo_tokens", "std.gspo", 'gspo(old=old, adv=adv, low=0.2, high=0.2, agg="token-mean")',
         gspo(0.2, 0.2, agg=token_mean), SEQ_ADV),
    Case("gspo_sums", "std.gspo", f"gspo(old=old, adv=adv, low=0.2, high=0.2, {SUM_NORM})", gspo(0.2, 0.2, agg=horizon(32)),
         SEQ_ADV),
    Case("gspo_bounded", "std.gspo", "gspo(old=old, adv=adv, low=0.2, high=0.9, most=0.1)", gspo(0.2, 0.9, 0.1), SEQ_ADV),
    Case("gspo_token", "std.gspo", "gspo_token(old=old, adv=adv)", gspo_token, OLD_ADV),
    Case("cispo", "std.cispo", "cispo(old=old, adv=adv)", cispo(1, 4), OLD_ADV),
    Case("cispo_trl", "std.cispo", "cispo(old=old, adv=adv, high=-0.5)", cispo(1, -0.5), OLD_ADV),
    Case("cispo_verl", "std.cispo", "cispo(old=old, adv=adv, low=0.2, high=0.2, bound=20)", cispo(0.2, 0.2), OLD_ADV),
    Case("gmpo", "std.gmpo", "gmpo(old=old, adv=adv)", gmpo, SEQ_ADV),
    Case("sapo", "std.sapo", "sapo(old=old, adv=adv)", sapo, OLD_ADV),
    Case("gpg", "std.gpg", "gpg(adv=adv)", reinforce(token_mean), {"adv": "token"}),
    Case("reinforce", "std.rloo", "reinforce(adv=adv)", reinforce(), {"adv": "seq"}),
    Case("reinforce_token", "std.rloo", "reinforce_token(adv=adv)", reinforce(token_mean), {"adv": "token"}),
    Case("clip_cov", "std.covariance", "clip_cov(old=old, adv=adv, chosen=chosen)", clip_cov, CHOSEN),
    Case("kl_cov", "std.covariance", "kl_cov(old=old, adv=adv, chosen=chosen)", kl_cov, CHOSEN),
]
NAMED = {c.name: c for c in CASES}


@pytest.mark.parametrize("batch", thorough_between(BATCHES))
@pytest.mark.parametrize("name", NAMED)
def test_value_and_gradient_are_those_of_the_formula(name: str, batch: str) -> None:
    case, rows = NAMED[name], BATCHES[batch]
    loss, grad = reference(case, rows)
    done = ours(case, rows)
    torch.testing.assert_close(torch.tensor(done.loss, dtype=torch.float64), loss, **TIGHT)
    torch.testing.assert_close(next(iter(done.grads.values())), grad, **TIGHT)


@pytest.mark.parametrize("name", thorough_between(NAMED))
def test_shards_and_micro_batches_change_nothing(name: str) -> None:
    case, rows = NAMED[name], BATCHES["ragged"]
    whole = ours(case, rows)
    for dp in (1, 2, 4):
        for mbs in (1, 2, 7):
            part = ours(case, rows, dp, mbs)
            assert part.loss == pytest.approx(whole.loss, rel=1e-10, abs=1e-10)
            assert part.metrics == pytest.approx(whole.metrics, rel=1e-10, abs=1e-10)
            for fresh in whole.grads:
                torch.testing.assert_close(part.grads[fresh], whole.grads[fresh], **TIGHT)


def test_every_objective_has_a_reference() -> None:
    from tests.library.harness import _names
    losses = {"ppo_clip", "ppo_stop", "value_clip"}
    for module in ("grpo", "dapo", "gspo", "cispo", "gmpo", "sapo", "gpg", "rloo", "covariance"):
        losses |= {n for n in _names(f"std.{module}") if n not in (
            "group_norm", "group_norm_branches", "gdpo_norm", "overlong", "seq_ratio", "gpg_norm", "leave_one_out",
            "others_var", "covariance", "clip_cov_tokens", "kl_cov_tokens")}
    assert losses - {"rloo_clip"} == {c.call.partition("(")[0] for c in CASES}  # that one: test_more_policy.py
