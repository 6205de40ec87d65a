"""Memory that HuggingFace's parameters and Megatron's share, laid out by the tables of `names.py`.

In: the boxes that this rank holds of each parameter, and the modules that compute. Out: `Block`s.

A block is one tensor. It is the rows of some HuggingFace parameters, one after another, and at the same time the
tensors that modules of GPTModel compute with. Both are views, so that writing into one changes the other, and the
gradients of both are in the optimizer's one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rldsl.backends.megatron.names import LAYER, Table
from rldsl.backends.torch.model.load_weights import HeldPieces
from rldsl.runtime.backend import WeightCache
from rldsl.sharding.boxes import Parameter, local_shape


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A parameter of a module of GPTModel that is part of a block."""

    module: nn.Module  # a module of GPTModel
    attribute: str     # the name of the parameter in it
    index: int | None  # which slice of the block's dimension 0 (an expert); None: all of it


class Block:
    """One tensor, its views as HuggingFace parameters, and its views as modules' parameters."""

    memory: torch.Tensor                    # the tensor
    rows: Mapping[str, int]                 # HuggingFace name -> its rows in `memory`, in order
    hf_parameters: dict[str, nn.Parameter]  # HuggingFace name -> view
    module_parameters: list[nn.Parameter]   # one for each target

    def __init__(self, memory: torch.Tensor, rows: Mapping[str, int], targets: Sequence[ModuleTensor]):
        self.rows, self.targets = rows, targets
        self.memory = memory
        self.hf_parameters = {name: nn.Parameter(view, requires_grad=False) for name, view in self._rows_of(memory)}
        self.module_parameters = []
        for target in targets:
            if len(rows) == 1 and target.index is None:  # the module's parameter is the HuggingFace one
                parameter = next(iter(self.hf_parameters.values()))
            else:
                parameter = nn.Parameter(_slice(memory, target), requires_grad=False)
            self.module_parameters.append(parameter)
            setattr(target.module, target.attribute, parameter)

    def set_memory(self, memory: torch.Tensor) -> None:
        """Use other memory from now on, with the values that are in it."""
        self.memory = memory
        for name, view in self._rows_of(memory):
            self.hf_parameters[name].data = view
        for target, parameter in self.separate_parameters():
            parameter.data = _slice(memory, target)

    def attach_grads(self) -> None:
        """Give the modules' parameters gradients in the same memory as those of the HuggingFace parameters, which are
        one after another in one buffer. Kernels that add to a gradient themselves find it as `main_grad`, and give
        autograd none."""
        first = next(iter(self.hf_parameters.values())).grad
        if first is None:
            raise RuntimeError("the gradient buffer is not allocated")
        grad = first.as_strided(self.memory.shape, self.memory.stride())
        for target, parameter in self.separate_parameters():
            parameter.requires_grad_(True)
            parameter.grad = _slice(grad, target)
        for parameter in self.module_parameters:
            _set_main_grad(parameter, parameter.grad)

    def detach_grads(self) -> None:
        """Leave the modules' parameters without gradients."""
        for _, parameter in self.separate_parameters():
            parameter.grad = None
        for parameter in self.module_parameters:
            _set_main_grad(parameter, None)

    def separate_parameters(self) -> Iterator[tuple[ModuleTensor, nn.Parameter]]:
        """The modules' parameters that are not the HuggingFace parameter itself."""
        first = next(iter(self.hf_parameters.values()))
        return ((target, p) for target, p in zip(self.targets, self.module_parameters, strict=True) if p is not first)

    def _rows_of(self, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        return zip(self.rows, memory.split([*self.rows.values()]), strict=True)


def _slice(memory: torch.Tensor, target: ModuleTensor) -> torch.Tensor:
    return memory if target.index is None else memory[target.index]


def _set_main_grad(parameter: Any, grad: torch.Tensor | None) -> None:
    """The attribute is Megatron's own, not torch's."""
    parameter.main_grad = grad


def build_blocks(table: Table, held: HeldPieces, path: str, dtype: Callable[[Parameter], torch.dtype],
                 device: torch.device, weight_cache: WeightCache | None,
                 targets: Callable[[str, int | None], Sequence[ModuleTensor]]) -> tuple[list[Block], set[str]]:
    """The blocks of what a rank holds, and the names of the parameters whose values are still to be read.

    targets(name, layer): the modules' parameters on this rank for a tensor of the table.
    weight_cache: as in `load_weights.allocate_parameters`."""
    blocks: list[Block] = []
    to_load: set[str] = set()
    for names, (key, layer) in _group_names(table, held).items():
        shapes = [local_shape(held[name][0], held[name][1]) for name in names]
        shape = (sum(s[0] for s in shapes), *shapes[0][1:])
        block_dtype = dtype(held[names[0]][0])
        boxes = tuple(piece.box for name in names for piece in held[name][1])
        cache_key: Hashable = (path, "megatron", names, str(block_dtype), boxes)
        memory = weight_cache.get(cache_key) if weight_cache is not None else None
        if memory is None:
            memory = torch.empty(shape, dtype=block_dtype, device=device)
            to_load.update(names)
            if weight_cache is not None:
                weight_cache[cache_key] = memory
        rows = {n: s[0] for n, s in zip(names, shapes, strict=True)}
        blocks.append(Block(memory, rows, targets(key, layer) if key else ()))
    return blocks, to_load


def _group_names(table: Table, held: HeldPieces) -> dict[tuple[str, ...], tuple[str, int | None]]:
    """Names of the parameters of one block -> the table's tensor, and the layer. What GPTModel does not have, a value
    head, is a separate block."""
    key_of = {part: key for key, parts in table.items() for part in parts}
    groups: dict[tuple[str, ...], tuple[str, int | None]] = {}
    for parameter, _ in held.values():
        key = key_of.get(parameter.spec.name, "")
        parts = [p for p in table.get(key, (parameter.spec.name,)) if _in_layer(p, parameter.layer) in held]
        groups[tuple(_in_layer(p, parameter.layer) for p in parts)] = (key, parameter.layer)
    return groups


def _in_layer(name: str, layer: int | None) -> str:
    return name if layer is None else name.replace(LAYER, str(layer), 1)
