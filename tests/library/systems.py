"""Our transcription of what the systems and papers compute, for each call under "Policy gradient" of
docs/algorithms.md.

In: a batch and its values by the names of the page. Out: the number, advantage or weight, as that system writes it:
over tables padded to the longest response, with masks. Shares nothing with the library. `tests/oracles` holds the
library, and these transcriptions, to the systems' own functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.library.harness import Batch, Given

BATCH = Batch({"gen": [3, 9, 1, 4, 4, 7, 2, 8, 5, 6, 1, 9]}, n=3)
LONG = Batch({"gen": [100, 384, 390, 450, 512, 1]}, n=3)  # lengths around the overlong penalty
NEAR = {"old": 0.5, "ref": 0.5, "lp": 0.2}  # how far these are from the fresh log-probabilities
REWARDS = [0.0, 0, 0, 2, 2, 2, 12.5, 0, -3, 0, -11, 1.5]  # two groups without variance, rewards of 0, some beyond ±10


@dataclass(frozen=True)
class Table:
    """x: the fresh values. Tokens are [rows, longest] with zeros behind the response, sequences [rows]."""

    m: Tensor
    x: Tensor
    old: Tensor
    ref: Tensor
    lp: Tensor
    adv: Tensor
    v: Tensor
    ret: Tensor
    rt: Tensor
    chosen: Tensor
    h: Tensor
    sq: Tensor
    r: Tensor
    r2: Tensor
    ended: Tensor
    n: int

    @property
    def lens(self) -> Tensor:
        return self.m.sum(-1)


def data(b: Batch) -> dict[str, Given | float]:
    """The names of the page and their values. `x` are the fresh ones."""
    x = b.logprobs(10)
    given: dict[str, Given | float] = {"x": x}
    for i, (name, far) in enumerate(NEAR.items()):
        given[name] = replace(x, data=x.data + far * b.tokens(11 + i).data)
    given |= {name: b.tokens(20 + i) for i, name in enumerate(("adv", "v", "ret", "rt"))}
    given["chosen"] = replace(x, data=(b.tokens(30).data > 0).double())
    given["h"] = replace(x, data=b.tokens(32).data.abs())
    given["sq"] = replace(x, data=b.tokens(33).data.sigmoid())
    given["r"] = b.given("seq", REWARDS[: b.rows])
    given["r2"] = b.seqs(31)
    return given | {"gen.finished": Given("seq", "gen", torch.arange(b.rows) % 2 == 0), "beta": 0.1}


def table(b: Batch, given: dict[str, Given | float], fresh: Tensor) -> Table:
    def padded(flat: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(flat.split(b.lens["gen"])), batch_first=True)

    known = {k: v.data for k, v in given.items() if isinstance(v, Given)} | {"x": fresh}
    tokens = {k: padded(known[k]) for k in ("x", "old", "ref", "lp", "adv", "v", "ret", "rt", "chosen", "h", "sq")}
    mask = torch.arange(max(b.lens["gen"])) < torch.tensor(b.lens["gen"])[:, None]
    return Table(m=mask.double(), r=known["r"], r2=known["r2"], ended=known["gen.finished"], n=b.n, **tokens)


# ---------------------------------------------------------------------------------------------- what many share


def mean(t: Table, x: Tensor) -> Tensor:
    return (x * t.m).sum() / t.m.sum()


def means(t: Table, x: Tensor) -> Tensor:
    """Of each sequence."""
    return (x * t.m).sum(-1) / t.lens


def sums(t: Table, x: Tensor) -> Tensor:
    return (x * t.m).sum(-1)


def white(t: Table, x: Tensor, system: str) -> Tensor:
    """Over all tokens of the batch."""
    centered = (x - mean(t, x)) * t.m
    biased = (centered**2).sum() / t.m.sum()
    if system == "verl":
        return centered * torch.rsqrt((centered**2).sum() / (t.m.sum() - 1) + 1e-8)
    return centered * biased.clamp(min=1e-8).rsqrt() if system == "openrlhf" else centered / (biased.sqrt() + 1e-5)


def spread(t: Table, r: Tensor) -> Tensor:
    return r[:, None] * t.m


def at_last(t: Table, r: Tensor) -> Tensor:
    return torch.zeros_like(t.m).scatter(1, (t.lens.long() - 1)[:, None], r[:, None])


def returns(t: Table, r: Tensor, gamma: float) -> Tensor:
    out, running = torch.zeros_like(r), torch.zeros(len(r), dtype=torch.float64)
    for i in reversed(range(r.shape[1])):
        running = (r[:, i] + gamma * running) * t.m[:, i]
        out[:, i] = running
    return out


def grouped(t: Table, r: Tensor, eps: float, std: bool = True) -> Tensor:
    g = r.view(-1, t.n)
    return ((g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + eps if std else 1)).flatten()


def others(t: Table, r: Tensor) -> Tensor:
    return (r * t.n - r.view(-1, t.n).sum(1).repeat_interleave(t.n)) / (t.n - 1)


def others_std(t: Table, r: Tensor) -> Tensor:
    """NeMo-RL: of the other sequences, unbiased; where it is 0 nothing is divided."""
    rest = 1 - torch.eye(t.n, dtype=torch.float64)
    first, second = r.view(-1, t.n) @ rest / (t.n - 1), (r.view(-1, t.n) ** 2) @ rest / (t.n - 1)
    return ((second - first**2).clamp(min=0) * (t.n - 1) / (t.n - 2)).sqrt().flatten()


def nemo_rl(t: Table) -> Tensor:
    centered, std = others(t, t.r), others_std(t, t.r)
    return torch.where(std > 1e-7, centered / (std + 1e-6), centered)


def ratio(t: Table, old: Tensor, bound: float = 1e9) -> Tensor:
    return torch.clamp(t.x - old, -bound, bound).exp()


def clip(rho: Tensor, adv: Tensor, low: float = 0.2, high: float = 0.2, dual: float = 0) -> Tensor:
    loss = torch.maximum(-adv * rho, -adv * torch.clamp(rho, 1 - low, 1 + high))
    return torch.where(adv < 0, torch.minimum(loss, -dual * adv), loss) if dual else loss


def k3(t: Table, inner: float = math.inf, outer: float = math.inf) -> Tensor:
    d = torch.clamp(t.ref - t.x, -inner, inner)
    return torch.clamp(d.exp() - d - 1, -outer, outer)


def k3_plus(t: Table) -> Tensor:
    """verl's straight-through form: the value of k3, the gradient of k2."""
    k2 = 0.5 * (t.x - t.ref) ** 2
    return k2 - k2.detach() + k3(t, 20, 10).detach()


