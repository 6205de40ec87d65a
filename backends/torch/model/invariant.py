"""Batch-invariant computation: the numbers of a token do not depend on the other tokens of its batch, nor on the
columns of a weight that tensor parallelism leaves on this rank.

In: torch's functions, as modules and heads call them while a mode is on. Out: the same functions, with matrix products
whose rows and columns are padded to fixed multiples (`invariant_products.py`), attention over blocks of a fixed number
of keys (`invariant_attention.py`), and activations that compute every element alike (`invariant_activations.py`).

A kernel chooses its algorithm by shapes: products of few rows or columns, or with a few left over on a thread, are
summed in another order. Multiples of ROWS and COLUMNS are not, on the processors that we know; that this is true here
is tried before a model is used (`invariant_probe.py`). So a token gets the same numbers whether it is decoded in a
batch or is part of a packed row: log-probs of generation are those of training, bit for bit. Sums that tp divides are
cut into blocks (`sharding/sum_blocks.py`) and added in one tree (`tree_sums.py`). Norms and embeddings work row by row
and are left as they are. Backward passes use plain products, which are as fast as without: a gradient need not be the
same in two places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from rldsl.backends.torch.kernels import fixed_order
from rldsl.backends.torch.model.invariant_activations import gelu, sigmoid, silu
from rldsl.backends.torch.model.invariant_attention import attend
from rldsl.backends.torch.model.invariant_products import addmm, embedding, linear, matmul
from rldsl.backends.torch.model.row_groups import RowGroups
from rldsl.backends.torch.model.weight_copies import NO_COPIES, WeightCopies


class Invariant(TorchFunctionMode):
    """While this mode is on, products have fixed multiples of rows and columns and attention has blocks of one size."""

    def __init__(self, over_query_heads: Callable[[torch.Tensor], torch.Tensor] | None = None,
                 row_groups: Callable[[], RowGroups] = tuple, copies: WeightCopies = NO_COPIES):
        """over_query_heads: with it the gradient of keys and values does not depend on which heads are on this rank
        (`gradient_sums.py`). row_groups: those of the pass under way, by which gradients are summed. copies: of
        weights."""
        super().__init__()
        self.over_query_heads, self.row_groups, self.copies = over_query_heads, row_groups, copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HANDLED:
            return func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            return attend(*args, **(kwargs or {}) | {"over_query_heads": self.over_query_heads})
        groups = self.row_groups() if torch.is_grad_enabled() else ()
        if func is F.linear:
            return partial(linear, groups=groups, copies=self.copies)(*args, **(kwargs or {}))
        if func in GROUPED:
            return GROUPED[func](*args, **(kwargs or {}), groups=groups)
        if func in fixed_order.REDUCTIONS and (compute := fixed_order.replacement(func, args, kwargs or {})):
            return compute()
        return REPLACED.get(func, func)(*args, **(kwargs or {}))


# called with the groups of the tokens that are their rows
GROUPED: dict[Any, Callable[..., Any]] = {
    torch.addmm: addmm, torch.matmul: matmul, torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul, F.embedding: embedding}
REPLACED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: attend, F.silu: silu, F.gelu: gelu, torch.sigmoid: sigmoid,
    torch.Tensor.sigmoid: sigmoid, F.sigmoid: sigmoid}
HANDLED = {F.linear, *GROUPED, *REPLACED, *fixed_order.REDUCTIONS}
