"""Log-probabilities of given tokens from hidden states, without ever holding the logits of a whole batch.

The vocabulary may be divided over tp. Statistics are float32, and chunks of tokens are recomputed in the backward pass.
One table of logits exists for a chunk, which becomes its probabilities and then its gradient in place (two tables if
the entropy, the sum of squares or a cap of logits is wanted). On a CPU in float32, log-probs alone of one token of
each distribution have no table where there is a C compiler (`model/head_logprobs.py`). Without one, or with several
tokens of each, the tables of a pass with few logits are kept for its backward pass (`memory/logits.py` says how few):
they hold exp(logit - largest), and of one token their gradient is made nowhere (`_factors_of_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from rldsl.backends.torch.kernels import cpu_kernels, head_logprobs
from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.kernels.held_gradients import add_gradient, held_gradient, parameter_of
from rldsl.backends.torch.kernels.products import add_product, product, wide_product
from rldsl.backends.torch.model.collectives import tree_all_reduce
from rldsl.backends.torch.model.head_logprobs import HeadLogprobs
from rldsl.backends.torch.model.invariant_products import multiply, weight_gradient
from rldsl.backends.torch.model.row_groups import RowGroups, sum_over_groups
from rldsl.backends.torch.model.tree_sums import block_sums, tree_sum
from rldsl.memory.logits import are_kept
from rldsl.runtime.backend import Axis
from rldsl.runtime.collectives import all_gather, all_reduce


class TokenStatistics(NamedTuple):
    """What the distributions of some tokens say, in float32 (float64 for hidden states in float64)."""

    logprobs: torch.Tensor                    # [N], or [N, K]: of the given tokens
    entropy: torch.Tensor | None = None       # [N], in nats
    sum_squares: torch.Tensor | None = None   # [N], the sum of the squared probabilities of all tokens


def token_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, tp: Axis,
                   vocab_start: int, want_entropy: bool = False, chunk: int = 1024,
                   cuts: Sequence[int] | None = None, want_squares: bool = False, cap: float = 0.0,
                   groups: RowGroups = ()) -> TokenStatistics:
    """log_softmax(hidden @ W.T / temperature) at `targets`, and statistics of each distribution.

    hidden: [N, H], equal on all tp ranks. weight: [V_local, H], rows vocab_start.. of the head. targets: [N] int64, or
    [N, K] for several tokens of each distribution, which may repeat. chunk: tokens whose logits exist at the same time,
    equal on all tp ranks. cuts: of the rows of weight, for sums over the vocabulary in one order under every tp
    (`tree_sums.py`). cap: c > 0 makes a logit z count as c * tanh(z / c), 0 leaves it. groups: with them sums of the
    backward pass have one order, too, if `chunk` is the same; they are those of the tokens, by which the gradient of
    the weight is summed (`row_groups.py`). Differentiable in hidden (its gradient is summed over tp here)
    and in weight."""
    logprobs: torch.Tensor
    entropy: torch.Tensor
    squares: torch.Tensor
    plain = cuts is None and not (want_entropy or want_squares or cap or groups)
    differentiated = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    keep = differentiated and plain and hidden.dtype == torch.float32 and \
        are_kept(len(weight), len(hidden), hidden.itemsize, hidden.device.type)
    if plain and targets.dim() == 1 and head_logprobs.takes(hidden, weight):
        return TokenStatistics(HeadLogprobs.apply(hidden, weight, targets, temperature, tp, vocab_start, keep))
    logprobs, entropy, squares = _TokenLogprobs.apply(
        hidden, weight, targets if targets.dim() == 2 else targets[:, None], temperature, tp, vocab_start, want_entropy,
        want_squares, chunk, cuts, cap, groups, keep)
    return TokenStatistics(logprobs.view(targets.shape), entropy if want_entropy else None,
                           squares if want_squares else None)


@torch.no_grad()
def top_logprobs(hidden: torch.Tensor, weight: torch.Tensor, k: int, temperature: float, tp: Axis, vocab_start: int,
                 chunk: int = 1024, cuts: Sequence[int] | None = None, words: int = 0, cap: float = 0.0
                 ) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely tokens of each distribution, the most likely first and of equal ones the smaller id, and their
    log-probabilities. Arguments as of `token_logprobs`; k is at most the size of the vocabulary. words: only tokens
    with smaller ids are looked at, at least k; 0: all. Returns [N, k] int64 and [N, k] float32. Between tp ranks k
    candidates of each travel, and never a row of logits."""
    count = hidden.shape[0]
    ids = torch.empty(count, k, dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty(count, k, dtype=_statistics(hidden), device=hidden.device)
    head = weight.to(hidden.dtype)
    none = ids.new_empty(0)
    own = head.shape[0] if not words else min(max(words - vocab_start, 0), head.shape[0])
    for start in range(0, count, chunk):
        part = slice(start, start + chunk)
        logits = capped_logits(hidden[part], head, temperature, cap, cuts is not None)
        values, at = logits[:, :own].topk(min(k, own), dim=-1)
        values, at = _candidates(values, at + vocab_start, k, tp)
        order = at.argsort(dim=-1)
        order = order.gather(1, values.gather(1, order).argsort(dim=-1, descending=True, stable=True)[:, :k])
        peak, sums, _ = _softmax_sums(logits, none.expand(len(logits), 0), tp, vocab_start, False, False, cuts)
        ids[part], logprobs[part] = at.gather(1, order), values.gather(1, order) - (peak + sums[0].log())[:, None]
    return ids, logprobs


def _candidates(values: torch.Tensor, ids: torch.Tensor, k: int, tp: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best logits of each tp rank and their tokens, [C, tp * k]; -inf where a rank has fewer rows of the head."""
    values = functional.pad(values, (0, k - values.shape[1]), value=-torch.inf)
    ids = functional.pad(ids, (0, k - ids.shape[1]), value=torch.iinfo(torch.int64).max)
    if tp.size == 1:
        return values, ids
    every_value, every_id = (all_gather(x, tp.group).unbind() for x in (values, ids))
    return torch.cat(every_value, 1), torch.cat(every_id, 1)


class _TokenLogprobs(Function):
    """As `token_logprobs`, whose arguments these are, with targets [N, K]: by tables, for all that `HeadLogprobs` does
    not take. That is GPUs, other dtypes than float32, invariant models, entropies, sums of squares, caps, several
    tokens of each distribution, and CPUs without a C compiler. keep: the tables stay for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float,
                tp: Axis, vocab_start: int, want_entropy: bool, want_squares: bool, chunk: int,
                cuts: Sequence[int] | None, cap: float, groups: RowGroups, keep: bool
                ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = hidden.shape[0]
        normalizer = hidden.new_empty(count, dtype=_statistics(hidden))
        logprobs = normalizer.new_empty(targets.shape)
        entropy, squares = torch.zeros_like(normalizer), torch.zeros_like(normalizer)
        head = weight.to(hidden.dtype)
        ctx.kept = {}  # by the first token of a chunk: its table, and the sum of each row over all tp ranks
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = capped_logits(hidden[part], head, temperature, cap, cuts is not None)
            peak, sums, chosen = _softmax_sums(logits, targets[part], tp, vocab_start, want_entropy, want_squares, cuts,
                                               keep)
            if keep:
                ctx.kept[start] = logits, sums[0]
            del logits  # before the next table is made
            normalizer[part] = peak + sums[0].log()
            logprobs[part] = chosen.T - normalizer[part, None]
            if want_entropy:
                entropy[part] = normalizer[part] - sums[1] / sums[0]
            if want_squares:
                squares[part] = sums[-1] / sums[0] ** 2
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy, squares)
        ctx.parameter = parameter_of(weight)
        ctx.options = (temperature, tp, vocab_start, want_entropy, want_squares, chunk, cap)
        ctx.cuts, ctx.groups, ctx.invariant = cuts if groups else None, groups or ((count,),), cuts is not None
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor,
                 grad_squares: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy, squares = ctx.saved_tensors
        temperature, tp, vocab_start, want_entropy, want_squares, chunk, cap = ctx.options
        cuts = ctx.cuts
        grad_hidden = torch.empty_like(hidden, dtype=hidden.dtype if cuts is None else _statistics(hidden))
        head = weight.to(hidden.dtype)
        of_targets: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows of the weight, and what is added to them

        def add_group(rows: slice) -> torch.Tensor:
            """Fill in the gradient of some hidden states. Returns that of the weight, if it is wanted."""
            # a frozen head is as large as a trained one
            grad_weight: torch.Tensor | None = None
            if ctx.needs_input_grad[1] and (ctx.invariant or weight.dtype != hidden.dtype or rows.start == rows.stop):
                grad_weight = torch.zeros_like(weight)
            for start in range(rows.start, rows.stop, chunk):
                part = slice(start, min(start + chunk, rows.stop))
                if start in ctx.kept:  # once: a second backward makes the table again
                    weights, sums = ctx.kept.pop(start)
                    if targets.shape[1] == 1:
                        scale, at, of_target = _factors_of_weights(weights, sums, targets[part, 0], vocab_start,
                                                                   grad_logprobs[part, 0] / temperature)
                        torch.addcmul(product(weights, head.T).mul_(scale), head.index_select(0, at), of_target,
                                      out=grad_hidden[part])
                        if ctx.needs_input_grad[1]:
                            grad_weight = add_product(grad_weight, weights.T, (hidden[part] * scale).T)
                            of_targets.append((at, hidden[part] * of_target))
                        continue
                    grad = _grad_of_weights(weights, sums, targets[part], vocab_start, grad_logprobs[part])
                    del weights, sums
                else:
                    logits = capped_logits(hidden[part], head, temperature, cap, ctx.invariant, cuts is not None)
                    derivative = cap_derivative(logits, temperature, cap) if cap else None
                    grad = _grad_logits(logits, normalizer[part], targets[part], vocab_start, grad_logprobs[part],
                                        (grad_entropy[part], entropy[part]) if want_entropy else None,
                                        (grad_squares[part], squares[part]) if want_squares else None,
                                        not ctx.invariant)
                    del logits  # before the next table is made
                    grad = grad if derivative is None else grad.mul_(derivative)
                    del derivative  # before the products are made
                grad = grad.div_(temperature).to(hidden.dtype) if temperature != 1 else grad.to(hidden.dtype)
                if cuts is not None:
                    grad_hidden[part] = _in_blocks(grad, head, cuts)
                else:
                    grad_hidden[part] = grad @ head if ctx.invariant else product(grad, head.T)
                if not ctx.needs_input_grad[1]:
                    continue
                if grad_weight is None or (grad_weight.dtype == grad.dtype and not ctx.invariant):
                    grad_weight = add_product(grad_weight, grad.T, hidden[part].T)
                elif cuts is not None:
                    grad_weight += weight_gradient(hidden[part], grad)
                elif grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.T, hidden[part])
                else:
                    grad_weight += grad.T @ hidden[part]
                del grad
            return weight.new_zeros(1) if grad_weight is None else grad_weight

        grad_weight = sum_over_groups(ctx.groups, add_group, weight.dtype)
        grad_hidden = _all_reduce(grad_hidden, dist.ReduceOp.SUM, tp) if cuts is None else \
            tree_all_reduce(grad_hidden, tp).to(hidden.dtype)
        if not ctx.needs_input_grad[1]:
            grad_weight = None
        elif grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        elif not ctx.invariant:
            grad_weight = _add_to_held(held_gradient(ctx.parameter), grad_weight, of_targets)
        return grad_hidden, grad_weight, *[None] * 11


