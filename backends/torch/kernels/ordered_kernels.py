"""Kernels of invariant models for float32 on CPUs: what torch's operators compute, bit for bit, in fewer passes over
memory. So no number depends on whether a rank has a compiler, nor on which passes use a kernel.

In: plain tensors. Out: what the operators in the docstring of each function compute. `ordered_kernels.c` has them.
Rotary embeddings round each product and each sum, which leaves no choice. The sums of attention have the order of
torch's own on the processors that we know; `model/invariant_probe.py` tries it, and where it is another one torch's
operators run. Exponentials are torch's, between two kernels. As in `cpu_kernels.py`, what is called while a decode step
is captured is an operator of torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from rldsl.backends.torch.kernels import c_compiler, operators
from rldsl.backends.torch.kernels.cpu_kernels import UNBOUNDED
from rldsl.backends.torch.kernels.kernel_library import are_plain, check

SOURCE = Path(__file__).with_name("ordered_kernels.c")
FLAGS = ("-O3", "-march=native", "-std=c11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math",
         "-ffp-contract=off", "-fopenmp")
KEYS = 64  # of a block of attention
HEAD_SIZES = range(8, 129, 8)
TILE = 16  # keys whose scores are computed at once
VECTOR_WIDTHS = (4, 8, 16)  # numbers of a vector, as torch may have it

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
ARGUMENTS = {
    "rotary": (POINTER, INT, INT, POINTER, POINTER, INT, INT, INT, POINTER),
    "decode_scores": (POINTER, INT, INT, POINTER, INT, INT, POINTER, INT, INT, POINTER, POINTER, INT, POINTER, INT, INT,
                      INT, INT, INT, FLOAT, INT, INT, POINTER),
    "decode_values": (POINTER, POINTER, INT, POINTER, INT, INT, INT, INT, INT, INT, INT, INT, POINTER),
    "block_sums": (POINTER, INT, INT, POINTER),
}


@cache
def _library() -> Any:
    """The compiled functions; None if they cannot be had."""
    return c_compiler.load(SOURCE, FLAGS, ARGUMENTS)


def available() -> bool:
    """Whether there are any. The first call may compile them."""
    return _library() is not None


# ------------------------------------------------------------------------------------------------ rotary embeddings


def _rotate_into(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    _, heads, tokens, size = x.shape
    _library().rotary(x.data_ptr(), x.stride(1), x.stride(2), cos.data_ptr(), sin.data_ptr(), heads, tokens, size // 2,
                      out.data_ptr())


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    _, heads, tokens, size = x.shape
    out = x.new_empty(1, tokens, heads, size).transpose(1, 2)
    _rotate_into(out, x, cos, sin)
    return out


def rotates(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether `rotary` takes these."""
    return (are_plain(x, cos, sin) and x.dim() == 4
            and len(x) == 1 and x.stride(-1) == 1 and x.shape[-1] % 2 == 0 and cos.is_contiguous()
            and sin.is_contiguous() and cos.shape == sin.shape == (1, *x.shape[2:]) and available())


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin, without a gradient. x: [1, heads, T, D]; cos, sin: [1, T, D]. The
    result has tokens before heads in memory."""
    out: torch.Tensor = operators.call(torch.ops.rldsl.ordered_rotary, _rotate, x, cos, sin)
    return out


# ------------------------------------------------------------------------------------------------ decode attention


def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `decode_attention` takes these."""
    return (q.shape[-1] in HEAD_SIZES and q.shape[-1] == v.shape[-1]
            and are_plain(q, k, v) and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and available())


def decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
                     positions: torch.Tensor, kv_len: int, scale: float, window: int | None) -> torch.Tensor:
    """What `invariant.attend` computes of one new token of each sequence and those before it, whose keys and values it
    first writes to the cache. q: [H, S, D]; k, v: [K, S, D]; keys, values: [S, W, K, D], in memory [S, K, W, D];
    positions: [S] int64, below W; kv_len: how many tokens of a sequence are seen at most. Returns [S, H, D]."""
    heads, sequences, size = q.shape
    columns = -(-kv_len // TILE) * TILE
    # what is after the last weight fills a block: the last elements of an operation must not differ from the others
    weights = q.new_empty(-(-sequences * heads * columns // KEYS) * KEYS)
    operators.call(torch.ops.rldsl.decode_scores, _scores, q, k, v, keys, values, positions, scale,
                   window or UNBOUNDED, kv_len, weights)
    weights.exp_()
    out = q.new_empty(sequences, heads, size)
    operators.call(torch.ops.rldsl.decode_values, _values, weights, values, positions, window or UNBOUNDED, kv_len, out)
    return out


@cache
def vector_width() -> int:
    """Numbers of a vector in which torch adds rows of KEYS numbers, one of VECTOR_WIDTHS; 0: it adds them otherwise."""
    x = torch.randn(64, KEYS, generator=torch.Generator().manual_seed(0), device="cpu").exp_()
    expected, found = x.sum(-1), x.new_empty(len(x))
    for count in VECTOR_WIDTHS if available() else ():
        _library().block_sums(x.data_ptr(), len(x), count, found.data_ptr())
        if torch.equal(found, expected):
            return count
    return 0


def _scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
            positions: torch.Tensor, scale: float, window: int, kv_len: int, weights: torch.Tensor) -> None:
    heads, sequences, size = q.shape
    (q_head, q_seq, _), (k_head, k_seq, _), (v_head, v_seq, _) = q.stride(), k.stride(), v.stride()
    check(_library().decode_scores(
        q.data_ptr(), q_head, q_seq, k.data_ptr(), k_head, k_seq, v.data_ptr(), v_head, v_seq, keys.data_ptr(),
        values.data_ptr(), keys.stride(0), positions.data_ptr(), sequences, heads, len(k), keys.shape[1], size, scale,
        window, kv_len, weights.data_ptr()))


def _values(weights: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, window: int, kv_len: int,
            out: torch.Tensor) -> None:
    sequences, heads, size = out.shape
    _library().decode_values(
        weights.data_ptr(), values.data_ptr(), values.stride(0), positions.data_ptr(), sequences, heads,
        values.shape[2], values.shape[1], size, window, kv_len, vector_width(), out.data_ptr())


# -------------------------------------------------------------------------------------------------------- operators

_OPERATORS = torch.library.Library("rldsl", "FRAGMENT")
for _schema, _function in (
        ("ordered_rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rotate),
        ("decode_scores(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor positions, "
         "float scale, int window, int kv_len, Tensor(c!) weights) -> ()", _scores),
        ("decode_values(Tensor weights, Tensor values, Tensor positions, int window, int kv_len, Tensor(a!) out) "
         "-> ()", _values)):
    _OPERATORS.define(_schema)
    _OPERATORS.impl(_schema.partition("(")[0], _function, "CPU")

# as those of `cpu_kernels`
INTO: dict[Any, Callable[[Any, Any], Callable[[], Any]]] = {
    torch.ops.rldsl.ordered_rotary.default: lambda out, args: partial(_rotate_into, out, *args)}
PLAIN: dict[Any, Callable[..., Callable[[], Any]]] = {
    torch.ops.rldsl.decode_scores.default: partial(partial, _scores),
    torch.ops.rldsl.decode_values.default: partial(partial, _values)}
