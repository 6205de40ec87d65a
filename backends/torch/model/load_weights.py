"""A HuggingFace directory: its config, and this rank's slices of its weights; nothing else is read.

In: a model, and the pieces that this rank holds. Out: the config object; local tensors, filled in place.
Errors: RL0721 a file is missing, damaged or has no floating-point numbers, RL0722 a parameter is missing, RL0723 it
has another shape, RL0724 the config is not the one that was compiled, RL0726 there is no config,
RL0729 a weight is not finite.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig

from rldsl.diag import fail
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.plan.model import Model
from rldsl.runtime.backend import WeightCache, WeightDigest
from rldsl.sharding.boxes import Parameter, Piece, intersect, local_shape, local_slice, slices, slices_within
from rldsl.sharding.stored_tensors import (
    divided_names,
    is_divided,
    is_packed,
    of_experts,
    packed_tensors,
    shape,
    stored_tensors,
)

FLOATS = ("F64", "F32", "F16", "BF16")  # smaller ones need scales, which are other tensors
MX_BLOCK = 32  # MXFP4 numbers with one scale
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # of 4 bits: E2M1
HeldPieces = Mapping[str, tuple[Parameter, tuple[Piece, ...]]]  # parameter name -> its record, and this rank's pieces


def load_config(model: Model) -> Any:
    """The HuggingFace config that the model was compiled with."""
    file = Path(model.path) / "config.json"
    if not file.is_file():
        raise fail("RL0726", "no model directory here", place=model.path, label="config.json is missing",
                   help="it must be at the same path as at compile time, relative to the working directory")
    if sha256(file.read_bytes()).hexdigest() != model.config_digest:
        raise fail("RL0724", "the config of the model changed since compilation", place=str(file),
                   help="compile the program again")
    return AutoConfig.from_pretrained(model.path, trust_remote_code=False, local_files_only=True)


@dataclass
class WeightReads:
    """What a shard has read of weight files: which slices, and digests of their contents (computed while reading)."""

    # (file, whether whole tensors: more ranks read these) -> digest of the names and boxes of what was read, and of
    # its bytes
    files: dict[tuple[Path, bool], tuple[Any, Any]] = field(default_factory=dict)

    def take(self, file: Path, tensor: str, box: str, part: torch.Tensor, whole: bool) -> None:
        """A slice was read. whole: it is the whole tensor. RL0729: it holds a number that is not finite."""
        if not bool(torch.isfinite(part).all()):
            kind = "NaN" if bool(torch.isnan(part).any()) else "an infinite number"
            raise fail("RL0729", f"the weights contain {kind}: {tensor}", place=str(file),
                       help="the model was damaged or diverged when it was saved: use another checkpoint of it")
        names, contents = self.files.setdefault((file, whole), (sha256(), sha256()))
        names.update(f"{tensor}[{box}]\0".encode())
        contents.update(part.contiguous().view(-1).view(torch.uint8).numpy())

    def digests(self) -> Iterator[WeightDigest]:
        """One for each file, and one for its header, which all ranks that open it read."""
        for (file, _), (names, contents) in self.files.items():
            yield WeightDigest(str(file), "a slice of the weights", contents.digest(), names.digest())
        for file in dict.fromkeys(file for file, _ in self.files):
            yield WeightDigest(str(file), "the header of the weights", _header(file))


def _header(file: Path) -> bytes:
    """Size and header of a safetensors file, which safetensors has checked."""
    with file.open("rb") as opened:
        length = opened.read(8)
        return file.stat().st_size.to_bytes(8, "little") + opened.read(int.from_bytes(length, "little"))


@torch.no_grad()
def load(model: Model, held: HeldPieces, tensors: Mapping[str, torch.Tensor], reads: WeightReads | None = None) -> None:
    """Fill `tensors` (parameter name -> local tensor) from the directory `model.path`. reads: notes what was read."""
    if not held:
        return
    reads = reads if reads is not None else WeightReads()
    where = weight_files(model.path)
    with ExitStack() as stack:
        open_files: dict[Path, safe_open] = {}
        for name, (parameter, pieces) in held.items():
            key = _stored_name(name, where)
            if key is None and is_packed(parameter):
                _load_packed(tensors[name], parameter, pieces, where, open_files, stack, reads)
                continue
            if key is None and parameter.spec.stored:
                _load_from_parts(tensors[name], parameter, pieces, where, open_files, stack, reads)
                continue
            if key is None:
                if name == SCORE_WEIGHT and (model.optimizer is not None or not model.head.needs_trained_head):
                    tensors[name].zero_()  # a new head starts at zero
                    continue
                raise fail("RL0722", f"parameter {name} is missing from the checkpoint", place=model.path,
                           help="the weights do not belong to this config.json")
            reader, file = _reader(where[key], open_files, stack), where[key]
            copy_pieces(tensors[name], parameter, pieces, tensor_slice(reader, key, file), file, reads)


def _reader(file: Path, open_files: dict[Path, safe_open], stack: ExitStack) -> safe_open:
    if file not in open_files:
        open_files[file] = stack.enter_context(open_file(file))
    return open_files[file]


def _load_from_parts(target: torch.Tensor, parameter: Parameter, pieces: Sequence[Piece], where: Mapping[str, Path],
                     open_files: dict[Path, safe_open], stack: ExitStack, reads: WeightReads) -> None:
    """Fill the pieces of a parameter that a file stores as several tensors (experts, say). Only those that overlap a
    piece are read."""
    single = of_experts(parameter)
    rows = _rows(parameter, where, open_files, stack) if is_divided(parameter) else {}
    for name, box in stored_tensors(parameter, rows):
        common = [(piece, both) for piece in pieces if (both := intersect(piece.box, box)) is not None]
        if not common:
            continue
        source, key, file = _tensor(name, where, open_files, stack)
        _check_tensor(name, shape(single, box), source, file)
        for piece, both in common:
            part = source[slices_within(both, box)[int(single):]]
            reads.take(file, key, str(both), part, both == box)
            target[local_slice(piece, both, parameter.dim)].copy_(part[None] if single else part)


def _rows(parameter: Parameter, where: Mapping[str, Path], open_files: dict[Path, safe_open], stack: ExitStack
          ) -> dict[str, int]:
    """Rows of the tensors that a matrix is divided into, which only the files know. RL0723: they are not those of the
    matrix."""
    found = {name: _tensor(name, where, open_files, stack)[0].get_shape() for name in divided_names(parameter)}
    if any(len(size) != len(parameter.spec.shape) for size in found.values()) or \
            sum(size[0] for size in found.values()) != parameter.spec.shape[0]:
        shapes = ", ".join(str(tuple(size)) for size in found.values())
        raise fail("RL0723", f"{', '.join(found)} have the shapes {shapes}, but together they must have "
                   f"{parameter.spec.shape}", place=str(next(iter(where.values())).parent),
                   help="weights and config do not match")
    return {name: size[0] for name, size in found.items()}


def _tensor(name: str, where: Mapping[str, Path], open_files: dict[Path, safe_open], stack: ExitStack
            ) -> tuple[Any, str, Path]:
    """(slice of a tensor, its name there, its file). RL0722: there is none of this name."""
    key = _stored_name(name, where)
    if key is None:
        raise fail("RL0722", f"parameter {name} is missing from the checkpoint",
                   place=str(next(iter(where.values())).parent), help="the weights do not belong to this config.json")
    return tensor_slice(_reader(where[key], open_files, stack), key, where[key]), key, where[key]


def _load_packed(target: torch.Tensor, parameter: Parameter, pieces: Sequence[Piece], where: Mapping[str, Path],
                 open_files: dict[Path, safe_open], stack: ExitStack, reads: WeightReads) -> None:
    """Fill the pieces of a parameter [E, inputs, outputs] that a file stores as MXFP4, one expert after another: blocks
    [E, outputs, inputs / 32, 16] of two 4-bit numbers each, and the exponent of each block."""
    experts, inputs, outputs = parameter.spec.shape
    blocks, scales = (_tensor(name, where, open_files, stack) for name in packed_tensors(parameter))
    groups = -(-inputs // MX_BLOCK)
    _check_tensor(blocks[1], (experts, outputs, groups, MX_BLOCK // 2), blocks[0], blocks[2], ("U8",))
    _check_tensor(scales[1], (experts, outputs, groups), scales[0], scales[2], ("U8",))
    for expert in range(experts):
        common = [(piece, both) for piece in pieces
                  if (both := intersect(piece.box, ((expert, expert + 1), (0, inputs), (0, outputs)))) is not None]
        if not common:
            continue
        parts = []
        for source, key, file in (blocks, scales):
            parts.append(source[expert : expert + 1])
            reads.take(file, key, str(expert), parts[-1], False)
        whole = unpacked(*parts)[0].T[None, :inputs]
        if not bool(torch.isfinite(whole).all()):
            raise fail("RL0729", f"the weights contain an infinite number: {blocks[1]}", place=str(blocks[2]),
                       help="the model was damaged when it was saved: use another checkpoint of it")
        for piece, both in common:
            inside = slices_within(both, ((expert, expert + 1), (0, inputs), (0, outputs)))
            target[local_slice(piece, both, parameter.dim)].copy_(whole[inside])


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 numbers in float32, which bfloat16 holds exactly, too: [..., G, 16] bytes, whose low half comes first, and
    [..., G] exponents, 127 of which is 1 -> [..., G * 32]. Source: OCP Microscaling Formats specification 1.0, sections
    5.3.3 and 5.4."""
    halves = torch.stack([blocks & 0x0F, blocks >> 4], -1).flatten(-2)
    return torch.ldexp(torch.tensor(FP4, device=blocks.device)[halves.int()], scales[..., None].int() - 127).flatten(-2)