def _in_blocks(grad: torch.Tensor, head: torch.Tensor, cuts: Sequence[int]) -> torch.Tensor:
    """grad [C, V_local] @ head [V_local, H] -> [C, H], block by block of the vocabulary."""
    return tree_sum(len(cuts) - 1, lambda i: multiply(grad[:, cuts[i] : cuts[i + 1]], head[cuts[i] : cuts[i + 1]]))


def _softmax_sums(logits: torch.Tensor, targets: torch.Tensor, tp: Axis, vocab_start: int, want_entropy: bool,
                  want_squares: bool, cuts: Sequence[int] | None, keep: bool = False
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest logit [C], sums over the vocabulary of all ranks [1 to 3, C], and the logits of the targets [K, C].
    Summed are w = exp(logit - largest) and, if wanted, w * logit and w * w. Overwrites the logits. keep: by w, where
    nothing but w is summed."""
    at, is_local = _local_columns(targets, vocab_start, logits.shape[1])
    chosen = torch.where(is_local, logits.gather(1, at), 0.0)
    if tp.size == 1 and cuts is None and not (want_entropy or want_squares) and cpu_kernels.takes(logits):
        peak, row_sums = cpu_kernels.softmax_sums(logits, keep)
        return peak, row_sums[None], chosen.T
    peak = _all_reduce(logits.amax(-1), dist.ReduceOp.MAX, tp)
    if want_entropy:
        weights = (logits - peak[:, None]).exp_()
        rows = [block_sums(weights, cuts), block_sums(logits.mul_(weights), cuts)]
    elif cuts is None and not want_squares and cpu_kernels.takes(logits, peak):
        rows = [cpu_kernels.scaled_probabilities(logits, peak, torch.ones_like(peak)).sum(-1) if keep else
                cpu_kernels.exp_sums(logits, peak)]
    else:
        weights = logits.sub_(peak[:, None]).exp_()
        rows = [block_sums(weights, cuts)]
    if want_squares:
        rows.append(block_sums(weights.mul_(weights), cuts))
    sums = torch.cat((torch.stack(rows), chosen.T))
    sums = _all_reduce(sums, dist.ReduceOp.SUM, tp) if cuts is None else tree_all_reduce(sums, tp)
    return peak, sums[: len(rows)], sums[len(rows) :]


def _grad_logits(logits: torch.Tensor, normalizer: torch.Tensor, targets: torch.Tensor, vocab_start: int,
                 grad_logprobs: torch.Tensor, entropy: tuple[torch.Tensor, torch.Tensor] | None,
                 squares: tuple[torch.Tensor, torch.Tensor] | None, compiled: bool) -> torch.Tensor:
    """The gradient of the logits [C, V], in their place. normalizer: [C], the logarithm of the sum of their
    exponentials. grad_logprobs: [C, K]. entropy, squares: the gradient of the statistic and the statistic itself, [C]
    each. compiled: `cpu_kernels` may compute it.

    d log p(t) / dl = 1[t] - p, dH / dl = -p (log p + H), and for q = sum p ** 2, dq / dl = 2 p (p - q)."""
    at, is_local = _local_columns(targets, vocab_start, logits.shape[1])
    total = grad_logprobs.sum(-1, keepdim=True)
    if entropy is None and squares is None and compiled and cpu_kernels.takes(logits, normalizer, total):
        grad = cpu_kernels.scaled_probabilities(logits, normalizer, -total)
    elif entropy is None and squares is None:
        grad = logits.sub_(normalizer[:, None]).exp_().mul_(-total)
    else:
        logprobs = logits.sub_(normalizer[:, None])
        grad = logprobs.exp()
        factor = logprobs.zero_() if entropy is None else \
            logprobs.add_(entropy[1][:, None]).mul_(-entropy[0][:, None])
        factor.sub_(total)
        if squares is not None:
            twice = 2 * squares[0][:, None]
            factor.addcmul_(grad, twice.expand_as(grad)).sub_(twice * squares[1][:, None])
        grad.mul_(factor)
    return grad.scatter_add_(1, at, torch.where(is_local, grad_logprobs, 0.0))


def _grad_of_weights(weights: torch.Tensor, sums: torch.Tensor, targets: torch.Tensor, vocab_start: int,
                     grad_logprobs: torch.Tensor) -> torch.Tensor:
    """As `_grad_logits`, from what `_softmax_sums` keeps: exp(logit - largest) [C, V], in whose place the gradient is,
    and its sums [C]."""
    at, is_local = _local_columns(targets, vocab_start, weights.shape[1])
    grad = weights.mul_((-grad_logprobs.sum(-1) / sums)[:, None])
    return grad.scatter_add_(1, at, torch.where(is_local, grad_logprobs, 0.0))


def _factors_of_weights(weights: torch.Tensor, sums: torch.Tensor, targets: torch.Tensor, vocab_start: int,
                        grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of logits, grad * (1[t] - w / sum), without a table of it: factors [C, 1] of the rows of `weights`,
    the column [C] of each target, and what is added there [C, 1]. So the factors scale what `weights` is multiplied
    with, or the product, and the targets add a row of the head to each hidden state's gradient and the hidden state to
    a row of the head's.

    weights: w = exp(logit - largest) [C, V]; sums: [C], of all ranks. grad: [C] of log-probs, divided by the
    temperature. targets: [C] ids, of which a rank of tp counts those of its own columns, from `vocab_start` on."""
    at, is_local = _local_columns(targets, vocab_start, weights.shape[1])
    return (-grad / sums)[:, None], at, torch.where(is_local, grad, 0.0)[:, None]


def _add_to_held(total: torch.Tensor | None, grad: torch.Tensor, of_targets: Sequence[tuple[torch.Tensor, torch.Tensor]]
                 ) -> torch.Tensor | None:
    """Add a gradient [V, H], and rows of `of_targets` to some of its rows, to the one that the parameter holds; without
    one, return the sum. Rows are added where they are contiguous: `grad` may have the order of columns, in which each
    number of a row is elsewhere in memory."""
    if total is None and not of_targets:
        return grad
    held = total is not None
    if total is None:
        total = grad if grad.is_contiguous() else torch.zeros_like(grad, memory_format=torch.contiguous_format)
    if total is not grad:
        add_gradient(total, grad)
    for at, rows in of_targets:
        total.index_add_(0, at, rows)
    return None if held else total


def _statistics(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def capped_logits(hidden: torch.Tensor, head: torch.Tensor, temperature: float, cap: float, invariant: bool = False,
                  again: bool = False) -> torch.Tensor:
    """[N, V_local] of hidden states [N, H] in the dtype of statistics. cap: as of `token_logprobs`. invariant: of an
    invariant model. again: in its backward pass, where its mode is off."""
    products = multiply(hidden, head.T) if again else hidden @ head.T if invariant else wide_product(hidden, head)
    capped = cap_logits(products.to(_statistics(hidden)), cap)
    return capped if temperature == 1 else capped.div_(temperature)


def cap_logits(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """c * tanh(z / c) of each logit, in place; without a cap, 0, as they are."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def cap_derivative(logits: torch.Tensor, temperature: float, cap: float) -> torch.Tensor:
    """The derivative of `cap_logits` at its results: 1 - (z / c) ** 2. logits: of `capped_logits`."""
    return logits.mul(temperature / cap).square_().neg_().add_(1)


def _local_columns(targets: torch.Tensor, vocab_start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets as columns of this rank's logits (clamped where another rank has them), and whether they are here."""
    at = targets - vocab_start
    return at.clamp(0, size - 1), (at >= 0) & (at < size)


def _all_reduce(x: torch.Tensor, op: dist.ReduceOp.RedOpType, tp: Axis) -> torch.Tensor:
    if tp.size > 1:
        x = x.contiguous()
        all_reduce(x, op, tp.group)
    return x
