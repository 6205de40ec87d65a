"""Sampling of the next token. Random numbers belong to the sample: they are those of `runtime/draws.py`, keyed by
(seed, step, row, position), so that dp, tp, pp, batch order and restarts do not change what is drawn.

In: logits, or the last stage's hidden states. Out: tokens and their log-probs.

Every filter (top-k, top-p, min-p) is a *threshold*: a token is kept if its score reaches it, so that equal scores are
kept or dropped together in whatever order a kernel sorts them. Nothing here makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING

import torch

from rldsl.backends.torch.kernels import cpu_kernels, cpu_sampling
from rldsl.backends.torch.kernels.nucleus_kernel import nucleus_kernel
from rldsl.backends.torch.kernels.products import product
from rldsl.backends.torch.model.logprobs import cap_logits
from rldsl.backends.torch.model.tree_sums import block_sums
from rldsl.memory.decode_shapes import SAMPLING_BLOCK
from rldsl.plan.events import Sampling
from rldsl.runtime.collectives import all_gather
from rldsl.runtime.draws import uniform
from rldsl.sharding.sum_blocks import local_cuts

if TYPE_CHECKING:
    from rldsl.backends.torch.model.stage import Stage


def choose(logits: torch.Tensor, sampling: Sampling, draws: torch.Tensor | None, must_continue: torch.Tensor | None,
           eos_ids: torch.Tensor, cuts: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens [S] int64 and their log-probs [S] float32, at the sampling temperature and before any filter.

    logits: [S, V] float32, overwritten. draws: [S] float64 in (0, 1), None if greedy. must_continue: [S] bool, rows
    that may not end yet. eos_ids: [E] int64. cuts: of the vocabulary, for the normalizer (`model/tree_sums.py`)."""
    if not sampling.greedy and sampling.temperature != 1:
        logits.div_(sampling.temperature)
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).exp_()
    normalizer = peak[:, 0] + block_sums(weights, cuts).log()
    if must_continue is not None and len(eos_ids):
        barred = must_continue[:, None].expand(-1, len(eos_ids))
        logits[:, eos_ids] = logits[:, eos_ids].masked_fill(barred, -torch.inf)
        weights[:, eos_ids] = weights[:, eos_ids].masked_fill(barred, 0.0)
    if sampling.greedy:
        tokens = logits.argmax(-1)
    else:
        if draws is None:
            raise ValueError("sampling needs random numbers; only greedy decoding does without")
        lowest = threshold(logits, sampling)
        tokens = inverse_cdf(weights if lowest is None else weights.masked_fill_(logits < lowest, 0.0), draws)
    return tokens, logits.gather(-1, tokens[:, None])[:, 0] - normalizer


