"""Log-probabilities of given tokens from hidden states, without ever holding the logits of a whole batch.

The vocabulary may be divided over tp. Statistics are float32, and chunks of tokens are recomputed in the backward pass.
One table of logits exists for a chunk, which becomes its probabilities and then its gradient in place (two tables if
the entropy is wanted).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.model.collectives import tree_all_reduce
from rldsl.backends.torch.model.tree_sums import block_sums
from rldsl.runtime.backend import Axis


def token_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, tp: Axis,
                   vocab_start: int, want_entropy: bool = False, chunk: int = 1024,
                   cuts: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log_softmax(hidden @ W.T / temperature) at `targets`, and the entropy of each distribution (nats).

    hidden: [N, H], equal on all tp ranks. weight: [V_local, H], rows vocab_start.. of the head. targets: [N] int64.
    chunk: tokens whose logits exist at the same time, equal on all tp ranks. cuts: of the rows of weight, for sums over
    the vocabulary in one order under every tp (`tree_sums.py`). Returns float32 [N], and float32 [N] or
    None. Differentiable in hidden (its gradient is summed over tp here) and in weight."""
    logprobs: torch.Tensor
    entropy: torch.Tensor
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperature, tp, vocab_start, want_entropy, chunk,
                                             cuts)
    return logprobs, entropy if want_entropy else None


class _TokenLogprobs(Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float,
                tp: Axis, vocab_start: int, want_entropy: bool, chunk: int, cuts: Sequence[int] | None
                ) -> tuple[torch.Tensor, torch.Tensor]:
        count = hidden.shape[0]
        normalizer = hidden.new_empty(count, dtype=_statistics(hidden))
        logprobs, entropy = torch.empty_like(normalizer), torch.zeros_like(normalizer)
        head = weight.to(hidden.dtype)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], head, temperature)
            peak, sums = _softmax_sums(logits, targets[part], tp, vocab_start, want_entropy, cuts)
            del logits  # before the next table is made
            normalizer[part] = peak + sums[0].log()
            logprobs[part] = sums[1] - normalizer[part]
            if want_entropy:
                entropy[part] = normalizer[part] - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.options = (temperature, tp, vocab_start, want_entropy, chunk)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors
        temperature, tp, vocab_start, want_entropy, chunk = ctx.options
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:  # a frozen head is as large as a trained one
            grad_weight = torch.zeros_like(weight)
        head = weight.to(hidden.dtype)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logprobs = _logits(hidden[part], head, temperature).sub_(normalizer[part, None])
            grad = _grad_logits(logprobs, targets[part], vocab_start, grad_logprobs[part],
                                (grad_entropy[part], entropy[part]) if want_entropy else None)
            del logprobs  # before the next table is made
            grad = grad.div_(temperature).to(hidden.dtype) if temperature != 1 else grad.to(hidden.dtype)
            grad_hidden[part] = grad @ head
            if grad_weight is None:
                continue
            if grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.T, hidden[part])
            else:
                grad_weight += grad.T @ hidden[part]
            del grad
        return _all_reduce(grad_hidden, dist.ReduceOp.SUM, tp), grad_weight, *[None] * 7


def _softmax_sums(logits: torch.Tensor, targets: torch.Tensor, tp: Axis, vocab_start: int, want_entropy: bool,
                  cuts: Sequence[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit [C], and sums over the vocabulary of all ranks [2 or 3, C]: of w = exp(logit - largest), of the
    target's logit (one term) and, if wanted, of w * logit. Overwrites the logits."""
    at, is_local = _local_columns(targets, vocab_start, logits.shape[1])
    peak = _all_reduce(logits.amax(-1), dist.ReduceOp.MAX, tp)
    chosen = torch.where(is_local, logits.gather(1, at[:, None])[:, 0], 0.0)
    if want_entropy:
        weights = (logits - peak[:, None]).exp_()
        sums = torch.stack((block_sums(weights, cuts), chosen, block_sums(logits.mul_(weights), cuts)))
    else:
        sums = torch.stack((block_sums(logits.sub_(peak[:, None]).exp_(), cuts), chosen))
    return peak, _all_reduce(sums, dist.ReduceOp.SUM, tp) if cuts is None else tree_all_reduce(sums, tp)


def _grad_logits(logprobs: torch.Tensor, targets: torch.Tensor, vocab_start: int, grad_logprobs: torch.Tensor,
                 entropy: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """The gradient of the logits [C, V], in place of their log-probs. grad_logprobs: [C]. entropy: the gradient of the
    entropy and the entropy itself, [C] each.

    d log p(t) / dl = 1[t] - p, and dH / dl = -p (log p + H)."""
    at, is_local = _local_columns(targets, vocab_start, logprobs.shape[1])
    if entropy is None:
        grad = logprobs.exp_().mul_(-grad_logprobs[:, None])
    else:
        grad = logprobs.exp()
        grad.mul_(logprobs.add_(entropy[1][:, None]).mul_(-entropy[0][:, None]).sub_(grad_logprobs[:, None]))
    return grad.scatter_add_(1, at[:, None], torch.where(is_local, grad_logprobs, 0.0)[:, None])


def _statistics(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _logits(hidden: torch.Tensor, head: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden @ head.T).to(_statistics(hidden))
    return logits if temperature == 1 else logits.div_(temperature)


def _local_columns(targets: torch.Tensor, vocab_start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets as columns of this rank's logits (clamped where another rank has them), and whether they are here."""
    at = targets - vocab_start
    return at.clamp(0, size - 1), (at >= 0) & (at < size)


def _all_reduce(x: torch.Tensor, op: dist.ReduceOp.RedOpType, tp: Axis) -> torch.Tensor:
    if tp.size > 1:
        x = x.contiguous()
        dist.all_reduce(x, op, group=tp.group)
    return x