def copy_pieces(target: torch.Tensor, parameter: Parameter, pieces: Sequence[Piece], source: Any, file: Path,
                reads: WeightReads) -> None:
    """Fill the pieces of a parameter from its tensor in a file. source: see `tensor_slice`."""
    _check_tensor(parameter.name, parameter.spec.shape, source, file)
    for piece in pieces:
        part = source[slices(piece.box)]
        reads.take(file, parameter.name, str(piece.box), part, tuple(part.shape) == parameter.spec.shape)
        target[local_slice(piece, piece.box, parameter.dim)].copy_(part)


def _check_tensor(name: str, shape: tuple[int, ...], source: Any, file: Path, kinds: Sequence[str] = FLOATS) -> None:
    if source.get_dtype() not in kinds:
        raise fail("RL0721", f"{name} has the type {source.get_dtype()}", place=str(file),
                   help=f"supported types are {', '.join(kinds)}; save the model unquantized")
    if tuple(source.get_shape()) != shape:
        raise fail("RL0723", f"{name} has shape {tuple(source.get_shape())}, but the config requires {shape}",
                   place=str(file),
                   help="weights and config do not match")


def allocate_parameters(path: str, held: HeldPieces, dtype: torch.dtype, device: torch.device,
                        weight_cache: WeightCache | None) -> tuple[dict[str, nn.Parameter], HeldPieces]:
    """Local tensors, and which of them must still be read.

    dtype: of those that are not float32 everywhere (`sharding/dtypes.py`).
    weight_cache: where read-only tensors are shared with the shards that hold the same slices of the same directory.
        None: all tensors are this shard's own."""
    tensors: dict[str, nn.Parameter] = {}
    to_load: dict[str, tuple[Parameter, tuple[Piece, ...]]] = {}
    for name, (parameter, pieces) in held.items():
        own_dtype = torch.float32 if parameter.spec.float32 else dtype
        key = (path, name, str(own_dtype), tuple(p.box for p in pieces))
        tensor = weight_cache.get(key) if weight_cache is not None else None
        if tensor is None:
            shape = local_shape(parameter, pieces) if pieces else (0, *parameter.spec.shape[1:])
            tensor = torch.empty(shape, device=device, dtype=own_dtype)
            to_load[name] = (parameter, pieces)
            if weight_cache is not None:
                weight_cache[key] = tensor
        tensors[name] = nn.Parameter(tensor, requires_grad=False)
    return tensors, to_load


