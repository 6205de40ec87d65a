"""What a train call under `zero` holds while a minibatch runs: parameters that are complete where they must be,
gradients before they are reduced, and what reductions read and write, each at moments when activations are there, too.

In: a copy of the model at a cell, the peaks of its passes. Out: holder -> bytes, at the moment when most is held. The
groups are the `ParamGroup`s of `backends/torch/model/zero.py`: each layer, and one for everything outside the layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from rldsl.memory.parameters import FLOAT, Copy, group_bytes, held, in_passes, largest_weight, leaf_sums, tied_gradient
from rldsl.memory.values import PassPeaks
from rldsl.plan.model import ParamSpec
from rldsl.sharding.layout import own_layers


@dataclass(frozen=True, slots=True)
class Groups:
    """Bytes of a rank's parameter groups, complete."""

    parts: tuple[int, ...]  # of each layer's parameters, as modules compute with them
    gradients: tuple[int, ...]  # of each layer's gradients, in float32
    outside: int  # of the parameters outside the layers; of their gradients as many
    head: int  # of the gradient of an output embedding, which is there before those of the layers; 0 if tied

    @property
    def largest(self) -> int:
        return max(*self.gradients, self.outside)


class _Moment(NamedTuple):
    """Bytes that are held at one moment of a minibatch."""

    activations: int  # with logits and messages
    parameters: int  # complete ones
    gradients: int  # not reduced yet, and what reductions read and write

    @property
    def total(self) -> int:
        return self.activations + self.parameters + self.gradients


@cache
def groups_of(copy: Copy) -> Groups:
    """The groups of a copy that is trained under `zero`."""
    return _groups_of(in_passes(copy))


@cache
def _groups_of(copy: Copy) -> Groups:
    layers = [s for s in copy.model.params if s.stage == "layer" and held(s, copy)]
    rest = [s for s in copy.model.params if s.stage != "layer" and held(s, copy)]
    head = [s for s in rest if copy.last and s.stage in ("last", "ends") and len(s.shape) > 1]
    return Groups(_bytes_of_layers(layers, copy, copy.compute), _bytes_of_layers(layers, copy, FLOAT),
                  group_bytes(rest, copy, FLOAT), group_bytes(head, copy, FLOAT) - tied_gradient(copy))


def bytes_under_zero(copy: Copy, peaks: PassPeaks, device: str) -> dict[str, int]:
    """Holder -> bytes, during the passes of a minibatch or at its end, whichever needs more. device: "cuda" or
    "cpu"."""
    groups = groups_of(copy)
    reductions = _Reductions(copy.layout.dp, device)
    moments = _in_leaves(copy, groups, peaks) if leaf_sums(copy) else \
        _reduced_at_the_end(copy, groups, peaks, reductions) if copy.layout.zero == 1 else \
        _reduced_in_passes(copy, groups, peaks, reductions)
    most = max(moments, key=lambda m: m.total)
    return {"activations": most.activations, "complete parameters": most.parameters,
            "gradients being reduced": most.gradients}


@dataclass(frozen=True, slots=True)
class _Reductions:
    """One reduce-scatter starts while the one before it is under way."""

    dp: int  # ranks
    device: str  # "cuda" or "cpu"

    def under_way(self, gradients: int) -> int:
        """What a reduction of gradients of some bytes writes, and on a GPU what it reads until it is waited for."""
        return gradients // self.dp + (gradients if self.device == "cuda" else 0)

    def start(self, gradients: int, previous: int) -> int:
        """When it begins: the gradients, their padded copy, what it writes, and the one before it."""
        return 2 * gradients + gradients // self.dp + self.under_way(previous)


def _reduced_at_the_end(copy: Copy, groups: Groups, peaks: PassPeaks, reductions: _Reductions) -> Iterator[_Moment]:
    """Level 1: all is complete and all gradients are kept until the minibatch ends, when nothing else is there."""
    there, whole = groups.outside + sum(groups.parts), groups.outside + sum(groups.gradients)
    before = whole if peaks.several else 0  # gradients of the passes before
    yield _Moment(peaks.head, there, before)
    yield _Moment(peaks.layers, there, before or groups.head + _besides_largest(copy, groups.gradients[-1]))
    yield _Moment(peaks.first_layer, there, before or groups.head + _besides_largest(copy, sum(groups.gradients)))
    yield _Moment(peaks.embedding, there, before or groups.head + sum(groups.gradients))
    yield _Moment(peaks.tower, there, before or whole)  # whose gradients are the last ones
    first, last = groups.gradients[0], groups.gradients[-1]
    yield _Moment(0, there, whole - first + reductions.start(first, 0))
    yield _Moment(0, there, reductions.start(groups.outside, last))


def _reduced_in_passes(copy: Copy, groups: Groups, peaks: PassPeaks, reductions: _Reductions) -> Iterator[_Moment]:
    """Levels 2 and 3: gradients are reduced layer by layer, those outside the layers at the end of a backward pass. At
    level 3 a layer and the next one are complete, or on their way."""
    every = copy.layout.zero < 3
    layer, largest = max(groups.gradients), max(groups.parts)
    there = groups.outside + (sum(groups.parts) if every else sum(sorted(groups.parts)[-2:]))
    before = reductions.under_way(groups.outside) if peaks.several else 0  # of the pass before
    one = there if every else groups.outside + largest
    yield _Moment(peaks.head, there if every else groups.outside, before)
    yield _Moment(peaks.layers, there,
                  groups.head + _besides_largest(copy, layer) + max(before, reductions.under_way(layer)))
    yield _Moment(peaks.between_layers, there, groups.head + reductions.start(layer, layer))
    yield _Moment(peaks.embedding, one, groups.head + layer + reductions.under_way(layer))
    yield _Moment(peaks.tower, one, groups.outside + layer + reductions.under_way(layer))
    yield _Moment(peaks.between_passes, one, groups.outside + reductions.start(layer, layer))
    yield _Moment(peaks.between_passes, there if every else groups.outside, reductions.start(groups.outside, layer))


def _in_leaves(copy: Copy, groups: Groups, peaks: PassPeaks) -> Iterator[_Moment]:
    """Of a model with `invariant_training`, which adds the gradients of a leaf to sums of leaves and reduces these at
    the end of a minibatch, whatever the level."""
    there = groups.outside + (sum(groups.parts) if copy.layout.zero < 3 else sum(sorted(groups.parts)[-2:]))
    sums = leaf_sums(copy)
    whole = (groups.outside + sum(groups.gradients)) * (1 + sums + (copy.layout.cp > 1))
    yield _Moment(peaks.most, there, whole)
    yield _Moment(0, there, whole + 2 * groups.largest)


def _besides_largest(copy: Copy, gradients: int) -> int:
    """Without that of the largest matrix, which the peaks of layers count."""
    return max(0, gradients - FLOAT * largest_weight(copy))


def _bytes_of_layers(specs: Sequence[ParamSpec], copy: Copy, matrix: int) -> tuple[int, ...]:
    """Bytes of each layer here. specs, matrix: as of `group_bytes`."""
    alike = group_bytes([s for s in specs if s.layer < 0], copy, matrix)
    more = Counter[int]()
    for s in specs:
        if s.layer >= 0:
            more[s.layer] += group_bytes([s], copy, matrix)
    return tuple(alike + more[number] for number in own_layers(copy.model.layers, copy.layout, copy.cell.pp_rank))
