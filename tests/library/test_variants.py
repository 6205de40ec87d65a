"""The numbers of TRL, verl, OpenRLHF and ReaL where ratios lie far outside every clip and clamp: log-ratios of up to
±30, where only the systems' own guards decide. Each formula is our transcription, token by token (tests/oracles
compares with the systems themselves)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.library.harness import Batch, Given, run_fn, run_loss

TIGHT = dict(rtol=1e-10, atol=1e-10)
BATCH = Batch({"gen": [1, 12, 3, 7, 2, 9]}, n=2)
JUMPS = (0.0, 30.0, -30.0, 15.0, -15.0, 1.5, -1.5, 0.1, -0.1, 21.0, -21.0)  # log-ratios
Token = Callable[[Tensor, float, float, float], Tensor]  # (log-prob, old, advantage, reference) -> its share


def data() -> dict[str, Given]:
    """Jumps of the log-ratio against both signs of the advantage, and of the estimate of the divergence."""
    base = BATCH.logprobs(1).data
    at = torch.arange(base.numel())
    jumps = torch.tensor(JUMPS, dtype=torch.float64)
    adv = torch.where(at // len(JUMPS) % 2 == 0, 1.0, -1.0).double() * (1 + BATCH.tokens(2).data.abs())
    given = {"logprobs": base, "old": base - jumps[at % len(JUMPS)], "ref": base - jumps[(at * 3 + 1) % len(JUMPS)],
             "adv": adv}
    return {n: Given("token", "gen", x) for n, x in given.items()}


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    return torch.clamp(x, min=low, max=high)


def clip_verl(lp: Tensor, old: float, a: float, ref: float) -> Tensor:
    """Log-ratio within ±20; dual clip 3."""
    rho = clamp(lp - old, -20, 20).exp()
    plain = torch.maximum(-a * rho, -a * clamp(rho, 0.8, 1.2))
    return torch.minimum(plain, torch.tensor(-a * 3.0, dtype=torch.float64)) if a < 0 else plain


def clip_openrlhf(lp: Tensor, old: float, a: float, ref: float) -> Tensor:
    rho = clamp(lp - old, -20, 20).exp()
    return -torch.minimum(rho * a, clamp(rho, 0.8, 1.2) * a)


def clip_trl(lp: Tensor, old: float, a: float, ref: float) -> Tensor:
    """No clamp at all."""
    rho = (lp - old).exp()
    return -torch.minimum(rho * a, clamp(rho, 0.8, 1.2) * a)


def delta_trl(lp: Tensor, old: float, a: float, ref: float) -> Tensor:
    """`delta`: the unclipped ratio is at most 2."""
    rho = (lp - old).exp()
    return -torch.minimum(clamp(rho, 0, 2.0) * a, clamp(rho, 0.8, 1.2) * a)


def k3_verl(lp: Tensor, old: float, a: float, ref: float) -> Tensor:
    """Log-ratio within ±20, the result within ±10."""
    d = clamp(ref - lp, -20, 20)
    return clip_verl(lp, old, a, ref) + 0.001 * clamp(d.exp() - d - 1, -10, 10)


def k3_openrlhf(lp: Tensor, old: float, a: float, ref: float) -> Tensor:
    """The result within ±10."""
    d = ref - lp
    return clip_openrlhf(lp, old, a, ref) + 0.01 * clamp(d.exp() - 1 - d, -10, 10)


def k2_openrlhf(lp: Tensor, old: float, a: float, ref: float) -> Tensor:
    """The result of k2 is within ±10 as well."""
    return clip_openrlhf(lp, old, a, ref) + 0.01 * clamp((lp - ref) ** 2 / 2, -10, 10)


def k3_trl(lp: Tensor, old: float, a: float, ref: float) -> Tensor:
    """No clamp."""
    return clip_trl(lp, old, a, ref) + 0.04 * ((ref - lp).exp() - (ref - lp) - 1)


def cispo_verl(lp: Tensor, old: float, a: float, ref: float) -> Tensor:
    return -clamp(clamp(lp - old, -20, 20).exp(), 0.8, 1.2).detach() * a * lp


def cispo_trl(lp: Tensor, old: float, a: float, ref: float) -> Tensor:
    """Only an upper bound, which is `epsilon_high` itself."""
    return -clamp((lp - old).exp(), 0, 5.0).detach() * a * lp


def sapo_verl(lp: Tensor, old: float, a: float, ref: float) -> Tensor:
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau * torch.sigmoid(tau * (clamp(lp - old, -20, 20).exp() - 1))


VARIANTS: dict[str, tuple[str, str, Token, bool]] = {  # module, call, a token's share, whether over sequences' means
    "ppo verl": ("ppo", "ppo_clip(old=old, adv=adv, dual=3, bound=20)", clip_verl, False),
    "ppo openrlhf": ("ppo", "ppo_clip(old=old, adv=adv, bound=20)", clip_openrlhf, False),
    "ppo real": ("ppo", "ppo_stop(old=old, adv=adv, most_ratio=5)", clip_trl, False),
    "grpo trl": ("grpo", 'grpo_free(old=old, adv=adv, agg="token-mean")', clip_trl, False),
    "grpo trl delta": ("grpo", "grpo_free(old=old, adv=adv, dual=2)", delta_trl, True),
    "grpo trl kl": ("grpo", "grpo(old=old, adv=adv, ref=ref)", k3_trl, True),
    "grpo verl": ("grpo", "grpo(old=old, adv=adv, ref=ref, beta=0.001, dual=3, bound=20, kl_bound=20, kl_most=10, "
                  'agg="token-mean")', k3_verl, False),
    "grpo openrlhf": ("grpo", 'grpo(old=old, adv=adv, ref=ref, beta=0.01, bound=20, kl_most=10, agg="token-mean")',
                      k3_openrlhf, False),
    "grpo openrlhf k2": ("grpo", 'grpo(old=old, adv=adv, ref=ref, beta=0.01, bound=20, kl_kind="k2", kl_most=10, '
                         'agg="token-mean")', k2_openrlhf, False),
    "cispo verl": ("cispo", "cispo(old=old, adv=adv, low=0.2, high=0.2, bound=20)", cispo_verl, False),
    "cispo trl": ("cispo", "cispo(old=old, adv=adv, low=1, high=4)", cispo_trl, False),
    "sapo verl": ("sapo", "sapo(old=old, adv=adv, bound=20)", sapo_verl, True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_far_outside_the_clip(name: str) -> None:
    """Value and gradient, whole and in micro-batches of two rows on two shards."""
    module, call, share, by_seq = VARIANTS[name]
    known = data()
    x = known["logprobs"].data.clone().requires_grad_(True)
    terms = [share(x[i], *(float(known[n].data[i]) for n in ("old", "adv", "ref"))) for i in range(x.numel())]
    loss, start = torch.zeros((), dtype=torch.float64), 0
    for size in BATCH.lens["gen"]:
        part = sum(terms[start : start + size])
        loss = loss + (part / size / BATCH.rows if by_seq else part / x.numel())
        start += size
    (grad,) = torch.autograd.grad(loss, x)
    used = {n: g for n, g in known.items() if n != "logprobs" and f"={n}" in call}
    for dp, mbs in ((1, 0), (2, 2)):
        done = run_loss(f"std.{module}", call, BATCH, {"logprobs": known["logprobs"]}, dp=dp, mbs=mbs, **used)
        torch.testing.assert_close(torch.tensor(done.loss, dtype=torch.float64), loss.detach(), **TIGHT)
        torch.testing.assert_close(done.grads["logprobs"], grad, **TIGHT)


@pytest.mark.parametrize("pair", [("ppo verl", "ppo openrlhf"), ("ppo openrlhf", "grpo trl"),
                                  ("grpo verl", "grpo openrlhf"), ("cispo verl", "cispo trl")])
def test_the_same_name_is_not_the_same_number(pair: tuple[str, str]) -> None:
    known = data()

    def number(name: str) -> float:
        module, call, _, _ = VARIANTS[name]
        used = {n: g for n, g in known.items() if n != "logprobs" and f"={n}" in call}
        return run_loss(f"std.{module}", call, BATCH, {"logprobs": known["logprobs"]}, **used).loss

    assert number(pair[0]) != pytest.approx(number(pair[1]), rel=1e-6)


@pytest.mark.parametrize("jump", [9.0, 12.0, -12.0])
@pytest.mark.parametrize("a", [1.0, -1.0])
def test_gspo_of_verl_bounds_the_log_ratio_from_above(jump: float, a: float) -> None:
    """exp(min(mean log-ratio, 10)), clipped; nothing from below."""
    one = Batch({"gen": [4]})
    lp = one.logprobs(1)
    old = Given("token", "gen", lp.data - jump)
    x = lp.data.clone().requires_grad_(True)
    s = torch.clamp((x - old.data).sum() / 4, max=10.0).exp()
    want = -torch.minimum(s * a, torch.clamp(s, 1 - 3e-4, 1 + 4e-4) * a)
    (grad,) = torch.autograd.grad(want, x)
    done = run_loss("std.gspo", "gspo(old=old, adv=adv, low=3e-4, high=4e-4, most=10)", one, {"logprobs": lp}, old=old,
                    adv=one.given("seq", [a]))
    assert done.loss == pytest.approx(float(want.detach()), rel=1e-10)
    torch.testing.assert_close(done.grads["logprobs"], grad, **TIGHT)


def test_kl_reward_of_openrlhf() -> None:
    """r = clip(score, ±10) at the last token, - 0.01 clip(log pi - log ref, ±10) at each."""
    known = data()
    score = BATCH.given("seq", [50.0, -50, 3, 0, 9.9, -10.1])
    want, start = [], 0
    for i, size in enumerate(BATCH.lens["gen"]):
        for t in range(start, start + size):
            kl = min(max(float(known["logprobs"].data[t] - known["ref"].data[t]), -10), 10)
            want.append(-0.01 * kl + (min(max(float(score.data[i]), -10), 10) if t == start + size - 1 else 0))
        start += size
    got = run_fn("std.ppo", "kl_rewards(s, lp, ref, coef=0.01, most=10, kl_most=10)", BATCH, dp=2, s=score,
                 lp=known["logprobs"], ref=known["ref"])
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), **TIGHT)


@pytest.mark.parametrize(("call", "eps"), [("group_norm(r)", 1e-4), ("group_norm(r, eps=1e-6, alone=true)", 1e-6),
                                           ("group_norm(r, eps=1e-9)", 1e-9), ("group_norm(r, eps=1e-5)", 1e-5)])
def test_epsilon_decides_in_groups_that_hardly_vary(call: str, eps: float) -> None:
    r = [1.0, 1.0 + 1e-5, 2.0, 2.0, 0.0, 1e-7]
    want = []
    for a, b in zip(r[::2], r[1::2]):
        std = math.sqrt(((a - (a + b) / 2) ** 2 + (b - (a + b) / 2) ** 2) / 1)
        want += [(a - (a + b) / 2) / (std + eps), (b - (a + b) / 2) / (std + eps)]
    got = run_fn("std.grpo", call, BATCH, dp=2, r=BATCH.given("seq", r))
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("options", "want"), [("eps=1e-6, alone=true", lambda x: x / (1 + 1e-6)),
                                               ("eps=1e-6, alone=true, by_std=false", lambda x: x),
                                               ("", lambda x: 0.0)])
def test_a_group_of_one(options: str, want: Callable[[float], float]) -> None:
    """verl: mean 0 and std 1; TRL: std 0."""
    alone = Batch({"gen": [2, 3]})
    got = run_fn("std.grpo", f"group_norm(r{', ' if options else ''}{options})", alone, r=alone.given("seq", [3.0, -2.0]))
    torch.testing.assert_close(got, torch.tensor([want(3.0), want(-2.0)], dtype=torch.float64), **TIGHT)


@pytest.mark.parametrize("jumped", [True, False])
def test_real_stops_at_the_mean_ratio(jumped: bool) -> None:
    lp = BATCH.logprobs(1)
    old = Given("token", "gen", lp.data - (2.0 if jumped else 1.0))  # e ** 2 > 5 > e
    done = run_loss("std.ppo", "ppo_stop(old=old, adv=adv, most_ratio=5)", BATCH, {"logprobs": lp}, old=old,
                    adv=BATCH.tokens(2), dp=2, mbs=2)
    assert bool(done.metrics["stop"]) == jumped


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_value_normalization_of_real(spread: float) -> None:
    """(x - mean) / sqrt(max(variance, 1e-2)) of the debiased moments, within ±5."""
    x = BATCH.tokens(3, scale=spread, shift=2)
    x.data[0] = 90.0 * spread
    decay, values = 0.99995, BATCH.tokens(3, scale=spread, shift=2).data
    m, s, w = (1 - decay) * values.mean(), (1 - decay) * (values**2).mean(), 1 - decay
    mean, second = float(m) / w, float(s) / w
    want = ((x.data - mean) / math.sqrt(max(second - mean**2, 1e-2))).clamp(-5, 5)
    got = run_fn("std.moments", "clip(normal(x, m, s, w, eps=0.1), -5, 5)", BATCH, dp=2, x=x, m=float(m), s=float(s), w=w)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert float(want.abs().max()) == 5.0
