"""Sums of a backward pass that tensor parallelism divides, in one order whatever its degree (`invariant=training`).

In: column-parallel products, heads and norms of a layer, with the blocks of `sharding/sum_blocks.py`. Out: the same
results, with gradients that have the same bits under every tp and are complete on every rank.

Three kinds of sums are divided. The gradient of the input of column-parallel weights is a sum over their outputs: the
weights that read one input (q, k and v; gate and up) leave their gradients to a `_Reader`, which multiplies block by
block and adds the blocks in a tree, those of all ranks last, so that there is one message. The gradient of keys and
values is a sum over query heads, which several ranks have where there are fewer KV heads than ranks. That of a norm of
heads is a sum over all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

from rldsl.backends.torch.kernels.autograd import Function, outside_modes
from rldsl.backends.torch.kernels.fixed_order import row_sum
from rldsl.backends.torch.kernels.rms_norms import PlainNorm, normalize
from rldsl.backends.torch.model.collectives import tree_all_reduce
from rldsl.backends.torch.model.invariant_products import (
    multiply,
    product_dtype,
    sum_of_rows,
    sums_of_groups,
    weight_gradient,
)
from rldsl.backends.torch.model.row_groups import RowGroups, sparse_tree_sum, sum_over_groups
from rldsl.backends.torch.model.weight_copies import NO_COPIES, WeightCopies
from rldsl.runtime.backend import Axis
from rldsl.sharding.sum_blocks import BLOCKS, head_blocks

Leaves = Mapping[int, Sequence[tuple[int, int]]]  # as of `sum_blocks.column_leaves`
HeadKind = Literal["query", "kv"]


def with_gradient_apart(parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The parameter; its gradient is added to a tensor, and not to that of the parameter."""
    out: torch.Tensor = _WithGradientApart.apply(parameter, total)
    return out