def tensor_slice(reader: safe_open, key: str, file: Path) -> Any:
    """A tensor of a file; indexing it reads only that part."""
    try:
        return reader.get_slice(key)
    except SafetensorError:
        raise fail("RL0722", f"parameter {key} is not in the file given by the index", place=str(file),
                   help="copy the whole directory again") from None


def open_file(file: Path) -> safe_open:
    """safetensors checks the header against the file's size, and maps the rest into memory."""
    try:
        if file.exists() and not file.is_file():
            raise OSError("not a regular file")
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise fail("RL0721", f"cannot read the weights: {error}", place=str(file),
                   help="the file is missing or corrupted; copy it again") from None


def weight_files(path: str) -> dict[str, Path]:
    """Tensor name -> file, of a model directory."""
    directory = Path(path)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"].items()
            if outside := next((file for _, file in weight_map if Path(file).name != file), None):
                raise ValueError(f"{outside!r} is not in this directory")
            return {name: directory / file for name, file in weight_map}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise fail("RL0721", f"cannot read the index of the weights: {error}", place=str(index),
                       help="the file is corrupted; copy it again") from None
    return dict(_names_in_files(directory))


def _names_in_files(directory: Path) -> Iterator[tuple[str, Path]]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise fail("RL0721", "no weights here", place=str(directory), help="expected *.safetensors files")
    for file in files:
        with open_file(file) as reader:
            names = reader.keys()  # a method of safetensors; the reader itself cannot be iterated
            yield from ((name, file) for name in names)


def _stored_name(name: str, where: Mapping[str, Path]) -> str | None:
    """The name in the file: as it is, or without the base model's prefix (a directory saved from a bare base)."""
    return next((n for n in (name, name.partition(".")[2]) if n in where), None)
