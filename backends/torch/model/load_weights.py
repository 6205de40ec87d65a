"""A rank's own slices of a HuggingFace checkpoint; nothing else is read.

In: a model, and the pieces that this rank holds. Out: local tensors filled in place.
Errors: RL0721 a file is missing, damaged or has no floating-point numbers, RL0722 a parameter is missing, RL0723 it
has another shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from rldsl.diag import fail
from rldsl.plan.adapter_names import HEAD
from rldsl.plan.model import Model
from rldsl.runtime.backend import WeightCache
from rldsl.sharding.boxes import Parameter, Piece, intersect, local_shape, local_slice, slices, slices_within
from rldsl.sharding.stored_tensors import of_experts, shape, stored_tensors

FLOATS = ("F64", "F32", "F16", "BF16")  # smaller ones need scales, which stand elsewhere
Held = Mapping[str, tuple[Parameter, tuple[Piece, ...]]]


@torch.no_grad()
def load(model: Model, held: Held, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill `tensors` (parameter name -> local tensor) from the directory `model.path`."""
    if not held:
        return
    where = files(model.path)
    with ExitStack() as stack:
        open_files: dict[Path, safe_open] = {}
        for name, (parameter, pieces) in held.items():
            key = _stored_name(name, where)
            if key is None and parameter.spec.stored:
                _join(tensors[name], parameter, pieces, where, open_files, stack)
                continue
            if key is None:
                if name == HEAD and (model.kind == "value_model" or model.optimizer is not None):
                    tensors[name].zero_()  # a new head starts at zero
                    continue
                raise fail("RL0722", f"parameter {name} is not in the checkpoint", place=model.path,
                           help="the weights do not belong to this config.json")
            reader, file = _reader(where[key], open_files, stack), where[key]
            fill(tensors[name], parameter, pieces, stored(reader, key, file), file)


def _reader(file: Path, open_files: dict[Path, safe_open], stack: ExitStack) -> safe_open:
    if file not in open_files:
        open_files[file] = stack.enter_context(open_file(file))
    return open_files[file]


def _join(target: torch.Tensor, parameter: Parameter, pieces: Sequence[Piece], where: Mapping[str, Path],
          open_files: dict[Path, safe_open], stack: ExitStack) -> None:
    """The pieces of a parameter from the tensors that make it up; only those with a part of them are read."""
    single = of_experts(parameter)
    for name, box in stored_tensors(parameter):
        common = [(piece, both) for piece in pieces if (both := intersect(piece.box, box)) is not None]
        if not common:
            continue
        key = _stored_name(name, where)
        if key is None:
            raise fail("RL0722", f"parameter {name} is not in the checkpoint",
                       place=str(next(iter(where.values())).parent),
                       help="the weights do not belong to this config.json")
        file = where[key]
        source = stored(_reader(file, open_files, stack), key, file)
        _check(name, shape(single, box), source, file)
        for piece, both in common:
            part = source[slices_within(both, box)[int(single):]]
            target[local_slice(piece, both, parameter.dim)].copy_(part[None] if single else part)


def fill(target: torch.Tensor, parameter: Parameter, pieces: Sequence[Piece], source: Any, file: Path) -> None:
    """The pieces of a parameter from its slice in a file."""
    _check(parameter.name, parameter.spec.shape, source, file)
    for piece in pieces:
        target[local_slice(piece, piece.box, parameter.dim)].copy_(source[slices(piece.box)])


def _check(name: str, shape: tuple[int, ...], source: Any, file: Path) -> None:
    if source.get_dtype() not in FLOATS:
        raise fail("RL0721", f"{name} is stored as {source.get_dtype()}", place=str(file),
                   help=f"weights are read as {', '.join(FLOATS)}; save the model unquantized")
    if tuple(source.get_shape()) != shape:
        raise fail("RL0723", f"{name} has shape {tuple(source.get_shape())}, the config says {shape}", place=str(file),
                   help="weights and config do not match")


def allot(path: str, held: Held, dtype: torch.dtype, device: torch.device,
          weight_cache: WeightCache | None) -> tuple[dict[str, nn.Parameter], Held]:
    """Local tensors, and which of them must still be read. pool: where tensors that nothing writes are shared with the
    shards that hold the same slices of the same directory; None: all are this shard's own."""
    found: dict[str, nn.Parameter] = {}
    unread: dict[str, tuple[Parameter, tuple[Piece, ...]]] = {}
    for name, (parameter, pieces) in held.items():
        key = (path, name, str(dtype), tuple(p.box for p in pieces))
        tensor = weight_cache.get(key) if weight_cache is not None else None
        if tensor is None:
            shape = local_shape(parameter, pieces) if pieces else (0, *parameter.spec.shape[1:])
            tensor = torch.empty(shape, device=device, dtype=dtype)
            unread[name] = (parameter, pieces)
            if weight_cache is not None:
                weight_cache[key] = tensor
        found[name] = nn.Parameter(tensor, requires_grad=False)
    return found, unread


def stored(reader: safe_open, key: str, file: Path) -> Any:
    """A tensor of a file, of which slices can be read."""
    try:
        return reader.get_slice(key)
    except SafetensorError:
        raise fail("RL0722", f"parameter {key} is not in the file that the index names", place=str(file),
                   help="copy the whole directory again") from None


def open_file(file: Path) -> safe_open:
    """The library holds the header to what the file has, whatever it says, and maps the rest."""
    try:
        if file.exists() and not file.is_file():
            raise OSError("it is no regular file")
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise fail("RL0721", f"cannot read the weights: {error}", place=str(file),
                   help="the file is missing or damaged; copy it again") from None


def files(path: str) -> dict[str, Path]:
    """Tensor name -> file, of a directory."""
    directory = Path(path)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            found = json.loads(index.read_text())["weight_map"].items()
            if far := next((file for _, file in found if Path(file).name != file), None):
                raise ValueError(f"{far!r} is not a file of this directory")
            return {name: directory / file for name, file in found}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise fail("RL0721", f"cannot read the index of the weights: {error}", place=str(index),
                       help="the file is damaged; copy it again") from None
    return dict(_names(directory))


def _names(directory: Path) -> Iterator[tuple[str, Path]]:
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise fail("RL0721", "no weights here", place=str(directory), help="expected *.safetensors files")
    for file in found:
        with open_file(file) as reader:
            yield from ((name, file) for name in reader.keys())


def _stored_name(name: str, where: Mapping[str, Path]) -> str | None:
    """The name in the file: as it is, or without the base model's prefix (a directory saved from a bare base)."""
    return next((n for n in (name, name.partition(".")[2]) if n in where), None)