def value_loss(t: Table, eps: float) -> Tensor:
    near = t.v + torch.clamp(t.x - t.v, -eps, eps)
    return 0.5 * mean(t, torch.maximum((t.x - t.ret) ** 2, (near - t.ret) ** 2))


def gae(t: Table, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    adv, carry, after = torch.zeros_like(t.rt), torch.zeros(len(t.rt)).double(), torch.zeros(len(t.rt)).double()
    for i in reversed(range(t.rt.shape[1])):
        carry = (t.rt[:, i] + after - t.v[:, i] + lam * carry) * t.m[:, i]
        adv[:, i], after = carry, t.v[:, i] * t.m[:, i]
    return adv, adv + t.v


def kl_reward(t: Table, score: Tensor, coef: float, bound: float = 1e9) -> Tensor:
    return at_last(t, score) - coef * torch.clamp(t.old - t.ref, -bound, bound)


def controller(kl: Tensor, target: float) -> Tensor:
    return 0.1 * (1 + torch.clamp(kl / target - 1, -0.2, 0.2) * 8 / 10_000)


def openrlhf_reward(t: Table, score: Tensor) -> Tensor:
    """By default: score and k1 within ±10."""
    return kl_reward(t, score.clamp(-10, 10), 0.01, 10)


def gspo(t: Table, low: float, high: float, most: float = 1e9) -> Tensor:
    """verl's form: the ratio of the sequence, with the gradient of each token's log-probability. Token by token."""
    s = (t.x - t.x.detach() + means(t, t.x - t.old).detach()[:, None]).clamp(max=most).exp()
    return clip(s, t.r[:, None], low, high)


def gmpo(t: Table, eps: float = 0.4) -> Tensor:
    sign, d = torch.sign(t.r)[:, None], t.x - t.old
    kept = sign * torch.minimum(sign * d, sign * torch.clamp(d, -eps, eps))
    return -(t.r * torch.exp(means(t, kept))).mean()


def sapo(t: Table, bound: float = 1e9) -> Tensor:
    tau = torch.where(t.adv > 0, torch.ones_like(t.adv), 1.05 * torch.ones_like(t.adv))
    return means(t, -torch.sigmoid(tau * (ratio(t, t.old, bound) - 1)) * (4 / tau) * t.adv).mean()


def cispo(t: Table, low: float, high: float, bound: float = 1e9) -> Tensor:
    return mean(t, -torch.clamp(ratio(t, t.old, bound), low, high).detach() * t.adv * t.x)


def gpg(t: Table, counted: Tensor) -> Tensor:
    alpha = len(t.r) / counted.clamp(min=1).double()
    return mean(t, -t.x * spread(t, alpha * grouped(t, t.r, 0, std=False)))


def by_length(t: Table) -> Tensor:
    weighed = (t.r * t.lens).view(-1, t.n).sum(1) / t.lens.view(-1, t.n).sum(1)
    return t.r - weighed.repeat_interleave(t.n)


def mixed(t: Table) -> Tensor:
    """Sequences of the groups that have a variance."""
    return (t.r.view(-1, t.n).std(1) > 0).sum() * t.n


def largest(t: Table, share: float) -> Tensor:
    flat = t.m.bool()
    cov = ((t.old - mean(t, t.old)) * (t.adv - mean(t, t.adv)))[flat]
    chosen = torch.zeros_like(cov)
    chosen[torch.topk(cov, max(int(share * cov.numel()), 1)).indices] = 1
    return torch.zeros_like(t.m).masked_scatter(flat, chosen)


def corrected(t: Table, weight: Tensor, bound: float = 1e9, dual: float = 0) -> Tensor:
    """The weight, of tokens or of sequences, multiplies each token's loss, behind the clip."""
    each = weight[:, None] if weight.dim() == 1 else weight
    return mean(t, clip(ratio(t, t.lp, bound), t.adv, dual=dual) * each)


def mismatch(t: Table) -> Tensor:
    return (t.lp - t.old).exp()


def mismatch_seq(t: Table) -> Tensor:
    return sums(t, t.lp - t.old).exp()


def banded(w: Tensor, low: float, high: float) -> Tensor:
    return torch.where((w < low) | (w > high), 0.0, w)


def real_advantage(t: Table, r: Tensor, discount: float) -> Tensor:
    """At the last token, carried back, then normalized (`adv_norm`, on by default)."""
    return white(t, returns(t, at_last(t, r), discount), "real")


GROUP = "seq-mean-token-mean"
BY_DEFAULT = "old, ref, coef=0.01, most=10, kl_most=10"  # of OpenRLHF
WHITE = "eps=0, unbiased=false, least=1e-8"
VERL = "dual=3, bound=20, kl_bound=20, kl_most=10"
SYSTEMS: dict[str, Callable[[Table], Tensor | tuple[Tensor, ...]]] = {
    "ppo_clip(old=old, adv=adv)": lambda t: mean(t, clip(ratio(t, t.old), t.adv)),
    "ppo_clip(old=old, adv=adv, dual=3, bound=20)": lambda t: mean(t, clip(ratio(t, t.old, 20), t.adv, dual=3)),
    "ppo_clip(old=old, adv=adv, bound=20)": lambda t: mean(t, clip(ratio(t, t.old, 20), t.adv)),
    "ppo_stop(old=old, adv=adv, most_ratio=5)": lambda t: mean(t, clip(ratio(t, t.old), t.adv)),
    f'ppo_clip(old=old, adv=adv, agg="{GROUP}")': lambda t: means(t, clip(ratio(t, t.old), t.adv)).mean(),
    "value_clip(old=v, ret=ret, eps=0.2)": lambda t: value_loss(t, 0.2),
    "value_clip(old=v, ret=ret, eps=0.5)": lambda t: value_loss(t, 0.5),
    "gae(rt, v, gamma=1, lam=0.95)": lambda t: gae(t, 0.95),
    "gae(rt, v, gamma=1, lam=1)": lambda t: gae(t, 1.0),
    "vapo_gae(rt, v, len(gen))": lambda t: gae(t, torch.clamp(1 - 1 / (0.05 * torch.clamp(t.lens, min=1)), min=0)),
    "whiten(adv)": lambda t: white(t, t.adv, "verl"),
    "whiten(adv, eps=0, unbiased=false, least=1e-8)": lambda t: white(t, t.adv, "openrlhf"),
    "whiten(adv, eps=0, unbiased=false, plus=1e-5)": lambda t: white(t, t.adv, "real"),
    "kl_rewards(r, old, ref, coef=0.05)": lambda t: kl_reward(t, t.r, 0.05),
    "kl_rewards(r, old, ref, coef=0.001)": lambda t: kl_reward(t, t.r, 0.001),
    "kl_rewards(r, old, ref, coef=0.01, most=10, kl_most=10)": lambda t: kl_reward(t, t.r.clamp(-10, 10), 0.01, 10),
    "finished_rewards(r, gen.finished, old, ref, coef=0.1, most=20)":
        lambda t: kl_reward(t, torch.where(t.ended, t.r.clamp(-20, 20), 0.0), 0.1),
    "adaptive_kl(beta, mean(sum(old - ref by seq)), n=8, target=6, horizon=10000)":
        lambda t: controller(sums(t, t.old - t.ref).mean(), 6),
    "adaptive_kl(beta, mean(mean(old - ref by seq)), n=8, target=0.1, horizon=10000)":
        lambda t: controller(means(t, t.old - t.ref).mean(), 0.1),
    "adaptive_kl(beta, mean(mean(clip(old - ref, -10, 10) by seq)), n=8, target=6, horizon=10000)":
        lambda t: controller(means(t, (t.old - t.ref).clamp(-10, 10)).mean(), 6),
    "adaptive_kl(beta, 0 - beta * mean(old - ref), n=8, target=6, horizon=10000)":
        lambda t: controller(-0.1 * mean(t, t.old - t.ref), 6),
    "group_norm(r)": lambda t: grouped(t, t.r, 1e-4),
    "group_norm(r, eps=1e-6, alone=true)": lambda t: grouped(t, t.r, 1e-6),
    "clip(group_norm(r, eps=1e-9), -10, 10)": lambda t: grouped(t, t.r, 1e-9).clamp(-10, 10),
    f"discount(kl_rewards(group_norm(r, eps=1e-9), {BY_DEFAULT}), 1)":
        lambda t: returns(t, openrlhf_reward(t, grouped(t, t.r, 1e-9)), 1.0),
    "whiten(per_token(clip(group_norm(r, eps=1e-5), -20, 20), old), eps=0, unbiased=false, plus=1e-5)":
        lambda t: real_advantage(t, grouped(t, t.r, 1e-5).clamp(-20, 20), 1.0),
    "group_norm(r, by_std=false)": lambda t: grouped(t, t.r, 0, std=False),
    "group_norm(r, by_std=false, alone=true)": lambda t: grouped(t, t.r, 0, std=False),
    "clip(group_norm(r, by_std=false), -10, 10)": lambda t: grouped(t, t.r, 0, std=False).clamp(-10, 10),
    "leave_one_out(r, by_std=true)": nemo_rl,
    "leave_one_out(r)": lambda t: others(t, t.r),
    "clip(leave_one_out(r), -10, 10)": lambda t: others(t, t.r).clamp(-10, 10),
    f"discount(kl_rewards(leave_one_out(r), {BY_DEFAULT}), 1)":
        lambda t: returns(t, openrlhf_reward(t, others(t, t.r)), 1.0),
    "gdpo_norm(r, r2, wa=1, wb=1)": lambda t: (lambda s: (s - s.mean()) / (s.std() + 1e-4))(
        grouped(t, t.r, 1e-4) + grouped(t, t.r2, 1e-4)),
    "whiten(per_token(group_norm(r, eps=1e-6, alone=true) + group_norm(r2, eps=1e-6, alone=true), old))":
        lambda t: white(t, spread(t, grouped(t, t.r, 1e-6)) + spread(t, grouped(t, t.r2, 1e-6)), "verl"),
    "grpo(old=old, adv=adv, ref=ref, beta=0.04)":
        lambda t: means(t, clip(ratio(t, t.old), t.adv) + 0.04 * k3(t)).mean(),
    'grpo(old=old, adv=adv, ref=ref, beta=0.04, kl_by_ratio=true, agg="token-mean")':
        lambda t: mean(t, clip(ratio(t, t.old), t.adv) + 0.04 * ratio(t, t.old) * k3(t)),
    "grpo_free(old=old, adv=adv)": lambda t: means(t, clip(ratio(t, t.old), t.adv)).mean(),
    'grpo_free(old=old, adv=adv, agg="token-mean")': lambda t: mean(t, clip(ratio(t, t.old), t.adv)),
    "grpo_free(old=old, adv=adv, dual=2)": lambda t: means(t, -torch.minimum(
        ratio(t, t.old).clamp(max=2) * t.adv, ratio(t, t.old).clamp(0.8, 1.2) * t.adv)).mean(),
    f'grpo(old=old, adv=adv, ref=ref, beta=0.001, {VERL}, agg="token-mean")':
        lambda t: mean(t, clip(ratio(t, t.old, 20), t.adv, dual=3)) + 0.001 * mean(t, k3(t, 20, 10)),
    f'grpo(old=old, adv=adv, ref=ref, beta=0.001, {VERL}, kl_through=true, agg="token-mean")':
        lambda t: mean(t, clip(ratio(t, t.old, 20), t.adv, dual=3)) + 0.001 * mean(t, k3_plus(t)),
    'grpo(old=old, adv=adv, ref=ref, beta=0.01, bound=20, kl_kind="k1", kl_most=10, agg="token-mean")':
        lambda t: mean(t, clip(ratio(t, t.old, 20), t.adv)) + 0.01 * mean(t, (t.x - t.ref).clamp(-10, 10)),
    'grpo(old=old, adv=adv, ref=ref, beta=0.01, bound=20, kl_most=10, agg="token-mean")':
        lambda t: mean(t, clip(ratio(t, t.old, 20), t.adv)) + 0.01 * mean(t, k3(t, outer=10)),
    'grpo(old=old, adv=adv, ref=ref, beta=0.1, agg="token-mean")':
        lambda t: mean(t, clip(ratio(t, t.old), t.adv)) + 0.1 * mean(t, k3(t)),
    "dr_grpo(old=old, adv=adv, horizon=512)": lambda t: sums(t, clip(ratio(t, t.old), t.adv)).sum() / (len(t.r) * 512),
    'grpo_free(old=old, adv=adv, dual=3, bound=20, agg="seq-mean-token-sum-norm", horizon=512)':
        lambda t: sums(t, clip(ratio(t, t.old, 20), t.adv, dual=3)).sum() / (len(t.r) * 512),
    "dapo(old=old, adv=adv)": lambda t: mean(t, clip(ratio(t, t.old), t.adv, high=0.28)),
    "dapo(old=old, adv=adv, bound=20)": lambda t: mean(t, clip(ratio(t, t.old, 20), t.adv, high=0.28)),
    "dapo(old=old, adv=adv, dual=10, bound=20)":
        lambda t: mean(t, clip(ratio(t, t.old, 20), t.adv, high=0.28, dual=10)),
    "r + overlong(len(gen), most=512, buffer=128)":
        lambda t: t.r + torch.clamp(-(t.lens - (512 - 128)) / 128, max=0),
    "gspo(old=old, adv=r)": lambda t: means(t, gspo(t, 3e-4, 4e-4)).mean(),
    'gspo(old=old, adv=r, low=0.2, high=0.2, most=10, agg="token-mean")': lambda t: mean(t, gspo(t, 0.2, 0.2, 10)),
    "gspo(old=old, adv=r, low=0.2, high=0.2)": lambda t: means(t, gspo(t, 0.2, 0.2)).mean(),
    "gspo_token(old=old, adv=adv)": lambda t: means(t, clip(
        (means(t, t.x - t.old).detach()[:, None] + t.x - t.x.detach()).exp(), t.adv, 3e-4, 4e-4)).mean(),
    "cispo(old=old, adv=adv)": lambda t: cispo(t, 0, 5),
    "cispo(old=old, adv=adv, low=1, high=4)": lambda t: cispo(t, 0, 5),
    "cispo(old=old, adv=adv, low=0.2, high=0.2, bound=20)": lambda t: cispo(t, 0.8, 1.2, 20),
    "leave_one_out(r - 0.05 * sum(old - ref by seq))": lambda t: others(t, t.r - 0.05 * sums(t, t.old - t.ref)),
    "reinforce(adv=r)": lambda t: -(t.r * sums(t, t.x)).mean(),
    "reinforce_token(adv=adv)": lambda t: mean(t, -t.adv * t.x),
    "reinforce_pp(kl_rewards(r, old, ref, coef=0.01))":
        lambda t: white(t, returns(t, kl_reward(t, t.r, 0.01), 1.0), "verl"),
    f"reinforce_pp(kl_rewards(r, {BY_DEFAULT}), {WHITE})":
        lambda t: white(t, returns(t, openrlhf_reward(t, t.r), 1.0), "openrlhf"),
    "reinforce_pp_baseline(r, old)": lambda t: white(t, spread(t, grouped(t, t.r, 0, std=False)), "verl"),
    "reinforce_pp_baseline(r, old, alone=true)": lambda t: white(t, spread(t, grouped(t, t.r, 0, std=False)), "verl"),
    f"reinforce_pp(kl_rewards(r - mean(r by prompt), {BY_DEFAULT}), {WHITE})":
        lambda t: white(t, returns(t, openrlhf_reward(t, grouped(t, t.r, 0, std=False)), 1.0), "openrlhf"),
    "over_greedy(r, r2)": lambda t: t.r - t.r2.view(-1, t.n).mean(1).repeat_interleave(t.n),
    "reinforce_token(adv=whiten(discount(at_end(over_greedy(r, r2)), 0.99), eps=0, unbiased=false, plus=1e-5))":
        lambda t: mean(t, -t.x * real_advantage(t, t.r - t.r2.view(-1, t.n).mean(1).repeat_interleave(t.n), 0.99)),
    "optimal_baseline(r, len(gen))": by_length,
    "optimal_baseline(r, len(gen), alone=true)": by_length,
    "gpg(adv=gpg_norm(r))": lambda t: gpg(t, mixed(t)),
    "gpg(adv=gpg_norm(r, nonzero=true, alone=true))": lambda t: gpg(t, torch.count_nonzero(t.r)),
    "sapo(old=old, adv=adv)": sapo,
    "sapo(old=old, adv=adv, bound=20)": lambda t: sapo(t, 20),
    "gmpo(old=old, adv=r)": gmpo,
    "gmpo(old=old, adv=r, low=0.2, high=0.2)": lambda t: gmpo(t, 0.2),
    "kl_cov_tokens(old, adv, share=2e-3)": lambda t: largest(t, 2e-3),
    "kl_cov_tokens(old, adv, share=2e-4)": lambda t: largest(t, 2e-4),
    "clip_cov(old=old, adv=adv, chosen=chosen)": lambda t: mean(t, clip(ratio(t, t.old), t.adv) * (1 - t.chosen)),
    "kl_cov(old=old, adv=adv, chosen=chosen, coef=1)":
        lambda t: mean(t, -t.adv * ratio(t, t.old) + t.chosen * (t.x - t.old).abs()),
    "kl_cov(old=old, adv=adv, chosen=chosen, coef=0.1)":
        lambda t: mean(t, -t.adv * ratio(t, t.old) + 0.1 * t.chosen * (t.x - t.old).abs()),
    "ppo_clip(old=lp, adv=adv * truncated(lp, old, most=2), dual=3, bound=20)":
        lambda t: corrected(t, mismatch(t).clamp(max=2), 20, 3),
    "ppo_clip(old=lp, adv=adv * truncated_seq(lp, old, most=2), dual=3, bound=20)":
        lambda t: corrected(t, mismatch_seq(t).clamp(max=2), 20, 3),
    "ppo_clip(old=lp, adv=adv * truncated(lp, old, least=0.5, most=5), bound=20)":
        lambda t: corrected(t, mismatch(t).clamp(0.5, 5), 20),
    f'ppo_clip(old=lp, adv=adv * truncated(lp, old, most=2), agg="{GROUP}")':
        lambda t: means(t, clip(ratio(t, t.lp), t.adv) * mismatch(t).clamp(max=2)).mean(),
    "ppo_clip(old=lp, adv=adv * banded(lp, old, low=0.5, high=5), dual=3, bound=20)":
        lambda t: corrected(t, banded(mismatch(t), 0.5, 5), 20, 3),
    "ppo_clip(old=lp, adv=adv * banded(lp, old, low=0.5, high=5), bound=20)":
        lambda t: corrected(t, banded(mismatch(t), 0.5, 5), 20),
    "ppo_clip(old=lp, adv=adv * truncated(lp, old, most=1e30))": lambda t: corrected(t, mismatch(t)),
    "ppo_clip(old=lp, adv=adv * banded(lp, old, low=0, high=5))": lambda t: corrected(t, banded(mismatch(t), 0, 5)),
    'grpo_free(old=lp, adv=adv * banded_seq(lp, old, high=3), agg="token-mean")':
        lambda t: corrected(t, banded(mismatch_seq(t), 0, 3)),
}
