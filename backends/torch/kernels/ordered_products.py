"""Products of matrices in Triton whose elements are each summed in one order, whatever the shapes are.

In: batches of matrices. Out: their products. Each program has one tile of the result, of one size for all shapes, and
goes through the contracted dimension from its beginning to its end; libraries divide it over programs where there are
few rows (split-K, stream-K), so that a row has other bits in a batch of another size.

Parameters of kernels are annotated with names of `tl` alone: Triton evaluates annotations, too, and refuses others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, TERMS = 64, 64, 32  # of a tile, and of a step through the contracted dimension


@triton.jit  # type: ignore[untyped-decorator]  # triton has no type hints
def _product(left: tl.tensor, right: tl.tensor, out: tl.tensor, rows: tl.tensor, columns: tl.tensor, terms: tl.tensor,
             left_batch: tl.tensor, left_row: tl.tensor, left_term: tl.tensor, right_batch: tl.tensor,
             right_term: tl.tensor, right_column: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
             TERMS: tl.constexpr) -> None:
    """A tile of left [batch, rows, terms] @ right [batch, terms, columns], into out, which is contiguous. left_batch to
    right_column: strides."""
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, TERMS).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, terms, TERMS):
        term = first + at
        a = tl.load(left + batch * left_batch + row[:, None] * left_row + term[None, :] * left_term,
                    mask=(row[:, None] < rows) & (term[None, :] < terms), other=0.0)
        b = tl.load(right + batch * right_batch + term[:, None] * right_term + column[None, :] * right_column,
                    mask=(term[:, None] < terms) & (column[None, :] < columns), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out + (batch * rows + row[:, None]) * columns + column[None, :], total.to(out.dtype.element_ty),
             mask=(row[:, None] < rows) & (column[None, :] < columns))


def products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[G, n, k] @ [G, k, m] -> [G, n, m], contiguous, of one dtype; sums are float32."""
    (batch, rows, terms), columns = left.shape, right.shape[2]
    out = torch.empty(batch, rows, columns, dtype=left.dtype, device=left.device)
    if out.numel():
        grid = triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS), batch
        _product[grid](left, right, out, rows, columns, terms, *left.stride(), *right.stride(), ROWS=ROWS,
                       COLUMNS=COLUMNS, TERMS=TERMS)
    return out
