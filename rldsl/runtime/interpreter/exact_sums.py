"""Sums of floating-point numbers that do not depend on the order of their terms, nor on how ranks divide them.

In: float64 numbers. Out: 64-bit integers that add exactly, and the float64 nearest to the exact sum.

A float64 is an integer of 53 bits times a power of two. The integer is cut into words of 32 bits at fixed places, as in
the long accumulator of Kulisch (Computer Arithmetic and Validity, 2008, chapter 8), and each word is summed as int64:
2^30 terms fit. Adding integers is associative, so an all-reduce may take any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LOWEST = -1074  # the exponent of the smallest positive float64
BITS = 32  # of a word
WORDS = 67  # from 2^LOWEST up to the largest float64, and one for what a term carries over
SPECIAL = 3  # counts of NaN, inf and -inf, after the words


def exact_words(x: Tensor) -> Tensor:
    """[WORDS + SPECIAL] int64 of the sum of x [N], which add up over ranks."""
    x = x.to(torch.float64).flatten()
    finite = x.isfinite()
    mantissa, exponent = torch.frexp(torch.where(finite, x, 0.0))
    whole = (mantissa.abs() * 2.0**53).to(torch.int64)
    place = exponent.to(torch.int64) - 53 - LOWEST
    whole = whole >> (-place).clamp(min=0, max=62)  # a subnormal number: the bits that go are 0
    place = place.clamp(min=0)
    word, shift, sign = place // BITS, place % BITS, torch.where(mantissa < 0, -1, 1)
    mask = (1 << BITS) - 1
    low, high = (whole & mask) << shift, (whole >> BITS) << shift
    words = torch.zeros(WORDS + SPECIAL, dtype=torch.int64, device=x.device)
    for offset, part in enumerate((low & mask, (low >> BITS) + (high & mask), high >> BITS)):
        words.index_add_(0, word + offset, sign * part)
    words[WORDS:] = torch.stack((x.isnan().sum(), (x == torch.inf).sum(), (x == -torch.inf).sum()))
    return words


def as_floats(words: Tensor) -> Tensor:
    """[WORDS + SPECIAL] float64 of the same sum, for messages of float64: none is 2^BITS or more, so that those of 2^20
    ranks add exactly."""
    numbers: list[int] = words.tolist()
    total = _whole(numbers[:WORDS])
    sign, rest = -1 if total < 0 else 1, abs(total)
    digits = [sign * (rest >> BITS * i & (1 << BITS) - 1) for i in range(WORDS)]
    return torch.tensor([*digits, *numbers[WORDS:]], dtype=torch.float64, device=words.device)


def exact_sum(words: Tensor) -> float:
    """The float64 nearest to the sum, from the words of all ranks: NaN and infinities as adding the terms gives."""
    numbers: list[int] = words.to(torch.int64).tolist()
    *parts, nans, above, below = numbers
    if nans or above and below:
        return math.nan
    if above or below:
        return math.inf if above else -math.inf
    total = _whole(parts)
    try:
        return total / (1 << -LOWEST)  # division of integers rounds once
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def _whole(parts: Sequence[int]) -> int:
    """The sum as a multiple of 2^LOWEST."""
    return sum(part << BITS * i for i, part in enumerate(parts))
