"""More transcriptions in the manner of `systems.py`, of the objectives and advantages that came after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

from tests.library import systems
from tests.library.systems import Table, banded, clip, corrected, mean, means, mismatch, mismatch_seq, ratio, sums


def luspo(t: Table, low: float, high: float) -> Tensor:
    """A sequence's clipped loss, once for each of its tokens."""
    s = means(t, t.x - t.old).exp()[:, None]
    return (clip(s, t.r[:, None], low, high) * t.m).sum(-1).mean()


def vespo(t: Table) -> Tensor:
    with torch.no_grad():
        log_w = sums(t, torch.clamp(t.x - t.old, -20, 20)).clamp(math.log(1e-8), 20)
        k, lam = torch.where(t.r >= 0, 2.0, 3.0), torch.where(t.r >= 0, 3.0, 2.0)
        phi = torch.exp(lam + k * log_w - lam * log_w.exp())
    return mean(t, -(phi * t.r)[:, None] * t.x)


def opsm(t: Table, most: float) -> Tensor:
    """DeepSeek-V3.2: 0 for a sequence with a negative advantage and a large mean of log(old / new)."""
    with torch.no_grad():
        keep = ((t.r >= 0) | (means(t, t.old - t.x) <= most)).double()
    return mean(t, clip(ratio(t, t.old), t.r[:, None]) * keep[:, None])


def dppo(t: Table, valid: Tensor, most: float) -> Tensor:
    weight = ratio(t, t.old, 20).clamp(max=most).detach()
    return mean(t, -t.adv * weight * t.x * valid.detach().double())


def tv(t: Table, most: float) -> Tensor:
    moved = t.x.exp() - t.old.exp()
    return dppo(t, torch.where(t.adv > 0, moved <= 0.2, moved >= -0.2), most)


def kl(t: Table, most: float) -> Tensor:
    new, old = t.x.exp(), t.old.exp()
    far = old * (t.old - t.x) + (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    return dppo(t, torch.where(t.adv > 0, (far <= 0.2) | (new <= old), (far <= 0.2) | (new >= old)), most)


def lead(t: Table, std: bool) -> Tensor:
    """The best response of a group, by what it is better than the second."""
    groups = []
    for g in t.r.view(-1, t.n):
        top = g.sort(descending=True)
        adv = torch.zeros_like(g)
        adv[top.indices[0]] = (top.values[0] - top.values[1]) / (g.std() + 1e-6 if std else 1)
        groups.append(adv)
    return torch.cat(groups)


def of_sets(t: Table, k: int) -> Tensor:
    """Every set of k of the n responses gets the best of its rewards, which is normalized over all sets; a response gets
    the mean over the sets that it is in."""
    found = []
    for g in (t.r.view(-1, t.n) > 0).double():
        sets = list(combinations(range(t.n), k))
        best = torch.stack([g[list(s)].max() for s in sets])
        std = best.std(unbiased=False)
        scores = (best - best.mean()) / std if std > 0 else torch.zeros_like(best)
        found += [torch.stack([x for x, s in zip(scores, sets) if i in s]).mean() for i in range(t.n)]
    return torch.stack(found)


def entropy_masked(t: Table) -> Tensor:
    kept = t.h >= torch.quantile(t.h[t.m.bool()], 0.8)
    return mean(t, clip(ratio(t, t.old), t.adv) * kept.double())


def token_baseline(t: Table) -> Tensor:
    """Position by position over the responses of a group; a response that alone is as long has no baseline there."""
    gain = (t.rt * t.m).flip(-1).cumsum(-1).flip(-1)
    weight = ((1 - 2 * t.old.exp() + t.sq) * t.m).cumsum(-1)
    adv = torch.zeros_like(gain)
    for i in range(0, len(gain), t.n):
        rows = range(i, i + t.n)
        for at in range(gain.shape[1]):
            there = [j for j in rows if t.m[j, at]]
            base = sum(gain[j, at] * weight[j, at] for j in there) / (sum(weight[j, at] for j in there) + 1e-8)
            for j in there:
                adv[j, at] = gain[j, at] - (base if len(there) > 1 else 0)
    return adv


def vapo(t: Table) -> Tensor:
    right = (t.r > 0)[:, None].double() * t.m
    return mean(t, clip(ratio(t, t.old), t.adv, high=0.28)) - 0.1 * (right * t.x).sum() / right.sum()


def of_sequences(t: Table) -> Tensor:
    return clip(sums(t, t.x - t.old).exp(), t.r).mean()


MORE: dict[str, Callable[[Table], Tensor | tuple[Tensor, ...]]] = {
    "rloo_clip(old=old, adv=r)": of_sequences,
    "luspo(old=old, adv=r)": lambda t: luspo(t, 2e-3, 2.5e-3),
    "vespo(old=old, adv=r)": vespo,
    "opsm(old=old, adv=r, sampled=old, most_kl=0.05)": lambda t: opsm(t, 0.05),
    "dppo_tv(old=old, adv=adv)": lambda t: tv(t, 20),
    "dppo_tv(old=old, adv=adv, most=3)": lambda t: tv(t, 3),
    "dppo_kl(old=old, adv=adv)": lambda t: kl(t, 20),
    "dppo_kl(old=old, adv=adv, most=3)": lambda t: kl(t, 3),
    "dro(ref=ref, adv=r)": lambda t: (sums(t, t.x - t.ref) ** 2 / 2 - t.r * sums(t, t.x)).mean(),
    "dro_token(ref=old, adv=adv, beta=0.5)": lambda t: mean(t, 0.25 * (t.x - t.old) ** 2 - t.adv * t.x),
    "(r - mean(r by prompt)) / (std(r) + 1e-4)":
        lambda t: (t.r - t.r.view(-1, t.n).mean(1).repeat_interleave(t.n)) / (t.r.std() + 1e-4),
    "best_of_group(r)": lambda t: lead(t, True),
    "best_of_group(r, by_std=false)": lambda t: lead(t, False),
    "pass_at_k(r, 2)": lambda t: of_sets(t, 2),
    'grpo_free(old=old, adv=adv * high_entropy(h), agg="token-mean")': entropy_masked,
    "token_baseline(discount(rt, 1), old, sq)": token_baseline,
    "grpo_entropy(old=old, adv=adv)": entropy_masked,
    "vapo(old=old, adv=adv, good=of_right(r, old))": vapo,
    'grpo_free(old=lp, adv=adv * truncated(lp, old, most=3), agg="token-mean")':
        lambda t: corrected(t, mismatch(t).clamp(max=3)),
    'grpo_free(old=lp, adv=adv * banded(lp, old, low=0, high=3), agg="token-mean")':
        lambda t: corrected(t, banded(mismatch(t), 0, 3)),
    'grpo_free(old=lp, adv=adv * truncated_seq(lp, old, most=3), agg="token-mean")':
        lambda t: corrected(t, mismatch_seq(t).clamp(max=3)),
}
SYSTEMS = systems.SYSTEMS | MORE
