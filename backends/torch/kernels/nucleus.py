"""The threshold of nucleus sampling in Triton, without a sort of the vocabulary.

In: scores, and the mass that is kept. Out: for each row the largest score t such that the tokens whose scores reach t
have this mass (Holtzman et al. 2020, arXiv:1904.09751).

Scores are ordered as integers (`_ordered`), and the range in which t lies is divided by WAYS - 1 cuts until it holds
one number: ROUNDS passes over a row, each by one program, in one order, so that the result of a row does not depend on
the other rows. A sort reads and writes scores and their places many times more often.

Parameters of kernels are annotated with names of `tl` alone: Triton evaluates annotations, too, and refuses others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # scores that are read at once
WAYS = 8
ROUNDS = 12  # 8^11 = 2^33 numbers; one more, since parts are rounded up


@triton.jit  # type: ignore[untyped-decorator]  # triton has no type hints
def _ordered(bits: tl.tensor) -> tl.tensor:
    """The bits of float32 numbers as integers that are ordered as the numbers are, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no type hints
def _threshold(scores: tl.tensor, out: tl.tensor, mass: tl.tensor, columns: tl.tensor, stride: tl.tensor,
               BLOCK: tl.constexpr, WAYS: tl.constexpr, ROUNDS: tl.constexpr) -> None:
    """mass: of the tokens that are kept, as a part of all. stride: between rows."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        peaks = tl.maximum(peaks, tl.load(scores + row * stride + start + at, mask=start + at < columns,
                                          other=float("-inf")))
    peak = tl.max(peaks, 0)
    number = tl.arange(0, WAYS).to(tl.int64)
    # tokens from `low` on have the mass, those from `high` on have not
    low = tl.full((), -2139095041, tl.int64)  # of minus infinity, `_ordered`
    high = _ordered(peak.to(tl.int32, bitcast=True)).to(tl.int64) + 1
    total = tl.zeros((), tl.float64)
    for _ in range(ROUNDS):
        cuts = low + (high - low) * number // WAYS  # the first is `low`, which at first all tokens reach
        held = tl.zeros((WAYS,), tl.float64)
        for start in range(0, columns, BLOCK):
            x = tl.load(scores + row * stride + start + at, mask=start + at < columns, other=float("-inf"))
            weight = tl.exp(x - peak)
            key = _ordered(x.to(tl.int32, bitcast=True)).to(tl.int64)
            held += tl.sum(tl.where(key[:, None] >= cuts[None, :], weight[:, None], 0.0), 0).to(tl.float64)
        total = tl.maximum(total, tl.max(held, 0))  # of all tokens, from the first round on
        enough = held >= total * mass
        low = tl.maximum(low, tl.max(tl.where(enough, cuts, low), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, cuts), 0))
    tl.store(out + row, _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True))


def nucleus_threshold(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """[S, V] float32, log-probabilities up to a constant, -> [S, 1]: the lowest score of the nucleus."""
    scores = scores.contiguous()
    out = scores.new_empty(len(scores), 1)
    if out.numel():
        _threshold[(len(scores),)](scores, out, top_p, scores.shape[1], scores.stride(0), BLOCK=BLOCK, WAYS=WAYS,
                                   ROUNDS=ROUNDS)
    return out