class _WithGradientApart(Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.total = total
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        ctx.total.add_(grad)
        return None, None


@dataclass(frozen=True, slots=True)
class _Part:
    """What a product leaves to the gradient of its input."""

    grad: torch.Tensor    # [T, m] of its output
    weight: torch.Tensor  # [m, k], in the dtype in which it multiplies
    leaves: Leaves        # runs of its m outputs


@dataclass(slots=True)
class _Reader:
    """The products that read one tensor."""

    count: int = 0  # of them so far
    parts: dict[int, _Part] = field(default_factory=dict)  # by the place of a product among them, in a backward pass


def column_parallel_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, leaves: Leaves, tp: Axis,
                            groups: RowGroups = (), copies: WeightCopies = NO_COPIES) -> torch.Tensor:
    """x [..., k] @ weight [m, k].T + bias [m] -> [..., m]. leaves: of the m outputs of this rank. groups: of the rows,
    by which the gradients of weight and bias are summed. copies: of weights."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight, bias)  # in the model's mode, which knows the copies
    token, reader = _reader_of(x, tp)
    place, reader.count = reader.count, reader.count + 1
    rows = x.detach().reshape(-1, x.shape[-1]).to(product_dtype(x))
    read = copies.cast(weight, rows.dtype)
    out: torch.Tensor = _ColumnProduct.apply(rows, token, weight, read, bias, reader, place, leaves, groups)
    return out.view(*x.shape[:-1], len(weight))


def _reader_of(x: torch.Tensor, tp: Axis) -> tuple[torch.Tensor, _Reader]:
    """One for all products that read x, kept next to it and as long as it: a token of which they are functions."""
    found: tuple[torch.Tensor, _Reader] | None = getattr(x, "_reader", None)
    if found is None:
        reader = _Reader()
        found = _Enter.apply(x, tp, reader), reader
        x._reader = found  # type: ignore[attr-defined]
    return found


class _Enter(Function):
    """x -> the token. Its gradient is computed after those of all products that read x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Axis, reader: _Reader) -> torch.Tensor:
        ctx.tp, ctx.reader, ctx.shape, ctx.dtype = tp, reader, x.shape, x.dtype
        return torch.zeros((), device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        parts = [ctx.reader.parts[i] for i in sorted(ctx.reader.parts)]
        ctx.reader.parts.clear()
        total = tree_all_reduce(input_gradient(parts, ctx.tp), ctx.tp)
        return total.view(ctx.shape).to(ctx.dtype), None, None


def input_gradient(parts: Sequence[_Part], tp: Axis) -> torch.Tensor:
    """[T, k] float32: this rank's node of the tree. In a leaf all products are one, of their runs next to each
    other."""
    def leaf(i: int) -> torch.Tensor | None:
        runs = [(p, a, b) for p in parts for a, b in p.leaves.get(i, ())]
        if not runs:
            return None
        if len(runs) == 1:
            ((part, a, b),) = runs
            return multiply(part.grad[:, a:b], part.weight[a:b]).float()
        weights = torch.cat([p.weight[a:b] for p, a, b in runs])
        return multiply(torch.cat([p.grad[:, a:b] for p, a, b in runs], 1), weights).float()

    total = sparse_tree_sum(tp.index * BLOCKS // tp.size, BLOCKS // tp.size, leaf)
    if total is None:
        return torch.zeros(len(parts[0].grad), parts[0].weight.shape[1], device=parts[0].grad.device)
    return total


class _ColumnProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor, weight: torch.Tensor, read: torch.Tensor,
                bias: torch.Tensor | None, reader: _Reader, place: int, leaves: Leaves, groups: RowGroups
                ) -> torch.Tensor:
        """read: the weight, as it multiplies."""
        ctx.save_for_backward(x, read)
        ctx.reader, ctx.place, ctx.leaves, ctx.groups = reader, place, leaves, groups
        with outside_modes():
            out = multiply(x, read.T)
            return out if bias is None else out + bias.to(out.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, read = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.reader.parts[ctx.place] = _Part(grad, read, ctx.leaves)
        grad_weight = weight_gradient(x, grad, ctx.groups) if ctx.needs_input_grad[2] else None
        grad_bias = sum_of_rows(grad.float(), ctx.groups) if ctx.needs_input_grad[4] else None
        return None, grad.new_zeros((), dtype=torch.float32), grad_weight, None, grad_bias, None, None, None, None


def expert_products(rows: torch.Tensor, weights: torch.Tensor, read: torch.Tensor, groups: Sequence[RowGroups],
                    leaves: Leaves, tp: Axis) -> torch.Tensor:
    """rows [N, k], sorted by expert, with the weights [experts, m, k] of their experts -> [N, m]. read: the weights, as
    they multiply. groups: of the rows of each expert. The gradient of the rows is summed over tp."""
    out: torch.Tensor = _ExpertProducts.apply(rows, weights, read, groups, leaves, tp)
    return out


class _ExpertProducts(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, read: torch.Tensor, groups: Sequence[RowGroups],
                leaves: Leaves, tp: Axis) -> torch.Tensor:
        ctx.save_for_backward(rows, read)
        ctx.groups, ctx.leaves, ctx.tp, ctx.dtype = groups, leaves, tp, weights.dtype
        ctx.counts = [sum(map(sum, sizes)) for sizes in groups]
        with outside_modes():
            parts = rows.split(ctx.counts)
            return torch.cat([multiply(x, w.T) for x, w in zip(parts, read, strict=True) if len(x)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        grad_weights = torch.zeros_like(weights, dtype=ctx.dtype) if ctx.needs_input_grad[1] else None
        inputs = []
        for i, (x, g) in enumerate(zip(rows.split(ctx.counts), grad.split(ctx.counts), strict=True)):
            if not len(x):
                continue
            inputs.append(input_gradient([_Part(g, weights[i], ctx.leaves)], ctx.tp))
            if grad_weights is not None:
                grad_weights[i] = weight_gradient(x, g, ctx.groups[i])
        total = tree_all_reduce(torch.cat(inputs), ctx.tp).to(rows.dtype)
        return total, grad_weights, None, None, None, None


# ------------------------------------------------------------------------------------------------ heads and norms


class HeadSums:
    """Sums over the heads of an attention layer, which tp divides, or of one that every rank has as a whole."""

    def __init__(self, heads: int, kv_heads: int, tp: Axis):
        """heads: query heads of the model. kv_heads: its key and value heads."""
        self.count = {"query": heads, "kv": kv_heads}
        self.each, self.tp = heads // kv_heads, tp  # query heads of a KV head
        self.blocks = head_blocks(heads, tp.size, tp.index)
        self.first = {"query": self.blocks[0][0], "kv": tp.index * kv_heads // tp.size}
        self.last_kv = max((tp.index + 1) * kv_heads // tp.size, self.first["kv"] + 1)
        self.holders = max(1, tp.size // kv_heads)  # ranks that have the same KV head
        kv = range(self.first["kv"], self.last_kv)
        self.trees = [self._tree(range(i * self.each, (i + 1) * self.each)) for i in kv]
        # whether all of them are one tree, of as many heads next to each other
        self.alike = self.trees == [_moved(self.trees[0], i * self.each) for i in range(len(kv))]
        # of layers that tp does not divide: every rank has all heads
        self.undivided = self if tp.size == 1 else HeadSums(heads, kv_heads, Axis((tp.ranks[tp.index],), 0, None))

    def _tree(self, heads: range) -> HeadTree:
        """The sum over those of some query heads that are on this rank."""
        first = self.first["query"]

        def block(i: int) -> HeadTree:
            start, stop = (min(max(h, heads.start), heads.stop) - first for h in self.blocks[i])
            return reduce(_sum_of_trees, range(start, stop), None)

        def node(at: int, count: int) -> HeadTree:
            return block(at) if count == 1 else _sum_of_trees(*(node(i, count // 2) for i in (at, at + count // 2)))

        return node(0, len(self.blocks))

    def over_query_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[S, query heads of this rank, ...] -> [S, KV heads of this rank, ...]: the sum over the query heads of a KV
        head, on whatever ranks they are."""
        if self.tp.size > 1 and x.shape[1] == self.count["query"]:
            return self.undivided.over_query_heads(x)
        if self.alike and x.shape[1] == len(self.trees) * self.each:
            own = _add_heads(x.unflatten(1, (len(self.trees), self.each)), self.trees[0], 2)
        else:
            own = torch.stack([_add_heads(x, tree, 1) for tree in self.trees], 1)
        if self.holders == 1:
            return own
        complete = own.new_zeros(self.count["kv"], *own[:, 0].shape)
        complete[self.first["kv"]] = own[:, 0]
        return tree_all_reduce(complete, self.tp)[self.first["kv"]][:, None]

    def over_heads(self, x: torch.Tensor, kind: HeadKind) -> torch.Tensor:
        """[heads of this rank, D] -> [D], the sum over all heads, one after the other."""
        if self.tp.size == 1:
            return _in_order(x)
        complete = x.new_zeros(self.count[kind], x.shape[1])
        if kind == "query" or self.tp.index % self.holders == 0:  # the first of those that have the same
            complete[self.first[kind] : self.first[kind] + len(x)] = x
        dist.all_reduce(complete, group=self.tp.group)  # exact: all terms of an element but one are 0
        return _in_order(complete)


HeadTree = int | tuple[Any, Any] | None  # a head of this rank, the sum of two trees, or 0


def _sum_of_trees(left: HeadTree, right: HeadTree) -> HeadTree:
    return right if left is None else left if right is None else (left, right)


def _moved(tree: HeadTree, by: int) -> HeadTree:
    """The same of other heads."""
    if isinstance(tree, tuple):
        return _moved(tree[0], by), _moved(tree[1], by)
    return None if tree is None else tree + by


def _add_heads(x: torch.Tensor, tree: HeadTree, dim: int) -> torch.Tensor:
    """x without dimension `dim`, whose elements are heads."""
    if isinstance(tree, tuple):
        return _add_heads(x, tree[0], dim) + _add_heads(x, tree[1], dim)
    return torch.zeros_like(x.select(dim, 0)) if tree is None else x.select(dim, tree)


def _in_order(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.add, terms)


class Norms:
    """Root-mean-square norms, for `fuse_norms`."""

    def __init__(self, heads: HeadSums, kind: HeadKind | None, row_groups: Callable[[], RowGroups]):
        """kind: of the heads whose norm it is, if tp divides them; None for one of other heads or of hidden states.
        row_groups: those of the pass under way, by which gradients are summed."""
        self.heads, self.kind, self.row_groups = heads, kind, row_groups

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor, plain: PlainNorm) -> torch.Tensor:
        """x: [1, T, H]; of heads [1, T, heads of this rank, D], or [1, heads of this rank, T, D]."""
        if weight.dtype != torch.float32 or x.dtype != torch.float32 and not torch.is_grad_enabled():
            return plain(x)
        groups = self.row_groups()
        if torch.is_grad_enabled() and _has_heads_first(x, groups):
            return self(x.transpose(1, 2), weight, eps, plain).transpose(1, 2)
        out: torch.Tensor = _RMSNorm.apply(x, weight, eps, plain, self, groups)
        return out

    def sum_of_tokens(self, x: torch.Tensor, groups: RowGroups) -> torch.Tensor | None:
        """[1, T, H] or [1, T, heads, D] -> [H] or [D]."""
        groups = groups or ((x.shape[1],),)
        own = sums_of_groups(x.reshape(x.shape[1], -1), groups)

        def part(rows: slice) -> torch.Tensor:
            if x.dim() == 3:
                return own(rows)
            heads = own(rows).view(x.shape[2:])
            return _in_order(heads) if self.kind is None else self.heads.over_heads(heads, self.kind)

        return sum_over_groups(groups, part, torch.float32)


def _has_heads_first(x: torch.Tensor, groups: RowGroups) -> bool:
    """Whether x is [1, heads, T, D] and not [1, T, heads, D]. With as many heads as tokens its memory order, which is
    that of a product's rows, tells."""
    tokens = sum(map(sum, groups))
    return x.dim() == 4 and x.shape[2] == tokens and (x.shape[1] != tokens or x.stride(1) < x.stride(2))


class _RMSNorm(Function):
    """`RMSNormFunction`, or the module's own forward for bfloat16, whose normalized rows are rounded. Each row has the
    same gradient whatever rows are with it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor, plain: PlainNorm,
                norms: Norms, groups: RowGroups) -> torch.Tensor:
        normalized, scale = normalize(x.float(), eps)
        ctx.save_for_backward(normalized.to(x.dtype), scale, weight)
        ctx.norms, ctx.groups = norms, groups
        return normalized * weight if x.dtype == torch.float32 else plain(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normalized, scale, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        product = grad.float() * normalized
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.norms.sum_of_tokens(product, ctx.groups)
        if ctx.needs_input_grad[0]:
            mean = row_sum(product * weight, keepdim=True).div_(len(weight))
            grad_x = torch.mul(grad.float(), weight, out=product).addcmul_(normalized.float(), mean, value=-1)
            grad_x = grad_x.mul_(scale).to(normalized.dtype)
        return grad_x, grad_weight, None, None, None, None
