"""Arithmetic over the whole vocabulary at each token: what a loss computes of the log-probabilities of a student and of
teachers, reduced to one number per token, without ever holding a table of all tokens.

In: last hidden states and output embeddings of the models, and the arithmetic as a function of log-probabilities. Out:
its results, differentiable in the student and in what else the arithmetic reads. Tokens are processed in chunks, which
are computed again in the backward pass, and the vocabulary may be divided over tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.model.collectives import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from rldsl.backends.torch.model.logprobs import cap_derivative, capped_logits
from rldsl.runtime.backend import Axis, VocabularyReduction, VocabularyTerms
from rldsl.runtime.collectives import all_reduce


class Readout(NamedTuple):
    """From where the distributions of some tokens come, with the words of a head that this rank has."""

    hidden: torch.Tensor  # [N, H], equal on all tp ranks
    weight: torch.Tensor  # [V_local, H]
    cap: float = 0.0      # as of `token_logprobs`


def over_vocabulary(student: Readout, teachers: Sequence[Readout], terms: VocabularyTerms,
                    given: Sequence[torch.Tensor], temperature: float, tp: Axis, chunk: int
                    ) -> tuple[torch.Tensor, ...]:
    """terms(log-probs of the student, of each teacher, given, reduce) for all tokens, [N] each.

    All models have the same words on this rank. given: [N] each, equal on all tp ranks; or a number, of no dimension.
    chunk: tokens whose tables exist at the same time, equal on all tp ranks. Differentiable in the student's hidden
    states (their gradient is summed over tp here) and weight, and in `given`."""
    results: tuple[torch.Tensor, ...] = _OverVocabulary.apply(
        student.hidden, student.weight, tuple(teachers), terms, temperature, tp, chunk, student.cap, *given)
    return results


def reduction(tp: Axis) -> VocabularyReduction:
    """Reductions of [C, V_local] over the vocabulary of all tp ranks, and the way back: [C] -> [C, 1]."""
    return _Reduction(tp)


class _Reduction:
    def __init__(self, tp: Axis):
        self.tp = tp

    def __call__(self, op: str, x: torch.Tensor) -> torch.Tensor:
        match op:
            case "sum":
                return self._sum(x.sum(-1))
            case "mean":
                return self._sum(x.sum(-1)) / self._words(x)
            case "count":
                return self._words(x).to(x.dtype).expand(x.shape[0])
            case "amax" | "amin":
                return self._extreme(x, op)
        raise ValueError(f"no reduction {op} over the vocabulary")

    def entries(self, x: torch.Tensor) -> torch.Tensor:
        """[C] -> [C, 1], for arithmetic with [C, V_local]; its gradient is that of all tp ranks."""
        return (copy_to_tensor_parallel_region(x, self.tp) if self.tp.size > 1 else x)[:, None]

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return reduce_from_tensor_parallel_region(x.contiguous(), self.tp) if self.tp.size > 1 else x

    def _words(self, x: torch.Tensor) -> torch.Tensor:
        """[]: as a tensor, so that the host does not wait for the other ranks."""
        return _all_reduce(torch.full((), float(x.shape[1]), device=x.device), dist.ReduceOp.SUM, self.tp)

    def _extreme(self, x: torch.Tensor, op: str) -> torch.Tensor:
        """The gradient is divided among equals, as in torch."""
        sign = 1 if op == "amax" else -1
        best = _all_reduce((sign * x.detach()).amax(-1), dist.ReduceOp.MAX, self.tp)
        at = sign * x.detach() == best[:, None]
        shares = at / _all_reduce(at.sum(-1), dist.ReduceOp.SUM, self.tp)[:, None]
        return self._sum(torch.where(at, x * shares, 0.0).sum(-1))


class _OverVocabulary(Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, teachers: tuple[Readout, ...],
                terms: VocabularyTerms, temperature: float, tp: Axis, chunk: int, cap: float,
                *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.options = (teachers, terms, temperature, tp, chunk, cap)
        ctx.save_for_backward(hidden, weight, *given)
        reduce, parts = reduction(tp), []
        head, heads = _cast(hidden, weight), [_cast(t.hidden, t.weight) for t in teachers]
        for start in range(0, max(len(hidden), 1), chunk):
            part = slice(start, start + chunk)
            tables = [_log_softmax(h[part], w, temperature, tp, c) for h, w, c in
                      ((hidden, head, cap), *((t.hidden, w, t.cap) for t, w in zip(teachers, heads, strict=True)))]
            parts.append(terms(tables[0], tables[1:], [_part(x, part) for x in given], reduce))
            del tables
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        teachers, terms, temperature, tp, chunk, cap = ctx.options
        hidden, weight, *given = ctx.saved_tensors
        reduce = reduction(tp)
        head, heads = _cast(hidden, weight), [_cast(t.hidden, t.weight) for t in teachers]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        wanted = [i for i in range(len(given)) if ctx.needs_input_grad[8 + i]]
        grad_given = {i: torch.zeros_like(given[i]) for i in wanted}
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logprobs = _log_softmax(hidden[part], head, temperature, tp, cap).requires_grad_()
            others = [_log_softmax(t.hidden[part], w, temperature, tp, t.cap)
                      for t, w in zip(teachers, heads, strict=True)]
            mine = [_part(x, part).detach().requires_grad_(i in grad_given) for i, x in enumerate(given)]
            with torch.enable_grad():
                results = terms(logprobs, others, mine, reduce)
            pairs = [(r, g[part]) for r, g in zip(results, grads, strict=True) if r.requires_grad]
            found = torch.autograd.grad([r for r, _ in pairs], [logprobs, *(mine[i] for i in wanted)],
                                        [g for _, g in pairs], allow_unused=True) if pairs else [None] * (
                                            1 + len(wanted))
            for i, grad in zip(wanted, found[1:], strict=True):
                if grad is not None and grad_given[i].dim():
                    grad_given[i][part] = grad
                elif grad is not None:
                    grad_given[i] += grad
            del others, results, pairs, mine
            _add_head_gradients(part, found[0], logprobs.detach(), hidden, head, temperature, tp, grad_hidden,
                                grad_weight, cap)
        return (_all_reduce(grad_hidden, dist.ReduceOp.SUM, tp), grad_weight, *[None] * 6,
                *(grad_given.get(i) for i in range(len(given))))


def _add_head_gradients(part: slice, grad_logprobs: torch.Tensor | None, logprobs: torch.Tensor, hidden: torch.Tensor,
                        head: torch.Tensor, temperature: float, tp: Axis, grad_hidden: torch.Tensor,
                        grad_weight: torch.Tensor | None, cap: float) -> None:
    """Those of a chunk. grad_logprobs: of its log-probs [C, V_local]; log_softmax has the gradient g - p * sum(g).
    Overwrites both tables."""
    if grad_logprobs is None:
        grad_hidden[part] = 0
        return
    total = _all_reduce(grad_logprobs.sum(-1), dist.ReduceOp.SUM, tp)
    grad = grad_logprobs.sub_(logprobs.exp_().mul_(total[:, None]))
    if cap:
        grad.mul_(cap_derivative(capped_logits(hidden[part], head, temperature, cap, True), temperature, cap))
    grad = (grad.div_(temperature) if temperature != 1 else grad).to(hidden.dtype)
    grad_hidden[part] = grad @ head
    if grad_weight is not None:
        grad_weight += grad.T @ hidden[part]


def _log_softmax(hidden: torch.Tensor, head: torch.Tensor, temperature: float, tp: Axis, cap: float) -> torch.Tensor:
    """[C, V_local] of this rank's words, normalized over those of all tp ranks; without gradient."""
    with torch.no_grad():
        logits = capped_logits(hidden, head, temperature, cap, True)  # also of invariant models
        peak = _all_reduce(logits.amax(-1), dist.ReduceOp.MAX, tp)
        total = _all_reduce((logits - peak[:, None]).exp_().sum(-1), dist.ReduceOp.SUM, tp)
        return logits.sub_((peak + total.log())[:, None])


def _cast(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().to(hidden.dtype)


def _part(x: torch.Tensor, part: slice) -> torch.Tensor:
    return x[part] if x.dim() else x


def _all_reduce(x: torch.Tensor, op: Any, tp: Axis) -> torch.Tensor:
    if tp.size > 1:
        x = x.contiguous()
        all_reduce(x, op, tp.group)
    return x
