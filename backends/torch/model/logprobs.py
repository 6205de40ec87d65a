"""Log-probabilities of given tokens from hidden states, without the logits of a batch ever existing.

The vocabulary may be sharded over tp; statistics are float32; chunks of tokens are recomputed in backward. Of a chunk
one table of logits exists, which becomes its probabilities and then its gradient in place (two tables where the entropy
is wanted).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from rldsl.runtime.backend import Axis


def token_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, tp: Axis,
                   vocab_start: int, want_entropy: bool = False,
                   chunk: int = 1024) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log_softmax(hidden @ W.T / temperature) at `targets`, and the entropy of each distribution (nats).

    hidden: [N, H], equal on all tp ranks. weight: [V_local, H], rows vocab_start.. of the head. targets: [N] int64.
    chunk: tokens whose logits exist at once, equal on all tp ranks. Returns float32 [N] and float32 [N] or None.
    Differentiable in hidden (its gradient is summed over tp here) and weight."""
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperature, tp, vocab_start, want_entropy, chunk)
    return logprobs, entropy if want_entropy else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, tp, vocab_start, want_entropy, chunk):
        count = hidden.shape[0]
        normaliser = hidden.new_empty(count, dtype=_statistics(hidden))
        logprobs, entropy = torch.empty_like(normaliser), torch.zeros_like(normaliser)
        head = weight.to(hidden.dtype)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            peak, sums = _sums(_logits(hidden[part], head, temperature), targets[part], tp, vocab_start, want_entropy)
            normaliser[part] = peak + sums[0].log()
            logprobs[part] = sums[1] - normaliser[part]
            if want_entropy:
                entropy[part] = normaliser[part] - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.rest = (temperature, tp, vocab_start, want_entropy, chunk)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, from_logprobs, from_entropy):
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        temperature, tp, vocab_start, want_entropy, chunk = ctx.rest
        to_hidden, to_weight = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:  # a head that is not trained is as large as the others
            to_weight = torch.zeros_like(weight)
        head = weight.to(hidden.dtype)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logprobs = _logits(hidden[part], head, temperature).sub_(normaliser[part, None])
            slope = _slope(logprobs, targets[part], vocab_start, from_logprobs[part],
                           (from_entropy[part], entropy[part]) if want_entropy else None)
            del logprobs
            slope = slope.div_(temperature).to(hidden.dtype) if temperature != 1 else slope.to(hidden.dtype)
            to_hidden[part] = slope @ head
            if to_weight is None:
                continue
            if to_weight.dtype == slope.dtype:
                to_weight.addmm_(slope.T, hidden[part])
            else:
                to_weight += slope.T @ hidden[part]
            del slope
        return _reduce(to_hidden, dist.ReduceOp.SUM, tp), to_weight, *[None] * 6


def _sums(logits: torch.Tensor, targets: torch.Tensor, tp: Axis, vocab_start: int,
          want_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit [C], and over the vocabulary of all ranks: the sum of w = exp(logit - largest), the target's
    logit and, where wanted, the sum of w * logit; [2 or 3, C]. Overwrites the logits."""
    at, mine = _local(targets, vocab_start, logits.shape[1])
    peak = _reduce(logits.amax(-1), dist.ReduceOp.MAX, tp)
    chosen = torch.where(mine, logits.gather(1, at[:, None])[:, 0], 0.0)
    if not want_entropy:
        return peak, _reduce(torch.stack((logits.sub_(peak[:, None]).exp_().sum(-1), chosen)), dist.ReduceOp.SUM, tp)
    weights = (logits - peak[:, None]).exp_()
    sums = weights.sum(-1), chosen, logits.mul_(weights).sum(-1)
    return peak, _reduce(torch.stack(sums), dist.ReduceOp.SUM, tp)


def _slope(logprobs: torch.Tensor, targets: torch.Tensor, vocab_start: int, from_logprobs: torch.Tensor,
           from_entropy: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """The gradient of the logits, in place of their log-probs [C, V]. from_logprobs: [C]. from_entropy: the gradient of
    the entropy and the entropy itself, [C] each.

    d log p(t) / dl = 1[t] - p, and dH / dl = -p (log p + H)."""
    at, mine = _local(targets, vocab_start, logprobs.shape[1])
    if from_entropy is None:
        slope = logprobs.exp_().mul_(-from_logprobs[:, None])
    else:
        slope = logprobs.exp()
        slope.mul_(logprobs.add_(from_entropy[1][:, None]).mul_(-from_entropy[0][:, None]).sub_(from_logprobs[:, None]))
    return slope.scatter_add_(1, at[:, None], torch.where(mine, from_logprobs, 0.0)[:, None])


def _statistics(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _logits(hidden: torch.Tensor, head: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden @ head.T).to(_statistics(hidden))
    return logits if temperature == 1 else logits.div_(temperature)


def _local(targets: torch.Tensor, vocab_start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets as local columns (clamped where they are not ours), and whether they are ours."""
    at = targets - vocab_start
    return at.clamp(0, size - 1), (at >= 0) & (at < size)


def _reduce(x: torch.Tensor, op: dist.ReduceOp, tp: Axis) -> torch.Tensor:
    if tp.size > 1:
        x = x.contiguous()
        dist.all_reduce(x, op, group=tp.group)
    return x
