"""AdamW whose moments have 8 bits per element (Dettmers et al. 2022, arXiv:2110.02861).

In: this rank's part of a parameter, of its gradient and of its state. Out: the part and its state, updated.
A moment is a byte for each element, the number of one of 256 values between -1 and 1 (or 0 and 1), and a float32 scale
for each block of BLOCK elements: the largest absolute value in it. Blocks are cut from the complete parameter, never
from a rank's part, and the maximum of a block that several ranks have is taken over all of them. So what is rounded,
and how, does not depend on tp, ep or `zero`; all ranks have all scales. Each operation on elements rounds once, which
makes the update of an element independent of its place in a tensor.
Invariant: all ranks along dp and tp that have the parameter call in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, prod

import torch

from rldsl.backends.torch.train.complete_tensors import CompleteTensors
from rldsl.plan.model import Optimizer
from rldsl.plan.optimizers import BLOCK, CHUNK, ParamOptions
from rldsl.sharding.boxes import Box, Parameter, Piece, local_slice

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name -> whether it has a sign
_DECADES = 7  # powers of ten that codes distinguish


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some elements of a parameter that are updated together, to bound what is in float32."""

    where: tuple[slice, ...]  # in this rank's part
    box: Box  # in the complete parameter
    shape: tuple[int, ...]  # of the complete parameter

    def blocks(self, device: torch.device) -> torch.Tensor:
        """The number of the block of each element, int64."""
        found = torch.zeros((), dtype=torch.int64, device=device)
        for (start, stop), size in zip(self.box, self.shape, strict=True):
            found = found.unsqueeze(-1) * size + torch.arange(start, stop, device=device)
        return found // BLOCK

    def whole_blocks(self) -> slice | None:
        """The blocks, if the elements are consecutive ones from the beginning of a block to the end of one."""
        if any(pair != (0, size) for pair, size in zip(self.box[1:], self.shape[1:], strict=True)):
            return None
        start, stop = (n * prod(self.shape[1:]) for n in self.box[0])
        return None if start % BLOCK or stop % BLOCK else slice(start // BLOCK, stop // BLOCK)


class QuantizedAdamW:
    """Updates parameters one after the other."""

    def __init__(self, options: Optimizer, complete: CompleteTensors):
        self.options, self.complete = options, complete

    def step(self, held: tuple[Parameter, Sequence[Piece]], parameter: torch.Tensor, grad: torch.Tensor,
             state: Mapping[str, torch.Tensor], own: ParamOptions, rate: float, count: int) -> None:
        """held: the parameter's record, and what this rank has of it. rate: learning rate of the parameter. count: of
        this update, from 1."""
        record, pieces = held
        beta1, beta2 = self.options.betas
        scales = {name: torch.zeros_like(state[f"{name}_scales"]) for name in _MOMENTS}
        for chunk in _chunks(pieces, record):
            for name, moment in self._moments(chunk, grad, state).items():
                _add_maxima(chunk, moment, scales[name])
        for found in scales.values():
            self.complete.maximum(record.spec, found)
        for chunk in _chunks(pieces, record):
            moments = self._moments(chunk, grad, state)
            for name, moment in moments.items():
                state[f"{name}_codes"][chunk.where] = _quantize(chunk, moment, scales[name], _MOMENTS[name])
            denominator = moments["exp_avg_sq"].sqrt_().div_((1 - beta2**count) ** 0.5).add_(self.options.eps)
            update = moments["exp_avg"].div_(1 - beta1**count).div_(denominator).mul_(rate)
            values = parameter[chunk.where]
            parameter[chunk.where] = values.sub(values * (rate * own.weight_decay)).sub_(update)
        for name, found in scales.items():
            state[f"{name}_scales"].copy_(found)

    def _moments(self, chunk: _Chunk, grad: torch.Tensor,
                 state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The new moments of a chunk, in float32."""
        found = {}
        for (name, signed), beta in zip(_MOMENTS.items(), self.options.betas, strict=True):
            old = _values(signed, grad.device)[state[f"{name}_codes"][chunk.where].int()]
            old *= _of_elements(chunk, old, state[f"{name}_scales"])
            new = grad[chunk.where] if signed else grad[chunk.where].square()
            found[name] = old + (new - old) * (1 - beta)
        return found


def _chunks(pieces: Sequence[Piece], record: Parameter) -> Iterator[_Chunk]:
    """A rank's part in runs of rows of at most CHUNK elements, or of one row, and where it can be of whole blocks."""
    for piece in pieces:
        (first, last), *rest = piece.box
        width = max(1, prod(stop - start for start, stop in rest))
        rows, aligned = max(1, CHUNK // width), BLOCK // gcd(width, BLOCK)
        rows = rows // aligned * aligned or rows
        for start in range(first, last, rows):
            box = ((start, min(start + rows, last)), *rest)
            yield _Chunk(local_slice(piece, box, record.dim), box, record.spec.shape)


def _add_maxima(chunk: _Chunk, moment: torch.Tensor, scales: torch.Tensor) -> None:
    """Raise the scales of blocks to the largest absolute values of a chunk."""
    whole = chunk.whole_blocks()
    if whole is not None:
        scales[whole] = torch.maximum(scales[whole], moment.reshape(-1, BLOCK).abs().amax(1))
    else:
        scales.scatter_reduce_(0, chunk.blocks(scales.device).view(-1), moment.abs().reshape(-1), "amax")


def _of_elements(chunk: _Chunk, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The scale of each element of a chunk, with the shape of x."""
    whole = chunk.whole_blocks()
    if whole is not None:
        return scales[whole].repeat_interleave(BLOCK).view(x.shape)
    return scales[chunk.blocks(x.device)]


def _quantize(chunk: _Chunk, x: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The code of the nearest value for each element; of two equally near ones, that of the larger."""
    values = _values(signed, x.device)
    middles = values[:-1] + (values[1:] - values[:-1]) * 0.5
    relative = x / _of_elements(chunk, x, scales.clamp(min=torch.finfo(torch.float32).tiny))
    return torch.bucketize(relative, middles, out_int32=True, right=True).to(torch.uint8)


@cache
def _values(signed: bool, device: torch.device) -> torch.Tensor:
    """[256] What codes mean, ascending. Each decade 10 ** -i has half as many values as the one above, in the middles
    of equal intervals; besides there are 0 and 1."""
    found = [0.0, 1.0]
    for i in range(_DECADES):
        count = 2**i if signed else 2 ** (i + 1)
        ends = torch.linspace(0.1, 1, count + 1, device="cpu")  # so that every device has the same values
        magnitudes = ((ends[:-1] + ends[1:]) / 2 * 10 ** (i - _DECADES + 1)).tolist()
        found += magnitudes + [-m for m in magnitudes] * signed
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)
