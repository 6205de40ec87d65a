"""Rows of an embedding, whose gradients are added where they are kept, on CPUs.

In: ids. Out: their rows, as from `nn.Embedding`. torch's own gradient is as large as the whole table, however few rows
were looked up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.kernels.held_gradients import held_gradient, parameter_of


class CpuEmbedding(nn.Embedding):
    """An embedding whose float32 gradient is added to what its weight holds. With `max_norm`, `scale_grad_by_freq` or
    `sparse` it is torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        plain = self.max_norm is None and not self.scale_grad_by_freq and not self.sparse
        if not plain or not torch.is_grad_enabled() or not self.weight.requires_grad:
            return super().forward(input)
        out: torch.Tensor = _Embedding.apply(input, self.weight, self.padding_idx)
        return out


def use_cpu_embedding(module: nn.Module) -> None:
    """Let the plain embeddings of a model be `CpuEmbedding`."""
    for layer in module.modules():
        if type(layer) is nn.Embedding:
            layer.__class__ = CpuEmbedding


class _Embedding(Function):
    """ids [...], weight [V, H] -> [..., H]. padding: the id whose row gets no gradient; None: there is none."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.parameter, ctx.rows, ctx.padding = parameter_of(weight), len(weight), padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ids, total = ctx.saved_tensors[0].flatten(), held_gradient(ctx.parameter)
        rows = grad.reshape(len(ids), -1)
        if total is None or rows.dtype != total.dtype:
            padding = -1 if ctx.padding is None else ctx.padding
            return None, torch.ops.aten.embedding_dense_backward(rows, ids, ctx.rows, padding, False), None
        if ctx.padding is not None:
            rows = rows.masked_fill((ids == ctx.padding)[:, None], 0.0)
        total.index_add_(0, ids, rows)
        return None, None, None
