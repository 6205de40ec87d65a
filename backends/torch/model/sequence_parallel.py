"""Sequence parallelism on top of tensor parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

In: the layers of a stage whose weights are divided over tp. Out: the same layers, with the hidden states between their
sublayers divided by tokens: all-gathered where attention or MLP begin, and reduce-scattered where they end. That moves
as much as the all-reduces of plain tensor parallelism; norms, residuals and what is saved between layers shrink by tp.

The all-gather is before the whole sublayer, since family code takes its shapes from what it is given. At both ends of a
stage hidden states are complete, so embeddings, heads and pipelines know nothing of this.
Invariant: the number of rows is a multiple of tp; `PaddedAttention` makes it one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rldsl.backends.torch.model.attention import PackedAttention, Scores
from rldsl.backends.torch.model.collectives import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from rldsl.backends.torch.model.sequences import DividedSequences
from rldsl.plan.model import ParamSpec
from rldsl.runtime.backend import Axis


class SequenceParallel:
    """Whether passes divide hidden states by tokens at present. All modules of a stage share one."""

    def __init__(self, tp: Axis, supported: bool):
        """supported: whether the model family allows it."""
        self.tp = tp
        self.available = supported and tp.size > 1
        self.active = False

    @contextmanager
    def region(self) -> Iterator[None]:
        """Divide by tokens inside, where it is available."""
        self.active = self.available
        try:
            yield
        finally:
            self.active = False

    def padded_rows(self, count: int) -> int:
        """The length to which a row of `count` tokens is padded."""
        return -(-count // self.tp.size) * self.tp.size if self.available else count

    def reduce_scatter(self, x: torch.Tensor, tree: bool = False) -> torch.Tensor:
        """Partial sums [1, T, H] -> the sum, for this rank's tokens: [1, T / tp, H]."""
        return reduce_scatter_to_sequence_parallel_region(x[0], self.tp, tree)[None]

    def install(self, layers: Sequence[nn.Module], names: Iterable[str]) -> None:
        """Put the collectives around the sublayers of consecutive layers. names: see `gathered_children`."""
        if not self.available or not layers:
            return
        for layer in layers:
            for name in names:
                self._before(layer.get_submodule(name), self._gather_for_sublayer)
        self._before(layers[0], self._own_tokens)
        layers[-1].register_forward_hook(self._gather_output)

    def _gather_for_sublayer(self, x: torch.Tensor) -> torch.Tensor:
        return gather_from_sequence_parallel_region(x, self.tp, tensor_parallel_output_grad=True)

    def _own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        return scatter_to_sequence_parallel_region(x, self.tp)

    def _before(self, module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change the hidden states [1, T, H] that a module is called with."""
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.active:
                return None
            if args:
                return (change(args[0][0])[None], *args[1:]), kwargs
            return args, kwargs | {"hidden_states": change(kwargs["hidden_states"][0])[None]}

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def _gather_output(self, _: nn.Module, __: Any, out: Any) -> Any:
        if not self.active:
            return None
        first, *rest = out if isinstance(out, tuple) else (out,)
        gathered = gather_from_sequence_parallel_region(first[0], self.tp, tensor_parallel_output_grad=False)[None]
        return (gathered, *rest) if isinstance(out, tuple) else gathered


class PaddedAttention(DividedSequences):
    """Attention over a row that is padded to `rows` tokens; padding attends to nothing, and nothing attends to it."""

    def __init__(self, inner: PackedAttention, rows: int):
        self.inner, self.rows, self.count = inner, rows, len(inner.positions)
        self.positions = pad_rows(inner.positions, rows)
        self.complete = inner.complete

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `PackedAttention.attend`."""
        n = self.count
        return pad_rows(self.inner.attend(layer, q[:, :n], k[:, :n], v[:, :n], scores), self.rows)


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """[n, ...] -> [rows, ...], with zeros."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def gathered_children(specs: Sequence[ParamSpec]) -> tuple[str, ...]:
    """The children of a layer that begin with an all-gather: those with divided weights.

    Empty where the family cannot do it: where such a child also has undivided weights that would see all tokens on
    every rank, or where its output is not a sum over ranks."""
    children: dict[str, list[ParamSpec]] = {}
    for spec in specs:
        if spec.stage == "layer":
            number = f".{spec.layer}." if spec.layer >= 0 else "{}."
            children.setdefault(spec.name.partition(number)[2].partition(".")[0], []).append(spec)
    divided = tuple(name for name, child_specs in children.items() if any(s.split is not None for s in child_specs))
    for name in divided:
        child_specs = children[name]
        row_parallel = {s.name.rpartition(".")[0] for s in child_specs if s.style == "rowwise"}
        allowed = (s.split is not None or s.partial_grad or s.name.rpartition(".")[0] in row_parallel
                   for s in child_specs)
        if not row_parallel or not all(allowed):
            return ()
    return divided
