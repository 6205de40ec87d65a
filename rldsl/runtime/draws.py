"""Random numbers that belong to an element of the batch: in: a seed, a step, row numbers, positions; out: uniform
numbers that are the same under every placement, batch order and restart."""

from __future__ import annotations

import torch

from rldsl.sharding.partition import mix

BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1: a draw above it would be rounded to 1 there


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


_GAMMA, _MIX1, _MIX2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniform(seed: int, step: int, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[S] float64 strictly inside (0, 1), also after a cast to float32."""
    return inside(bits(seed, step, rows, positions))


def bits(seed: int, step: int, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[S] int64, all 64 bits random. Each key is mixed in by the finalizer of splitmix64 (Steele, Lea & Flood 2014), in
    int64 arithmetic that wraps, so that every device draws the same. What all elements share, the seed and the step, is
    mixed in Python: half as many kernels."""
    state = rows ^ _signed(mix(seed, step))
    state = _finalized(state + _GAMMA) ^ positions
    return _finalized(state + _GAMMA)


def as_if_in_step(rows: torch.Tensor, of: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """[S] int64: row numbers that draw in `step` what `rows` [S] draw in the steps `of` [S] int64."""
    numbers = rows.clone()
    for own in of.unique().tolist():
        numbers[of == own] ^= _signed(mix(seed, own)) ^ _signed(mix(seed, step))
    return numbers


def _finalized(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shift(state, 30)) * _MIX1
    state = (state ^ _shift(state, 27)) * _MIX2
    return state ^ _shift(state, 31)


def inside(state: torch.Tensor) -> torch.Tensor:
    """64 random bits -> the middle of one of 2**52 equal parts of (0, 1). It has 53 bits, so float64 holds it as it is;
    the last 2**-25 of the range is drawn as `BELOW_ONE`."""
    return ((_shift(state, 12).double() + 0.5) * 2.0**-52).clamp(max=BELOW_ONE)


def _shift(x: torch.Tensor, n: int) -> torch.Tensor:
    """Logical shift to the right: torch's is arithmetic."""
    return (x >> n) & ((1 << (64 - n)) - 1)