def threshold(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
    """[S, 1]: the lowest score that all filters keep; None without filters. scores: [S, V], log-probabilities up to a
    constant.

    top_k: the k largest. top_p: of these, the smallest set that holds this part of their mass (nucleus sampling,
    Holtzman et al. 2020, arXiv:1904.09751). min_p: at least this part of the largest probability (Nguyen et al. 2024,
    arXiv:2407.01082)."""
    limits: list[torch.Tensor] = []
    ordered: torch.Tensor | None = None  # the largest scores, descending; all of them only if top_k sets no limit
    if 0 < sampling.top_k < scores.shape[-1]:
        ordered = scores.topk(sampling.top_k, -1).values
        limits.append(ordered[:, -1:])
    kernel = nucleus_kernel(scores.device, len(scores)) if sampling.top_p < 1 and ordered is None else None
    if kernel is not None:
        limits.append(kernel(scores, sampling.top_p))
    elif sampling.top_p < 1:
        ordered = scores.sort(-1, descending=True).values if ordered is None else ordered
        mass = ordered.softmax(-1, dtype=torch.float64)
        before = mass.cumsum(-1) - mass
        last = (before < sampling.top_p).sum(-1, keepdim=True).clamp_(min=1) - 1
        limits.append(ordered.gather(-1, last))
    if sampling.min_p > 0:
        top = scores.amax(-1, keepdim=True) if ordered is None else ordered[:, :1]
        limits.append(top + log(sampling.min_p))
    return torch.stack(limits).amax(0) if limits else None


def inverse_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """[S] int64: the first token at which the cumulative sum of `weights` [S, V] >= 0 exceeds draws [S] times the
    total. Blocks of the vocabulary are summed first, and only the deciding block is searched, since a float64
    cumulative sum over the whole vocabulary would be slow."""
    vocab = weights.shape[1]
    full = vocab // SAMPLING_BLOCK * SAMPLING_BLOCK
    parts = [weights[:, :full].unflatten(1, (-1, SAMPLING_BLOCK)).sum(-1)] if full else []
    parts += [weights[:, full:].sum(-1, keepdim=True)] if full < vocab else []
    cumulative = torch.cat(parts, 1).cumsum(-1, dtype=torch.float64)  # [S, blocks]
    target = draws[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    block = block.clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    at = block * SAMPLING_BLOCK + torch.arange(SAMPLING_BLOCK, device=weights.device)
    inside = torch.where(at < vocab, weights.gather(1, at.clamp(max=vocab - 1)), 0.0)
    token = block * SAMPLING_BLOCK + _first_above(inside.cumsum(-1, dtype=torch.float64), target - before)
    return token[:, 0].clamp_(max=vocab - 1)  # NaN weights have no column above the target


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[S, 1] the first column of `cumulative` [S, N], which ascends, that is above `target` [S, 1]. Rounding may leave
    none above; then the first that reaches the total, which has some weight, while those after it have none."""
    total = cumulative[:, -1:]
    return torch.searchsorted(cumulative, torch.minimum(target, total * (1 - 2.0**-52)), right=True)


def prepare_kernels(sampling: Sampling, device: torch.device) -> None:
    """Choose kernels before the first step, since trying one reads its result."""
    if sampling.top_p < 1 and not sampling.greedy:
        nucleus_kernel(device)


@dataclass
class Sampler:
    """Samples the next tokens of sequences from the last stage's hidden states; equal on all ranks of tp."""

    stage: Stage                                   # the last stage, with the head
    sampling: Sampling                             # temperature, top-k and the like
    seed: int                                      # of the call's random numbers
    step: int                                      # of the run, for its random numbers
    eos_ids: torch.Tensor                          # [E] int64, tokens that end a sequence
    max_local_vocab: int = field(init=False)       # the most vocabulary rows of a rank of tp
    vocab_cuts: tuple[int, ...] | None = field(init=False)  # of the whole vocabulary; None: sums of any order
    head: torch.Tensor | None = field(init=False)  # [V_local, H], in the dtype in which it is multiplied

    def __post_init__(self) -> None:
        tp, vocab = self.stage.head_axis.size, self.stage.vocab_size
        self.max_local_vocab = max((i + 1) * vocab // tp - i * vocab // tp for i in range(tp))
        self.vocab_cuts = local_cuts(vocab, 1, 1, 0) if self.stage.vocab_cuts is not None else None
        self.head = None if self.stage.head is None else self.stage.head.to(self.stage.matmul_dtype)  # cast once

    def draws(self, rows: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
        """[S, count] float64: the random numbers of rows [S] of the frame, one for each position of a response from
        first [S] on."""
        return uniform(self.seed, self.step, rows[:, None], first[:, None] + torch.arange(count, device=rows.device))

    def sample(self, hidden: torch.Tensor, num_generated: torch.Tensor, draws: torch.Tensor | None
               ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: [S, H]; num_generated: [S] tokens sampled before; draws: [S], None if greedy. Returns tokens [S] and
        log-probs [S]."""
        if draws is not None and self._compiled(hidden):
            if self.head is None:
                raise ValueError("only the last stage of a model with an output embedding samples")
            return cpu_sampling.sample(hidden, self.head, draws, self.sampling.temperature)
        must_continue = num_generated < self.sampling.min_new_tokens if self.sampling.min_new_tokens else None
        return choose(self._logits(hidden), self.sampling, draws, must_continue, self.eos_ids, self.vocab_cuts)

    def _compiled(self, hidden: torch.Tensor) -> bool:
        """Whether one kernel does all that is asked for."""
        s = self.sampling
        plain = not (s.greedy or s.top_k or s.top_p < 1 or s.min_p or s.min_new_tokens)
        return (plain and self.head is not None and self.vocab_cuts is None and not self.stage.logit_cap
                and self.stage.head_axis.size == 1 and cpu_kernels.takes(hidden, self.head))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, V] float32, gathered over the vocabulary's shards."""
        if self.head is None:
            raise ValueError("only the last stage of a model with an output embedding samples")
        logits = product(hidden, self.head) if self.vocab_cuts is None else hidden @ self.head.T
        logits = cap_logits(logits.float(), self.stage.logit_cap)
        tp, vocab = self.stage.head_axis, self.stage.vocab_size
        if tp.size == 1:
            return logits
        padded = logits.new_zeros(len(hidden), self.max_local_vocab)
        padded[:, : logits.shape[1]] = logits
        parts = all_gather(padded, tp.group)
        sizes = [(i + 1) * vocab // tp.size - i * vocab // tp.size for i in range(tp.size)]
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], -1)
