"""Whether this processor's kernels do what `invariant=true` needs: checked before a model is used, not assumed.

In: a model and the device. Out: nothing, or RL0734. For the shape of every matrix of the model and its dtype, a
product of `invariant_products.py` must give a row the same bits whatever rows are with it, in every column slice that
a degree of tp makes, on a run of the inputs inside a larger matrix, and on one thread; attention, SiLU and sums
likewise. With `invariant=training` gradients of weights are tried, too.

Invariant: what is tried follows from the model and not from the placement, so that all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache, partial
from itertools import pairwise

import torch

from rldsl.backends.torch.kernels import fixed_order, ordered_kernels
from rldsl.backends.torch.model import invariant_products as products
from rldsl.backends.torch.model.invariant import Invariant
from rldsl.backends.torch.model.invariant_activations import THREAD_RUN, silu
from rldsl.backends.torch.model.invariant_attention import attend
from rldsl.diag import fail
from rldsl.plan.model import Model
from rldsl.sharding.sum_blocks import BLOCKS, local_cuts, num_blocks, summed_input

TOKENS = (5, 130)  # in a gradient
COUNTS = (1, 2, 3, 5, 7, 8, 13, 16, 33, 64, 130)  # rows of a product
MANY = 1000  # rows of a product on a GPU, whose libraries choose among more kernels
MOST = 1 << 22  # elements of a matrix that is tried; a wider one is tried with fewer columns


def check_kernels(model: Model, device: torch.device) -> None:
    """Errors: RL0734 for a kernel whose sums depend on the shape of a batch or on a placement."""
    if what := fixed_order.missing(device):
        raise _refused(model, f"on this device products in one order need {what}")
    dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
    threads = torch.get_num_threads()
    for inputs, outputs, size in sorted({*_shapes(model)}):
        if why := _product_varies(inputs, min(outputs, max(MOST // inputs, 64)), size, dtype, str(device), threads):
            raise _refused(model, f"a product with a {inputs} x {outputs} matrix in {model.dtype} depends on {why}")
    for outputs, inputs in sorted({s.shape[-2:] for s in (*model.params, *model.base) if len(s.shape) > 1}
                                  if model.invariant_training else ()):
        if why := _gradient_varies(inputs, min(outputs, max(MOST // inputs, 64)), dtype, str(device), threads):
            raise _refused(model, f"the gradient of a {inputs} x {outputs} matrix in {model.dtype} depends on {why}")
    if model.sizes.head_dim and (why := _attention_varies(model.sizes.head_dim, str(device), threads)):
        raise _refused(model, f"attention with heads of {model.sizes.head_dim} depends on {why}")
    if model.sizes.head_dim and model.invariant_training and (
            why := _attention_gradient_varies(model.sizes.head_dim, str(device), threads)):
        raise _refused(model, f"the gradient of attention with heads of {model.sizes.head_dim} depends on {why}")
    if _activation_varies(dtype, str(device), threads):
        raise _refused(model, f"an activation in {model.dtype} depends on where an element stands")
    if _sum_varies(str(device), threads):
        raise _refused(model, "a sum over columns depends on the number of rows")


def _refused(model: Model, why: str) -> Exception:
    return fail("RL0734", f"`{model.name}` cannot be invariant on this machine", place=str(model.path),
                label="kernels round differently from one batch to the next", notes=(why,),
                help="run without `invariant=true`, or on a processor or with a version of torch whose kernels pass")


def _shapes(model: Model) -> Iterator[tuple[int, int, int]]:
    """(inputs, outputs, size of an indivisible run of inputs or 0) of every matrix, as torch's linear layers have
    them."""
    for spec in (*model.params, *model.base):
        if len(spec.shape) < 2:
            continue
        outputs, inputs = spec.shape[-2:]
        summed = summed_input(spec)
        if not summed:
            yield inputs, outputs, 0
            continue
        cuts = local_cuts(*summed, 1, 0)
        for width in {stop - start for start, stop in pairwise(cuts)}:
            yield width, outputs, num_blocks(*summed)


@cache
def _product_varies(inputs: int, outputs: int, blocks: int, dtype: torch.dtype, device: str, threads: int) -> str:
    """On what a product of [., inputs] with [outputs, inputs] depends, or "". blocks: where the matrix is such a block
    of a larger one, of how many."""
    counts = COUNTS if device == "cpu" else (*COUNTS, MANY)
    x_part, w_part = _cancelling(inputs, max(counts) + 3, outputs, blocks)
    x_part, w_part = x_part.to(device, dtype), w_part.to(device, dtype)
    if blocks > 1:  # a run of the columns of a larger matrix
        x_part, w_part = (torch.cat([a, a, a], 1)[:, inputs : 2 * inputs] for a in (x_part, w_part))
    try:
        torch.set_num_threads(1)
        expected = products.multiply(x_part.contiguous(), w_part.contiguous().T)
    finally:
        torch.set_num_threads(threads)
    for count in counts:
        rows = slice(3, 3 + count)
        if not torch.equal(products.multiply(x_part[rows], w_part.T), expected[rows]):
            return "the number of its rows or threads"
    rows = slice(1, 6)
    for degree in (2, 4, BLOCKS):
        for i in range(degree):
            piece = slice(i * outputs // degree, (i + 1) * outputs // degree)
            if piece.stop > piece.start and not torch.equal(
                    products.multiply(x_part[rows], w_part[piece].contiguous().T), expected[rows, piece]):
                return f"the number of its columns (tp={degree})"
    return ""


@cache
def _gradient_varies(inputs: int, outputs: int, dtype: torch.dtype, device: str, threads: int) -> str:
    """On what the gradient of a weight [outputs, inputs] depends besides its own terms, or ""."""
    for tokens in TOKENS:
        x, grad = (a.T.contiguous().to(device, dtype) for a in _cancelling(tokens, inputs, outputs, 0))
        try:
            torch.set_num_threads(1)
            expected = products.weight_gradient(x, grad)
        finally:
            torch.set_num_threads(threads)
        if not torch.equal(products.weight_gradient(x, grad), expected):
            return "the number of threads"
        for degree in (2, 4, BLOCKS):
            for i in {0, degree - 1}:
                row, column = (slice(i * n // degree, (i + 1) * n // degree) for n in (outputs, inputs))
                if not torch.equal(products.weight_gradient(x, grad[:, row]), expected[row]):
                    return f"the number of its rows (tp={degree})"
                if not torch.equal(products.weight_gradient(x[:, column], grad), expected[:, column]):
                    return f"the number of its columns (tp={degree})"
    return ""


def _cancelling(inputs: int, rows: int, outputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, inputs] and [outputs, inputs] whose products are 0 but for rounding: what is left shows the order of the
    sums, which rounding to bfloat16 would mostly hide."""
    draw = torch.Generator().manual_seed(inputs + seed)
    order = torch.randperm(inputs, generator=draw)
    x, w = (torch.randn(n, inputs // 2, generator=draw).bfloat16().float() for n in (rows, outputs))
    odd = inputs % 2
    x, w = torch.cat([x, -x, x.new_zeros(rows, odd)], 1), torch.cat([w, w, w.new_zeros(outputs, odd)], 1)
    return x[:, order], w[:, order]


@cache
def _attention_varies(size: int, device: str, threads: int) -> str:
    """On what attention with heads of this size depends, or ""."""
    draw = torch.Generator().manual_seed(size)
    q, k, v = (torch.randn(3, n, 70, size, generator=draw).to(device) for n in (6, 2, 2))
    try:
        torch.set_num_threads(1)
        expected = attend(q, k, v, is_causal=True)
    finally:
        torch.set_num_threads(threads)
    if not torch.equal(attend(q, k, v, is_causal=True), expected):
        return "the number of threads"
    if not torch.equal(attend(q[1:2, 3:5], k[1:2, 1:], v[1:2, 1:], is_causal=True), expected[1:2, 3:5]):
        return "the number of its heads"
    for last in (0, 4, 63, 69):
        alone = attend(q[:, :, last : last + 1], k[:, :, : last + 1], v[:, :, : last + 1])
        if not torch.equal(alone, expected[:, :, last : last + 1]):
            return "the number of its queries"
    return ""


def ordered_heads(size: int) -> Collection[int]:
    """The size of a model's heads, or nothing if kernels would attend to them with other bits in decoding than
    `invariant_attention.attend`, which then does it."""
    return (size,) if size and _decodes_alike(size, torch.get_num_threads()) else ()


@cache
def _decodes_alike(size: int, threads: int) -> bool:
    """threads: those that compute it, since torch divides its operators among them."""
    if size not in ordered_kernels.HEAD_SIZES or not ordered_kernels.vector_width():
        return False
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(size), device="cpu")
    sequences, heads, kv_heads, width, kv_len = 9, 6, 2, 210, 200
    q, k, v = (draw(n, sequences, size) for n in (heads, kv_heads, kv_heads))
    held = [draw(sequences, kv_heads, width, size).transpose(1, 2) for _ in range(2)]
    positions = torch.tensor([0, 1, 15, 62, 63, 64, 130, 191, 199], device="cpu")
    at = torch.arange(sequences, device="cpu"), positions
    keys, values = (x.index_put(at, new.transpose(0, 1))[:, :kv_len].transpose(1, 2)
                    for x, new in zip(held, (k, v), strict=True))
    queries = q.transpose(0, 1).unflatten(1, (kv_heads, -1))
    for window in (None, 70):
        behind = positions[:, None] - torch.arange(kv_len, device="cpu")  # how far a token is behind the new one
        seen = (behind >= 0) & (behind < (window or kv_len))
        expected = attend(queries, keys, values, seen[:, None, None], scale=0.3).flatten(1, 2)
        found = ordered_kernels.decode_attention(q, k, v, held[0].clone(), held[1].clone(), positions, kv_len, 0.3,
                                                 window)
        if not torch.equal(found, expected):
            return False
    return True


@cache
def _attention_gradient_varies(size: int, device: str, threads: int) -> str:
    """On what the gradients of attention with heads of this size depend, or ""."""
    draw = torch.Generator().manual_seed(size)
    q, k, v, grad = (torch.randn(2, 4, 70, size, generator=draw).to(device) for _ in range(4))

    def gradients(heads: slice, first: int = 0) -> list[torch.Tensor]:
        """first: of the sequences."""
        inputs = [x[first:, heads].detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = attend(inputs[0], inputs[1], inputs[2], is_causal=True)
        return list(torch.autograd.grad(out, inputs, grad[first:, heads]))

    try:
        torch.set_num_threads(1)
        expected = gradients(slice(None))
    finally:
        torch.set_num_threads(threads)
    for first, last in ((0, 4), (0, 1), (2, 4)):
        heads = slice(first, last)
        if not all(torch.equal(a, b[:, heads]) for a, b in zip(gradients(heads), expected, strict=True)):
            return "the number of its heads or threads"
    if not all(torch.equal(a, b[1:]) for a, b in zip(gradients(slice(None), 1), expected, strict=True)):
        return "the number of its sequences"
    return ""


@cache
def _activation_varies(dtype: torch.dtype, device: str, threads: int) -> bool:
    draw = torch.Generator().manual_seed(0)
    x, grad = (4 * torch.randn(2, 3 * THREAD_RUN, generator=draw, device="cpu")).to(device, dtype)

    def found(at: slice) -> torch.Tensor:
        given = x[at].detach().requires_grad_()
        with torch.enable_grad():
            out = silu(given)
        return torch.stack([out.detach(), *torch.autograd.grad(out, given, grad[at])])

    try:
        torch.set_num_threads(1)
        expected = found(slice(None))
    finally:
        torch.set_num_threads(threads)
    return not all(torch.equal(found(slice(start, start + n)), expected[:, start : start + n])
                   for start, n in ((0, len(x)), (1, 5), (7, 64), (13, 1000), (5, 2 * THREAD_RUN + 9)))


@cache
def _sum_varies(device: str, threads: int) -> bool:
    x = torch.randn(9, 5000, generator=torch.Generator().manual_seed(0)).to(device).exp()
    with Invariant():
        expected = x[:, 700:4000].contiguous().sum(-1)
        rows = all(torch.equal(x[:n, 700:4000].sum(-1), expected[:n]) for n in (1, 2, 5, 9))
    expected = products.sum_of_rows(x.T.contiguous())
    return not rows or not all(torch.equal(products.sum_of_rows(x[a:b].T.contiguous()), expected[a:b])
                               for a, b in ((0, 1), (1, 4), (8, 9)))
