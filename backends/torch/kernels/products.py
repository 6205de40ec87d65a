"""Products of float32 matrices on CPUs, by the faster of the two libraries that torch has, or by kernels of ours.

In: matrices. Out: their product, without a gradient (`linear_layers.py` has those).

torch multiplies float32 matrices by MKL, which uses AVX-512 on Intel's processors alone. Elsewhere `panel_products`
and, without compiled kernels, oneDNN, which torch has for other dtypes, are up to twice as fast; with AVX2 panels are
as fast as MKL for layers, and up to twice as fast for large vocabularies. Which one multiplies depends on the machine
and on the sizes of the matrices and on nothing else, so that the same call gives the same numbers every time. Small
products stay with MKL where a call of oneDNN would take longer to begin. Few rows are multiplied by `few_row_products`,
where it takes them: panels copy the weight, which then takes as long as the product. Invariant models choose by the
machine alone (`ordered_product`), since a row must have the same numbers in every batch.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from rldsl.backends.torch.kernels import few_row_products, panel_products
from rldsl.backends.torch.kernels.kernel_library import are_plain

MIN_MULTIPLICATIONS = 1 << 20  # from here on oneDNN is faster
TILE = 256, 1024               # rows and columns of a product with many columns that MKL computes at once
MIN_COLUMNS, MIN_TILED = 1 << 13, 1 << 21  # from here on (columns, elements) it is faster tile by tile
MAX_ADDED_TERMS = 128          # of a sum that is added to a total by MKL
ADDED = 1 << 22                # elements of a product that oneDNN computes before they are added to a total
MIN_ELEMENTS = 1 << 12         # that a product has then: oneDNN is slow at few rows and columns with long sums
FEW_ROWS = 192                 # from here on panels are faster


@cache
def mkl_lacks_avx512() -> bool:
    """Whether this machine has AVX-512 that MKL does not use."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    return _is_not_from_intel() and has_onednn()


@cache
def panels_are_fast() -> bool:
    """Whether `panel_products` take no longer than MKL on this machine."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and _is_not_from_intel()


def _is_not_from_intel() -> bool:
    """Whether the processor says that another company than Intel made it."""
    vendor = _processor_line("vendor_id")
    return bool(vendor) and "Intel" not in vendor


def _processor_line(name: str) -> str:
    """What /proc/cpuinfo says of the first processor; "" if nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((x.partition(":")[2].strip() for x in lines if x.partition(":")[0].strip() == name), "")


def has_onednn() -> bool:
    """Whether this build of torch has oneDNN's linear layer."""
    try:
        _onednn(torch.ones(2, 2), torch.ones(2, 2), None)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [n, k] @ b [m, k].T -> [n, m]. Not differentiable: for functions with their own gradient."""
    return multiplied(a, b, None)


def wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As `product`, for many columns. Where rows of a result are far apart in memory, MKL writes a tile of it at a time
    faster than all of it: the logits of vocabularies of 8192 and 32768 tokens in 0.5 to 0.9 of the time on an AMD EPYC
    with AVX2. Not for steps that are captured: their operators write complete tensors."""
    large = len(b) >= MIN_COLUMNS and len(a) * len(b) >= MIN_TILED
    if (not large or a.device.type != "cpu" or a.dtype != torch.float32 or b.dtype != a.dtype or mkl_lacks_avx512()
            or has_panels(a, b)):
        return product(a, b)
    out = a.new_empty(len(a), len(b))
    rows, columns = TILE
    for row in range(0, len(a), rows):
        for column in range(0, len(b), columns):
            torch.mm(a[row : row + rows], b[column : column + columns].T,
                     out=out[row : row + rows, column : column + columns])
    return out


def ordered_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [n, k] @ b [m, k].T -> [n, m] by oneDNN, whatever the sizes are; n and m are at least 2. It adds the terms of
    an element in an order that follows from k, as `model/invariant_probe.py` checks. A run of the columns of a larger
    matrix is copied, since oneDNN has no fast kernel for one."""
    return _onednn(_dense(a), _dense(b), None)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x, its elements next to one another in the order of rows or of columns that they have."""
    return x.T.contiguous().T if x.stride(0) == 1 and x.stride(1) != 1 else x.contiguous()


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total [n, m] + a [n, k] @ b [m, k].T, in place; without a total the product, whose transpose may be what is
    contiguous.

    Panels add in both orders of memory. oneDNN cannot add to a total. MKL does so in place, which is faster for short
    sums, where most of the time goes to reading and writing the total; for longer ones oneDNN's products are added, at
    most `ADDED` elements at a time."""
    if total is None and has_panels(b, a):  # a may be a table of logits: panels copy each of its numbers once
        return panel_products.panel_product(b, a).T
    if total is not None and has_panels(a, b) and (total.is_contiguous() or total.T.is_contiguous()):
        if total.is_contiguous():
            panel_products.add_panel_product(total, a, b)
        else:
            panel_products.add_panel_product(total.T, b, a)
        return total
    if not _takes(a, b) or total is not None and a.shape[1] <= MAX_ADDED_TERMS:
        return a @ b.T if total is None else total.addmm_(a, b.T)
    if a.shape[0] <= 4 * b.shape[0] or total is not None and total.is_contiguous():
        product = _onednn(a, b, None)
        return product if total is None else total.add_(product)
    # oneDNN is faster where the product has more columns than rows; a total that began so has the same order in memory
    if total is None:
        return _onednn(b, a, None).T
    columns = max(ADDED // len(a), 1)
    for start in range(0, len(b), columns):
        total.T[start : start + columns].add_(_onednn(b[start : start + columns].contiguous(), a, None))
    return total


def is_multiplied_here(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `multiplied_here` gives a product."""
    return has_few_rows(a, b, bias) or has_panels(a, b, bias) or _takes(a, b)


def has_few_rows(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `few_row_products` computes a [n, k] @ b [m, k].T + bias [m], and fastest."""
    return (a.shape[0] <= FEW_ROWS or not panels_are_fast()) and few_row_products.takes(a, b, bias)


def has_panels(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether `panel_products` computes a [n, k] @ b [m, k].T + bias [m]."""
    return panels_are_fast() and panel_products.takes(a, b, bias)


def multiplied(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """a [n, k] @ b [m, k].T + bias [m]. Not differentiable."""
    out = multiplied_here(a, b, bias)
    return F.linear(a, b, bias) if out is None else out


def multiplied_here(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The same by our kernels or by oneDNN; None where torch multiplies."""
    if has_few_rows(a, b, bias):
        return few_row_products.few_row_product(a, b, bias)
    if has_panels(a, b, bias):
        return panel_products.panel_product(a, b, bias)
    return _onednn(a, b, bias) if _takes(a, b) else None


def _takes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether oneDNN computes a [n, k] @ b [m, k].T."""
    elements = a.shape[0] * b.shape[0]
    return (elements >= MIN_ELEMENTS and elements * a.shape[1] >= MIN_MULTIPLICATIONS and mkl_lacks_avx512()
            and are_multiplied_as_they_are(a, b))


def are_multiplied_as_they_are(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they are tensors of float32 on a CPU that nothing else computes with."""
    return are_plain(a, b) and not torch.is_autocast_enabled("cpu")


def _onednn(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return out
