"""Which token comes next. Randomness belongs to the sample: its numbers are those of `runtime/draws.py`, keyed by
(seed, step, row, position), so that dp, tp, pp, batch order and restarts do not change what is drawn.

In: logits, or the last stage's hidden states. Out: tokens and their log-probs. Every filter is a *threshold*: a token
is kept if its score reaches it, so that equal scores are kept or dropped together whatever order a kernel sorts them
in. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rldsl.plan.events import Sampling
from rldsl.runtime.draws import uniform

if TYPE_CHECKING:
    from rldsl.backends.torch.model.stage import Stage

BLOCK = 256  # tokens of the vocabulary whose probabilities are added up at once


def choose(logits: torch.Tensor, sampling: Sampling, draws: torch.Tensor | None, forbidden: torch.Tensor | None,
           eos_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens [S] and their log-probs [S] float32, at the sampling temperature and before any filter.

    logits: [S, V] float32, overwritten. draws: [S] float64 in (0, 1), None if greedy. forbidden: [S] bool, rows that
    may not end yet. eos_ids: [E] int64."""
    if not sampling.greedy and sampling.temperature != 1:
        logits.div_(sampling.temperature)
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).exp_()
    normaliser = peak[:, 0] + weights.sum(-1).log()
    if forbidden is not None and len(eos_ids):
        barred = forbidden[:, None].expand(-1, len(eos_ids))
        logits[:, eos_ids] = logits[:, eos_ids].masked_fill(barred, -torch.inf)
        weights[:, eos_ids] = weights[:, eos_ids].masked_fill(barred, 0.0)
    if sampling.greedy:
        tokens = logits.argmax(-1)
    else:
        least = threshold(logits, sampling)
        tokens = invert(weights if least is None else weights.masked_fill_(logits < least, 0.0), draws)
    return tokens, logits.gather(-1, tokens[:, None])[:, 0] - normaliser


def threshold(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
    """[S, 1]: the least score that all filters keep; None without filters. scores: [S, V], logarithms of probabilities
    up to a constant. The top_k largest; of these the smallest set that holds top_p of their mass (Holtzman et al. 2020,
    arXiv:1904.09751); no less than min_p times the likeliest (Nguyen et al. 2024, arXiv:2407.01082)."""
    found: list[torch.Tensor] = []
    ordered: torch.Tensor | None = None  # the largest scores, descending: of all only where top_k does not say how many
    if 0 < sampling.top_k < scores.shape[-1]:
        ordered = scores.topk(sampling.top_k, -1).values
        found.append(ordered[:, -1:])
    if sampling.top_p < 1:
        ordered = scores.sort(-1, descending=True).values if ordered is None else ordered
        mass = ordered.softmax(-1, dtype=torch.float64)
        before = mass.cumsum(-1) - mass
        last = (before < sampling.top_p).sum(-1, keepdim=True).clamp_(min=1) - 1
        found.append(ordered.gather(-1, last))
    if sampling.min_p > 0:
        top = scores.amax(-1, keepdim=True) if ordered is None else ordered[:, :1]
        found.append(top + log(sampling.min_p))
    return torch.stack(found).amax(0) if found else None


def invert(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """[S] the first token at which the running sum of `weights` [S, V] >= 0 exceeds draws [S] times all of it. Blocks
    of the vocabulary are added up first and only the block that decides is looked into; running sums are float64."""
    vocab = weights.shape[1]
    whole = vocab // BLOCK * BLOCK
    parts = [weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)] if whole else []
    parts += [weights[:, whole:].sum(-1, keepdim=True)] if whole < vocab else []
    reached = torch.cat(parts, 1).cumsum(-1, dtype=torch.float64)  # [S, blocks]
    target = draws[:, None] * reached[:, -1:]
    block = _first_above(reached, target)
    block = block.clamp_(max=reached.shape[1] - 1)
    before = torch.where(block > 0, reached.gather(1, (block - 1).clamp(min=0)), 0.0)
    at = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = torch.where(at < vocab, weights.gather(1, at.clamp(max=vocab - 1)), 0.0)
    found = block * BLOCK + _first_above(inside.cumsum(-1, dtype=torch.float64), target - before)
    return found[:, 0].clamp_(max=vocab - 1)  # where numbers are none, nothing is above


def _first_above(reached: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[S, 1] the first column of `reached` [S, N], which ascends, that is above `target` [S, 1]; where rounding lets
    none be, the one that reaches the most: it has some weight, and what stands behind it has none."""
    most = reached[:, -1:]
    return torch.searchsorted(reached, torch.minimum(target, most * (1 - 2.0**-52)), right=True)


@dataclass
class Sampler:
    """The next tokens of sequences, from the last stage's hidden states; equal on all ranks of tp."""

    stage: Stage
    sampling: Sampling
    seed: int
    step: int
    eos_ids: torch.Tensor
    widest: int = field(init=False)
    head: torch.Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        tp, vocab = self.stage.head_axis.size, self.stage.vocab
        self.widest = max((i + 1) * vocab // tp - i * vocab // tp for i in range(tp))
        self.head = None if self.stage.head is None else self.stage.head.to(self.stage.head_dtype)  # once for all

    def draws(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """[S, count] float64: the random numbers of rows [S] of the frame, for each token that they may have."""
        return uniform(self.seed, self.step, rows[:, None], torch.arange(count, device=rows.device))

    def next(self, hidden: torch.Tensor, made: torch.Tensor, draws: torch.Tensor | None
             ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [S, H]; made [S]: number of tokens sampled before; draws [S], None if greedy. Tokens [S], log-probs
        [S]."""
        forbidden = made < self.sampling.min_new_tokens if self.sampling.min_new_tokens else None
        return choose(self._logits(hidden), self.sampling, draws, forbidden, self.eos_ids)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, V] float32, gathered over the vocabulary's shards."""
        assert self.head is not None
        logits = (hidden @ self.head.T).float()
        tp, vocab = self.stage.head_axis, self.stage.vocab
        if tp.size == 1:
            return logits
        padded = logits.new_zeros(len(hidden), self.widest)
        padded[:, : logits.shape[1]] = logits
        parts = [torch.empty_like(padded) for _ in range(tp.size)]
        dist.all_gather(parts, padded, group=tp.group)
        sizes = [(i + 1) * vocab // tp.size - i * vocab // tp.size for i in range(tp.size)]
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes)], -1)
