"""Log-probs of tokens from hidden states and a head in float32 on CPUs, and their gradients, by `cpu_heads.c`, which
says how.

In: hidden states, a head, and a target of each. Out: what log-probs are made of, and gradients. A table of logits of a
large vocabulary does not fit into the caches, and torch's operators write and read one several times: here there is
none, or it is written once and read once, where it is kept so that the gradients need not compute logits again. Without
compiled kernels there is none of this (`takes`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rldsl.backends.torch.kernels import cpu_kernels
from rldsl.backends.torch.kernels.kernel_library import library


class HeadStatistics(NamedTuple):
    """Of the logits of each hidden state, float32 [N]."""

    peaks: torch.Tensor   # the largest one
    sums: torch.Tensor    # of exp(logit - largest)
    chosen: torch.Tensor  # the logit of the target; 0 where that is no row of the head


def takes(hidden: torch.Tensor, head: torch.Tensor) -> bool:
    """Whether the functions here compute with hidden [N, H] and head [V, H]. The first call may compile them."""
    return head.numel() > 0 and cpu_kernels.takes(hidden, head) and not torch.is_autocast_enabled("cpu")


def head_statistics(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperature: float,
                    kept: torch.Tensor | None = None) -> HeadStatistics:
    """Of the logits hidden [N, H] @ head [V, H].T / temperature. targets: [N] int64, rows of the head or other numbers.
    kept: N * V numbers, float32, for `head_gradients`. Errors: ValueError for other targets."""
    found = HeadStatistics(*(hidden.new_empty(len(hidden)) for _ in range(3)))
    memory = _memory(hidden, 0)
    library().head_statistics(hidden.data_ptr(), head.data_ptr(), _rows(targets, hidden), len(hidden), len(head),
                              hidden.shape[1], 1 / temperature, *(x.data_ptr() for x in found), _pointer(kept),
                              memory.data_ptr())
    return found


def head_gradients(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperature: float,
                   normalizers: torch.Tensor, grads: torch.Tensor, total: torch.Tensor | None,
                   kept: torch.Tensor | None = None) -> torch.Tensor:
    """The gradient [N, H] of hidden states from `grads` [N], those of log-probs; that of the head is added to `total`
    [V, H], float32 and contiguous, unless that is None. normalizers: [N], the logarithms of the sums of exp(logit).
    kept: what `head_statistics` of these hidden states has filled. Errors: ValueError for other shapes."""
    of_rows = [x.to(torch.float32).contiguous() for x in (normalizers, grads)]
    if any(x.shape != (len(hidden),) for x in of_rows):
        raise ValueError(f"{len(hidden)} hidden states have as many normalizers and gradients of log-probs")
    if total is not None and (total.shape != head.shape or not cpu_kernels.takes(total)):
        raise ValueError(f"a total of {tuple(total.shape)} does not take the gradient of {tuple(head.shape)}")
    out = torch.empty_like(hidden)
    memory = _memory(hidden, 1)
    library().head_gradients(hidden.data_ptr(), head.data_ptr(), _rows(targets, hidden),
                             *(x.data_ptr() for x in of_rows), _pointer(kept), len(hidden), len(head), hidden.shape[1],
                             1 / temperature, out.data_ptr(), _pointer(total), memory.data_ptr())
    return out


def _memory(hidden: torch.Tensor, gradients: int) -> torch.Tensor:
    """What a function computes with, besides its arguments."""
    return hidden.new_empty(library().head_memory(*hidden.shape, gradients))


def _pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _rows(targets: torch.Tensor, hidden: torch.Tensor) -> int:
    """The address of the targets, of which each hidden state has one."""
    if targets.shape != (len(hidden),) or targets.dtype != torch.int64 or not targets.is_contiguous():
        raise ValueError(f"{len(hidden)} hidden states have as many targets, int64 and contiguous")
    return targets.data_ptr()
