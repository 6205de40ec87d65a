"""The tensors of a model's directory that make up a parameter where there is not one of the same name.

In: a parameter whose spec names them. Out: their names, and the box of the parameter that each one is. Directories of
mixture-of-experts models have a tensor for each expert, without the dimension that counts experts. Others divide a
matrix of a layer into several, one below the other: OLMo Hybrid has a convolution each of queries, keys and values.
Directories of gpt-oss have blocks of 4-bit numbers and a scale for each block (MXFP4); nothing is written in this form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from types import MappingProxyType

from rldsl.plan.model import PACKED
from rldsl.sharding.boxes import Box, Parameter

EXPERT = "{expert}"
UNKNOWN: Mapping[str, int] = MappingProxyType({})


def stored_tensors(parameter: Parameter, rows: Mapping[str, int] = UNKNOWN) -> Iterator[tuple[str, Box]]:
    """(name, box) of each; nothing where the directory has the parameter as it is, or packed. rows: of the tensors that
    a matrix is divided into, by name; where one is not known, all have equally many, as `torch.chunk` divides."""
    spec = parameter.spec
    if is_packed(parameter):
        return
    if is_divided(parameter):
        names, most = divided_names(parameter), -(-spec.shape[0] // len(spec.stored))
        chunks = [max(0, min(most, spec.shape[0] - i * most)) for i in range(len(names))]
        known = [rows[name] for name in names] if all(name in rows for name in names) else chunks
        for name, (start, stop) in zip(names, pairwise(accumulate(known, initial=0)), strict=True):
            yield name, ((start, stop), *((0, n) for n in spec.shape[1:]))
        return
    for i, template in enumerate(spec.stored):
        name = _name(parameter, template)
        if EXPERT not in name:
            yield name, tuple((0, n) for n in spec.shape)
            continue
        width = spec.shape[1] // len(spec.stored)
        for expert in range(spec.shape[0]):
            yield (name.replace(EXPERT, str(expert)),
                   ((expert, expert + 1), (i * width, (i + 1) * width), *((0, n) for n in spec.shape[2:])))


def shape(single: bool, box: Box) -> tuple[int, ...]:
    """Of the tensor that a box is. single: of one expert, which does not count experts."""
    return tuple(stop - start for start, stop in box[int(single):])


def of_experts(parameter: Parameter) -> bool:
    """Whether its stored tensors are of one expert each."""
    return any(EXPERT in template for template in parameter.spec.stored)


def is_divided(parameter: Parameter) -> bool:
    """Whether it is a matrix that the directory divides into several, one below the other."""
    return len(parameter.spec.stored) > 1 and not is_packed(parameter) and not of_experts(parameter)


def divided_names(parameter: Parameter) -> list[str]:
    """The names of the tensors that it is divided into, from above."""
    return [_name(parameter, template) for template in parameter.spec.stored]


def is_packed(parameter: Parameter) -> bool:
    """Whether it is stored as MXFP4."""
    return any(template.endswith(PACKED) for template in parameter.spec.stored)


def packed_tensors(parameter: Parameter) -> tuple[str, str]:
    """The names of the blocks and of the scales of an MXFP4 parameter."""
    blocks, scales = (_name(parameter, template) for template in parameter.spec.stored)
    return blocks, scales


def _name(parameter: Parameter, template: str) -> str:
    return template if parameter.layer is None else template.replace("{}", str(parameter.layer), 1)
