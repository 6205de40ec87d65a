"""Sequence parallelism beside tensor parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

In: the layers of a stage whose weights are divided over tp. Out: the same, with hidden states between their sublayers
divided by tokens: gathered where attention or MLP begin, and where they end, each rank gets its tokens of the sum. That
moves as much as the sums of plain tensor parallelism; norms, residuals and what is kept between layers shrink by tp.

The gather stands before the whole sublayer, since family code takes its shapes from what it is given. At both ends of
a stage hidden states are whole, so embeddings, heads and pipelines know nothing of this. Rows must be a multiple of tp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rldsl.backends.torch.model.attention import Packing
from rldsl.backends.torch.model.collectives import GatherAlike, GatherApart, PartOf, SumApart
from torch import nn

from rldsl.plan.model import ParamSpec
from rldsl.runtime.backend import Axis


class Tokens:
    """Whether passes now divide hidden states by tokens. able: whether they can. Shared by all modules of a stage."""

    def __init__(self, tp: Axis, able: bool):
        self.tp, self.able, self.on = tp, able and tp.size > 1, False

    @contextmanager
    def divided(self) -> Iterator[None]:
        """Inside, where the model is able to."""
        self.on = self.able
        try:
            yield
        finally:
            self.on = False

    def rows(self, count: int) -> int:
        """To how many a row of `count` tokens is filled up."""
        return -(-count // self.tp.size) * self.tp.size if self.able else count

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Parts of a sum [1, T, H] -> the sum of this rank's tokens [1, T / tp, H]."""
        return SumApart.apply(x[0], self.tp)[None]

    def install(self, layers: Sequence[nn.Module], names: Iterable[str]) -> None:
        """names: of the children of a layer that begin with a gather."""
        if not self.able or not layers:
            return
        for layer in layers:
            for name in names:
                self._before(layer.get_submodule(name), GatherApart)
        self._before(layers[0], PartOf)
        layers[-1].register_forward_hook(self._after)

    def _before(self, module: nn.Module, change: type[torch.autograd.Function]) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.on:
                return None
            if args:
                return (change.apply(args[0][0], self.tp)[None], *args[1:]), kwargs
            return args, kwargs | {"hidden_states": change.apply(kwargs["hidden_states"][0], self.tp)[None]}

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def _after(self, _: nn.Module, __: Any, out: Any) -> Any:
        if not self.on:
            return None
        first, *rest = out if isinstance(out, tuple) else (out,)
        whole = GatherAlike.apply(first[0], self.tp)[None]
        return (whole, *rest) if isinstance(out, tuple) else whole


class Filled:
    """A packing whose row is filled up to `rows` tokens with padding: it attends to nothing, nothing attends to it."""

    def __init__(self, packing: Packing, rows: int):
        self.packing, self.rows, self.count = packing, rows, len(packing.positions)
        self.positions = fill(packing.positions, rows)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:
        return fill(self.packing.attend(layer, *(x[:, : self.count] for x in (q, k, v)), scale, window), self.rows)


def fill(x: torch.Tensor, rows: int) -> torch.Tensor:
    """[n, ...] -> [rows, ...], with zeros."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def gathered(specs: Sequence[ParamSpec]) -> tuple[str, ...]:
    """The children of a layer that begin with a gather: those with divided weights. Empty where the family cannot do
    it: where such a child also has weights that are whole, which would see all tokens on every rank, or where the way
    out of it is not a sum."""
    children: dict[str, list[ParamSpec]] = {}
    for spec in specs:
        if "{}." in spec.name:
            children.setdefault(spec.name.partition("{}.")[2].partition(".")[0], []).append(spec)
    found = tuple(name for name, own in children.items() if any(s.split is not None for s in own))
    for name in found:
        own = children[name]
        ways_out = {s.name.rpartition(".")[0] for s in own if s.style == "rowwise"}
        known = (s.split is not None or s.partial or s.name.rpartition(".")[0] in ways_out for s in own)
        if not ways_out or not all(known):
            return ()
    return found
