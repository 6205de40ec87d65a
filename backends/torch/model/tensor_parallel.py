"""Tensor parallelism over plain local shards: explicit collectives at the edges of divided modules.

In: a model whose parameters are this rank's pieces, and their specs. Out: the same modules, whose forward now
communicates. The conjugate pair of Shoeybi et al. 2019 (Megatron-LM, section 3): into a divided region the identity
forward and a sum backward, out of it a sum forward and the identity backward. Where hidden states are divided by tokens
(`sequence_parallel.py`), a gather stands before instead of the first, and each rank gets its tokens of the second. """

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rldsl.backends.torch.model.lora import Adapter
from rldsl.backends.torch.model.sequence_parallel import Tokens
from torch import nn

from rldsl.runtime.backend import Axis


class IntoDivided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        slope = slope.contiguous()
        dist.all_reduce(slope, group=ctx.axis.group)
        return slope, None


class OutOfDivided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        x = x.contiguous()
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx, slope):
        return slope, None


class Entry:
    """The way into divided modules that read one input (q, k and v; gate and up): its gradient is summed once."""

    def __init__(self, tp: Axis, tokens: Tokens):
        self.tp, self.tokens = tp, tokens
        self.seen: weakref.ref | None = None
        self.made: weakref.ref | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens.on:
            return x
        made = self.made() if self.seen is not None and self.seen() is x else None
        if made is None:
            made = IntoDivided.apply(x, self.tp)
            self.seen, self.made = weakref.ref(x), weakref.ref(made)
        return made


def divide(module: nn.Module, style: str, tp: Axis, vocab_start: int, entry: Entry,
           adapter: Adapter | None = None) -> None:
    """Give `module` the collectives of a style; nothing to do for "replicated" and "head" or without tp. entry: one
    for all modules of the model. adapter: what is added to the module's product, before its collectives."""
    if adapter is not None and (style != "rowwise" or tp.size == 1):
        plain = module.forward
        module.forward = lambda x: plain(x) + adapter(x)
    if tp.size == 1:
        return
    if style == "colwise":
        module.register_forward_pre_hook(lambda _, inputs: (entry(inputs[0]), *inputs[1:]))
    elif style == "rowwise":
        module.forward = lambda x: _rowwise(module, x, tp, adapter, entry.tokens)
    elif style == "vocab":
        if module.padding_idx is not None:  # its row gets no gradient; here it has another number, or is elsewhere
            at = module.padding_idx - vocab_start
            module.padding_idx = at if 0 <= at < module.weight.shape[0] else None
        module.forward = lambda ids: _embed(module, ids, tp, vocab_start)


def _rowwise(module: nn.Module, x: torch.Tensor, tp: Axis, adapter: Adapter | None, tokens: Tokens) -> torch.Tensor:
    """The bias is whole on every rank and added once, after the sum."""
    part = F.linear(x, module.weight)
    part = part if adapter is None else part + adapter(x)
    out = tokens.sum(part) if tokens.on else OutOfDivided.apply(part, tp)
    return out if module.bias is None else out + module.bias.to(out.dtype)


def _embed(module: nn.Module, ids: torch.Tensor, tp: Axis, start: int) -> torch.Tensor:
    """Each rank looks up its rows of the vocabulary; what the module does besides the lookup stays."""
    local = ids - start
    mine = (local >= 0) & (local < module.weight.shape[0])
    rows = type(module).forward(module, torch.where(mine, local, 0))
    return OutOfDivided.apply(torch.where(mine[..., None], rows, 0.0), tp)
