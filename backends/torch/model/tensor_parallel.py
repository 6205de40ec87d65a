"""Tensor parallelism over plain local shards: explicit collectives at the edges of divided modules.

In: a model whose parameters are this rank's pieces, and their styles. Out: the same modules, whose forward now
communicates, with the conjugate pair of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): identity
forward and all-reduce backward into a tensor-parallel region, the reverse out of it. Under sequence parallelism
(`sequence_parallel.py`) an all-gather replaces the first, and a reduce-scatter the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rldsl.backends.torch.kernels.linear_layers import linear
from rldsl.backends.torch.model.collectives import (
    copy_to_tensor_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    scatter_to_tensor_parallel_region,
)
from rldsl.backends.torch.model.gradient_sums import Leaves, column_parallel_product
from rldsl.backends.torch.model.invariant_products import add_bias
from rldsl.backends.torch.model.lora import LoraAdapter
from rldsl.backends.torch.model.row_groups import RowGroups
from rldsl.backends.torch.model.sequence_parallel import SequenceParallel
from rldsl.backends.torch.model.tree_sums import row_parallel_product
from rldsl.backends.torch.model.weight_copies import NO_COPIES, WeightCopies
from rldsl.runtime.backend import Axis


class ColumnParallelInput:
    """The input of column-parallel modules. Those of a layer that read the same tensor (q, k and v; gate and up) share
    one copy into the region, so that its gradient is all-reduced once. Which ones share may not depend on how long a
    copy happens to live: then ranks would not agree on the all-reduces of a backward pass."""

    def __init__(self, tp: Axis, sequence_parallel: SequenceParallel):
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # an input and its copy

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel.active or not torch.is_grad_enabled():
            return x
        if self._last is None or self._last[0] is not x:
            self._last = x, copy_to_tensor_parallel_region(x, self.tp)
        return self._last[1]

    def forget(self) -> None:
        """At the end of a layer, so that no activation is kept alive."""
        self._last = None


def parallelize(module: nn.Module, style: str, tp: Axis, vocab_start: int, column_input: ColumnParallelInput,
                adapter: LoraAdapter | None = None, cuts: Sequence[int] | None = None,
                leaves: Leaves | None = None, row_groups: Callable[[], RowGroups] | None = None, width: int = 0,
                shared: int = 0, copies: WeightCopies = NO_COPIES) -> None:
    """Give `module` the collectives of its style; "replicated" and "head" need none, and neither does tp=1.

    column_input: one for all modules of the model. adapter: added to the module's output, before its collectives.
    cuts: of the inputs of a row-parallel module whose sum has one order under every tp (`tree_sums.py`). leaves: of the
    outputs of a column-parallel module whose gradients have one (`gradient_sums.py`). row_groups: those of the pass
    under way, by which such gradients are summed; None if they have no order. width: of the complete output. shared:
    columns at the end of a latent form of keys and values that all heads read as they are, not through their own
    matrix. copies: of the weights of an invariant model."""
    own = (lambda x: scatter_to_tensor_parallel_region(x, tp)) if style == "rowwise_split" and tp.size > 1 else _same
    row_parallel = style in ("rowwise", "rowwise_split")
    if row_parallel and cuts is not None:
        module.forward = lambda x: _row_parallel_tree(module, own(x), tp, adapter, column_input.sequence_parallel, cuts,
                                                      row_groups, copies)
        return
    if style in ("colwise", "colwise_gather") and leaves is not None:
        def columns(x: torch.Tensor) -> torch.Tensor:
            out = _column_parallel_tree(module, x, tp, adapter, leaves, row_groups() if row_groups is not None else (),
                                        copies)
            return out if style == "colwise" or tp.size == 1 else gather_from_tensor_parallel_region(out, tp, width)

        module.forward = columns
        return
    if adapter is not None and (not row_parallel or tp.size == 1):
        plain = module.forward
        module.forward = lambda x: plain(x) + adapter(x)
    if tp.size == 1:
        return
    if style == "colwise":
        module.register_forward_pre_hook(lambda _, inputs: (column_input(inputs[0]), *inputs[1:]))
    elif row_parallel:
        module.forward = lambda x: _row_parallel(module, own(x), tp, adapter, column_input.sequence_parallel)
    elif style == "colwise_gather":
        part = module.forward
        module.forward = lambda x: gather_from_tensor_parallel_region(part(column_input(x)), tp, width)
    elif style == "latent":
        whole = module.forward
        module.forward = lambda x: _shared_by_heads(whole(x), shared, tp)
    elif style == "vocab":
        _parallelize_embedding(module, tp, vocab_start)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _shared_by_heads(x: torch.Tensor, shared: int, tp: Axis) -> torch.Tensor:
    """The gradient of the columns that all heads read is a sum over the heads of all ranks."""
    own, common = x.split([x.shape[-1] - shared, shared], -1)
    return torch.cat([own, copy_to_tensor_parallel_region(common, tp)], -1)


def _row_parallel(module: Any, x: torch.Tensor, tp: Axis, adapter: LoraAdapter | None,
                  sequence_parallel: SequenceParallel) -> torch.Tensor:
    """The bias is complete on every rank and added once, after the sum."""
    partial = linear(x, module.weight, None)
    partial = partial if adapter is None else partial + adapter(x)
    if sequence_parallel.active:
        out = sequence_parallel.reduce_scatter(partial)
    else:
        out = reduce_from_tensor_parallel_region(partial, tp)
    return out if module.bias is None else out + module.bias.to(out.dtype)


def _row_parallel_tree(module: Any, x: torch.Tensor, tp: Axis, adapter: LoraAdapter | None,
                       sequence_parallel: SequenceParallel, cuts: Sequence[int],
                       row_groups: Callable[[], RowGroups] | None, copies: WeightCopies) -> torch.Tensor:
    """`_row_parallel`, but the sum has one order, and it is rounded to bfloat16 once, at the end. Where gradients have
    one, too, the low rank of an adapter is summed before the rest of the adapter is computed, so that every rank has
    the complete gradients of both factors."""
    groups = row_groups() if row_groups is not None else ()

    def total(weight: torch.Tensor, adapter: LoraAdapter | None = None) -> torch.Tensor:
        partial = row_parallel_product(x, weight, cuts, adapter, groups, copies)
        if sequence_parallel.active:
            return sequence_parallel.reduce_scatter(partial, tree=True)
        return partial if tp.size == 1 else reduce_from_tensor_parallel_region(partial, tp, tree=True)

    if adapter is None or row_groups is None:
        out = total(module.weight, adapter)
    else:
        low = total(adapter.a)
        low = low.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else low
        out = total(module.weight) + F.linear(low, adapter.b) * adapter.scale
    if torch.is_autocast_enabled(x.device.type):
        out = out.to(torch.get_autocast_dtype(x.device.type))
    return add_bias(out, module.bias, groups) if row_groups is not None else \
        out if module.bias is None else out + module.bias.to(out.dtype)


def _column_parallel_tree(module: Any, x: torch.Tensor, tp: Axis, adapter: LoraAdapter | None, leaves: Leaves,
                          groups: RowGroups, copies: WeightCopies) -> torch.Tensor:
    """A linear layer whose gradients have one order of sums."""
    out = column_parallel_product(x, module.weight, module.bias, leaves, tp, groups, copies)
    if adapter is None:
        return out
    low = F.linear(x, adapter.a)
    return out + column_parallel_product(low, adapter.b, None, leaves, tp, groups) * adapter.scale


def _parallelize_embedding(module: Any, tp: Axis, vocab_start: int) -> None:
    """Each rank looks up its rows of the vocabulary; whatever else the family's module does stays."""
    if module.padding_idx is not None:  # its row gets no gradient; it has another number here, or is on another rank
        at = module.padding_idx - vocab_start
        module.padding_idx = at if 0 <= at < module.weight.shape[0] else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        local = ids - vocab_start
        here = (local >= 0) & (local < module.weight.shape[0])
        rows = type(module).forward(module, torch.where(here, local, 0))
        return reduce_from_tensor_parallel_region(torch.where(here[..., None], rows, 0.0), tp)

    module.forward = forward
