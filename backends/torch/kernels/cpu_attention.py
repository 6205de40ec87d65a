"""Causal attention of packed sequences on CPUs over their exact lengths, with its gradient, by `cpu_attention.c`.

In: float32 queries, keys and values of a packed row, and its segments: runs of queries, which see their own keys and
perhaps those of a prefix (a prompt that several responses have). Out: what they attend to. Nothing is padded or copied
into a grid, and a prefix is read where it is by each segment that has it. For the gradient the arguments and one number
of each query and head are kept; probabilities are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from rldsl.backends.torch.kernels import cpu_kernels, kernel_library
from rldsl.backends.torch.kernels.autograd import Function

Segment = tuple[int, int, int, int]  # rows of queries: the first, and how many; the same of the prefix


@dataclass(frozen=True, slots=True)
class Segments:
    """Of a packed row, of which each token is in one segment."""

    table: torch.Tensor   # [N, 4] int64, group by group
    groups: torch.Tensor  # [G + 1] int64: where each group begins, and the end of the last one
    tokens: int           # of the row

    @staticmethod
    def of(groups: Sequence[Sequence[Segment]]) -> Segments:
        """groups: one or more segments each. A prefix is the rows of the first segment of its group."""
        sizes = list(accumulate(map(len, groups), initial=0))
        rows = [s for group in groups for s in group]
        return Segments(torch.tensor(rows, dtype=torch.long, device="cpu").view(-1, 4),
                        torch.tensor(sizes, dtype=torch.long, device="cpu"), sum(count for _, count, _, _ in rows))

    @staticmethod
    def of_lengths(lengths: Sequence[int]) -> Segments:
        """Of sequences one after the other, some of which may be empty."""
        starts = accumulate(lengths, initial=0)
        return Segments.of([[(start, n, 0, 0)] for start, n in zip(starts, lengths, strict=False) if n])


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `attend` computes these: [heads, T, size] each."""
    return (kernel_library.are_plain(q, k, v) and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
            and kernel_library.available())


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float, window: int | None
           ) -> torch.Tensor:
    """q: [H, T, D]; k: [K, T, D]; v: [K, T, E]; H a multiple of K. scale: of the products of queries and keys. window:
    how many tokens a query sees at most, itself included. Returns [T, H, E]. Errors: ValueError if the row is not that
    of the segments."""
    if not q.shape[1] == k.shape[1] == v.shape[1] == segments.tokens:
        raise ValueError(f"segments have {segments.tokens} tokens, the row has {q.shape[1]}")
    arguments = q, k, v, segments, scale, window or cpu_kernels.UNBOUNDED
    out: torch.Tensor = _Attention.apply(*arguments) if torch.is_grad_enabled() else _attended(*arguments)[0]
    return out


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float, window: int
              ) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend` returns, and the logarithms of the sums of exponentials [T, H]."""
    heads, tokens, _ = q.shape
    out, normalizers = q.new_empty(tokens, heads, v.shape[2]), q.new_empty(tokens, heads)
    kernel_library.check(kernel_library.library().attention(
        *_heads(q), *_heads(k), *_heads(v), *_numbers(q, k, v, segments), scale, window, out.data_ptr(),
        normalizers.data_ptr()))
    return out, normalizers


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float,
                window: int) -> torch.Tensor:
        out, normalizers = _attended(q, k, v, segments, scale, window)
        ctx.save_for_backward(q, k, v, normalizers)
        ctx.options = segments, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, normalizers = ctx.saved_tensors
        segments, scale, window = ctx.options
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grads = [x.new_empty(x.shape[1], x.shape[0], x.shape[2]) for x in (q, k, v)]
        kernel_library.check(kernel_library.library().attention_backward(
            *_heads(q), *_heads(k), *_heads(v), *_heads(grad.transpose(0, 1)), *_numbers(q, k, v, segments), scale,
            window, normalizers.data_ptr(), *(x.data_ptr() for x in grads)))
        return *(x.transpose(0, 1) for x in grads), None, None, None


def _heads(x: torch.Tensor) -> tuple[int, int, int]:
    return x.data_ptr(), x.stride(0), x.stride(1)


def _numbers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> tuple[int, ...]:
    """Where the segments are, and the sizes."""
    return (segments.table.data_ptr(), segments.groups.data_ptr(), segments.groups.shape[0] - 1,
            q.shape[0], k.shape[0], q.shape[2], v.shape[2])
