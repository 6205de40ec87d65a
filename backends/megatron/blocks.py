"""Memory that HuggingFace's parameters and Megatron's share, laid out by the tables of `names.py`.

In: which boxes this rank holds of each parameter, and the modules that compute. Out: `Block`s. A block is one tensor:
the rows of some HuggingFace parameters, one after the other, and at the same time the tensors that modules of GPTModel
compute with. Both are views, so that whoever writes into one changes the other, and gradients of both lie in the
optimizer's one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from rldsl.backends.megatron.names import LAYER, Table
from rldsl.backends.torch.model.load_weights import Held
from torch import nn

from rldsl.runtime.backend import WeightCache
from rldsl.sharding.boxes import Parameter, local_shape


@dataclass(frozen=True, slots=True)
class Seat:
    """One of a block's tensors in a module of GPTModel. at: which slice of dimension 0; None for all of it."""

    module: nn.Module
    attribute: str
    at: int | None


class Block:
    """parts: HuggingFace name -> parameter, in order of rows. seen: what modules compute with; the parameter itself
    where the block has one part alone and one module sees all of it."""

    def __init__(self, memory: torch.Tensor, rows: Mapping[str, int], seats: Sequence[Seat]):
        self.rows, self.seats = rows, seats
        self.memory = memory
        self.parts = {name: nn.Parameter(view, requires_grad=False) for name, view in self._views(memory)}
        self.seen: list[nn.Parameter] = []
        for seat in seats:
            own = len(rows) == 1 and seat.at is None
            made = next(iter(self.parts.values())) if own else nn.Parameter(_slice(memory, seat), requires_grad=False)
            self.seen.append(made)
            setattr(seat.module, seat.attribute, made)

    def put(self, memory: torch.Tensor) -> None:
        """Lie elsewhere from now on, with the values that are there."""
        self.memory = memory
        for name, view in self._views(memory):
            self.parts[name].data = view
        for seat, parameter in self.apart():
            parameter.data = _slice(memory, seat)

    def follow(self) -> None:
        """Gradients of what modules see are the same memory as those of the parts, which stand one after the other in
        one buffer. Kernels that add to a gradient themselves look for it as `main_grad`, and give autograd none."""
        first = next(iter(self.parts.values())).grad
        assert first is not None
        whole = first.as_strided(self.memory.shape, self.memory.stride())
        for seat, parameter in self.apart():
            parameter.requires_grad_(True)
            parameter.grad = _slice(whole, seat)
        for parameter in self.seen:
            parameter.main_grad = parameter.grad

    def forget(self) -> None:
        """Without gradients."""
        for _, parameter in self.apart():
            parameter.grad = None
        for parameter in self.seen:
            parameter.main_grad = None

    def _views(self, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        return zip(self.rows, memory.split([*self.rows.values()]))

    def apart(self) -> Iterator[tuple[Seat, nn.Parameter]]:
        """What modules see that is no parameter of HuggingFace's."""
        own = list(self.parts.values())
        return ((seat, p) for seat, p in zip(self.seats, self.seen) if p is not own[0])


def _slice(memory: torch.Tensor, seat: Seat) -> torch.Tensor:
    return memory if seat.at is None else memory[seat.at]


def blocks(table: Table, held: Held, path: str, dtype: Callable[[Parameter], torch.dtype], device: torch.device,
           weight_cache: WeightCache | None, seats: Callable[[str, int | None], Sequence[Seat]]) -> tuple[list[Block], set[str]]:
    """The blocks of what a rank holds, and the names of the parameters whose values are still to be read. seats(name,
    layer): where a table's tensor stands on this rank. pool: as in `torch.load.allot`."""
    found: list[Block] = []
    unread: set[str] = set()
    for names, (key, layer) in _groups(table, held).items():
        shapes = [local_shape(held[name][0], held[name][1]) for name in names]
        whole = (sum(s[0] for s in shapes), *shapes[0][1:])
        kind = dtype(held[names[0]][0])
        where: Hashable = (path, "megatron", names, str(kind), tuple(p.box for n in names for p in held[n][1]))
        memory = weight_cache.get(where) if weight_cache is not None else None
        if memory is None:
            memory = torch.empty(whole, dtype=kind, device=device)
            unread.update(names)
            if weight_cache is not None:
                weight_cache[where] = memory
        found.append(Block(memory, {n: s[0] for n, s in zip(names, shapes)}, seats(key, layer) if key else ()))
    return found, unread


def _groups(table: Table, held: Held) -> dict[tuple[str, ...], tuple[str, int | None]]:
    """Names of parameters that lie together -> the table's tensor and the layer. What has no place in GPTModel, a value
    head, lies alone."""
    home = {part: key for key, parts in table.items() for part in parts}
    found: dict[tuple[str, ...], tuple[str, int | None]] = {}
    for name, (parameter, _) in held.items():
        key = home.get(parameter.spec.name, "")
        parts = [p for p in table.get(key, (parameter.spec.name,)) if _at(p, parameter.layer) in held]
        found[tuple(_at(p, parameter.layer) for p in parts)] = (key, parameter.layer)
    return found


def _at(name: str, layer: int | None) -> str:
    return name if layer is None else name.replace(LAYER, str(layer), 1)
