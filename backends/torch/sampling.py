"""Which token comes next. Randomness belongs to the sample: its numbers are those of `runtime/draws.py`, keyed by (seed,
step, row, position), so that dp, tp, pp, batch order and restarts do not change what is drawn."""

from __future__ import annotations

import torch

from rldsl.plan.events import Sampling


def choose(logits: torch.Tensor, sampling: Sampling, draws: torch.Tensor, forbidden: torch.Tensor | None,
           eos_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens [S] and their log-probs [S] float32, at the sampling temperature and before any filter.

    logits: [S, V] float32. draws: [S] in (0, 1). forbidden: [S] bool, rows that may not end yet. eos_ids: [E] int64."""
    temperature = 1.0 if sampling.greedy else sampling.temperature
    logprobs = (logits / temperature).log_softmax(-1)
    allowed = logprobs
    if forbidden is not None:
        ends = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device).index_fill_(0, eos_ids, True)
        allowed = logprobs.masked_fill(forbidden[:, None] & ends, -torch.inf)
    if sampling.greedy:
        tokens = allowed.argmax(-1)
    else:
        cdf = keep_likely(allowed, sampling.top_k, sampling.top_p).double().softmax(-1).cumsum(-1)
        target = draws[:, None] * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def keep_likely(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """scores [S, V] with all but the top_k largest at -inf, then all but the smallest set that holds top_p of what is
    left (Holtzman et al. 2020), in transformers' order."""
    if 0 < top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k, -1).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        ordered, order = scores.sort(-1, descending=True)
        mass = ordered.double().softmax(-1)
        beyond = mass.cumsum(-1) - mass >= top_p
        beyond[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    return scores
