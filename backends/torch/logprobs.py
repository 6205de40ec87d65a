"""Log-probabilities of given tokens from hidden states, without the logits of a batch ever existing.

The vocabulary may be sharded over tp; statistics are float32; chunks of tokens are recomputed in backward.
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
    Returns float32 [N] and float32 [N] or None. Differentiable in hidden (its gradient is summed over tp here) and
    weight."""
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
            logits = _logits(hidden[part], head, temperature)
            at, mine = _local(targets[part], vocab_start, logits.shape[1])
            peak = _reduce(logits.amax(-1), dist.ReduceOp.MAX, tp)
            weights = (logits - peak[:, None]).exp_()
            sums = [weights.sum(-1), torch.where(mine, logits.gather(1, at[:, None])[:, 0], 0.0)]
            if want_entropy:
                sums.append((weights * logits).sum(-1))
            sums = _reduce(torch.stack(sums), dist.ReduceOp.SUM, tp)
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
            logits = _logits(hidden[part], head, temperature)
            at, mine = _local(targets[part], vocab_start, logits.shape[1])
            share = (logits - normaliser[part, None]).exp_()
            slope = -from_logprobs[part, None] * share
            slope.scatter_add_(1, at[:, None], torch.where(mine, from_logprobs[part], 0.0)[:, None])
            if want_entropy:  # dH/dl = -p (l - sum(p l)), and sum(p l) = normaliser - H
                slope -= from_entropy[part, None] * share * (logits - (normaliser - entropy)[part, None])
            slope = (slope / temperature).to(hidden.dtype)
            to_hidden[part] = slope @ head
            if to_weight is not None:
                to_weight += (slope.T @ hidden[part]).to(weight.dtype)
        return _reduce(to_hidden, dist.ReduceOp.SUM, tp), to_weight, *[None] * 6


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
