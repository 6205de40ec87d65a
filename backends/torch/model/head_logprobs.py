"""Log-probabilities of one token of each distribution without a table of logits, on CPUs.

In: hidden states, rows of the head, which may be divided over tp, and tokens. Out: log-probs, with their gradients by
`kernels/head_logprobs.py`. The logits of a pass with few of them are kept for its backward pass (`memory/logits.py`
says how few), which makes them again otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.kernels.head_logprobs import head_gradients, head_statistics
from rldsl.backends.torch.kernels.held_gradients import held_gradient, parameter_of
from rldsl.runtime.backend import Axis
from rldsl.runtime.collectives import all_reduce


class HeadLogprobs(Function):
    """hidden [N, H], weight [V_local, H], targets [N] ids, temperature, tp, the id of the weight's first row, whether
    to keep the logits -> [N]."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float,
                tp: Axis, vocab_start: int, keep: bool) -> torch.Tensor:
        local = (targets - vocab_start).contiguous()
        ctx.kept = hidden.new_empty(len(hidden) * len(weight)) if keep else None
        peaks, sums, chosen = head_statistics(hidden, weight, local, temperature, ctx.kept)
        if tp.size > 1:
            common = peaks.clone()
            all_reduce(common, dist.ReduceOp.MAX, tp.group)
            both = torch.stack((sums * (peaks - common).exp(), chosen))
            all_reduce(both, dist.ReduceOp.SUM, tp.group)
            peaks, (sums, chosen) = common, both
        normalizers = peaks + sums.log()
        ctx.save_for_backward(hidden, weight, local, normalizers)
        ctx.parameter, ctx.temperature, ctx.tp = parameter_of(weight), temperature, tp
        return chosen - normalizers

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, local, normalizers = ctx.saved_tensors
        held = held_gradient(ctx.parameter)
        total = None if not ctx.needs_input_grad[1] else torch.zeros_like(weight) if held is None else held
        grad_hidden = head_gradients(hidden, weight, local, ctx.temperature, normalizers, grad, total,
                                     ctx.kept)
        if ctx.tp.size > 1:
            all_reduce(grad_hidden, dist.ReduceOp.SUM, ctx.tp.group)
        return grad_hidden, None if total is held else total, *[None] * 5
