"""Low-rank adapters (LoRA) on the linear layers of a stage (Hu et al. 2021, arXiv:2106.09685).

In: this rank's pieces of the factors A [r, in] and B [out, r]. Out: what they add to their module's output, and their
initial values: those of a PEFT directory, or A drawn as PEFT draws it (uniform, He et al. 2015 with a = sqrt 5, so
within 1 / sqrt(in)) and B zero.
Invariant: a drawn element depends only on seed, name and index, so every layout begins with the same values.
Errors: RL0727 the directory lacks a factor, or has weights that the model does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F

from rldsl.backends.torch.model.load_weights import HeldPieces, WeightReads, copy_pieces, load, open_file, tensor_slice
from rldsl.diag import fail
from rldsl.plan.adapter_names import WEIGHTS, A, module_of, stored_name
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.plan.model import Model
from rldsl.runtime.draws import uniform
from rldsl.sharding.boxes import Piece, expand_specs, local_slice


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """x [..., in] -> scale * B A x [..., out], from local pieces."""

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r]
    scale: float     # alpha / r

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.a), self.b) * self.scale


def lora_adapters(model: Model, parameters: Mapping[str, torch.Tensor]) -> dict[str, LoraAdapter]:
    """Module name -> adapter, of the modules whose factors are among `parameters`."""
    if model.lora is None:
        return {}
    factors: dict[str, list[torch.Tensor]] = {}
    for name, tensor in parameters.items():  # A comes before B
        if module := module_of(name):
            factors.setdefault(module, []).append(tensor)
    return {module: LoraAdapter(a, b, model.lora.alpha / model.lora.r) for module, (a, b) in factors.items()}


@torch.no_grad()
def init_lora(model: Model, held: HeldPieces, tensors: Mapping[str, torch.Tensor],
              reads: WeightReads | None = None) -> None:
    """Fill the factors, and the head if the model has its own. tensors: parameter name -> local tensor."""
    if model.lora is None:
        raise ValueError(f"{model.name} has no adapters")
    reads = reads if reads is not None else WeightReads()
    if model.lora.path:
        _read_adapter(Path(model.lora.path) / WEIGHTS, model, held, tensors, reads)
        return
    load(model, {name: held[name] for name in held if name == SCORE_WEIGHT}, tensors, reads)
    for name, (parameter, pieces) in held.items():
        if name.endswith(A):
            for piece in pieces:
                target = tensors[name][local_slice(piece, piece.box, parameter.dim)]
                target.copy_(_draw(model.lora.seed, name, piece, parameter.spec.shape[1]))
        elif module_of(name):
            tensors[name].zero_()


def _draw(seed: int, name: str, piece: Piece, inputs: int) -> torch.Tensor:
    """The initial elements of one box of A."""
    (top, bottom), (left, right) = piece.box
    rows = torch.arange(top, bottom)[:, None].expand(-1, right - left)
    columns = torch.arange(left, right).expand(bottom - top, -1)
    key = int.from_bytes(sha256(name.encode()).digest()[:7])
    drawn: torch.Tensor = (2 * uniform(seed, key, rows, columns) - 1) / inputs**0.5
    return drawn


def _read_adapter(file: Path, model: Model, held: HeldPieces, tensors: Mapping[str, torch.Tensor],
                  reads: WeightReads) -> None:
    with open_file(file) as reader:
        known = set(reader.keys())
        if unused := known - {stored_name(p.name) for p in expand_specs(model.params, model.layers)}:
            raise fail("RL0727", f"the model has no parameter for the adapter tensor {min(unused)}", place=str(file),
                       notes=(f"{len(unused)} tensors of the file would be ignored",),
                       help="the adapter has biases, embeddings or a head besides the LoRA factors, or belongs to "
                            "another model")
        for name, (parameter, pieces) in held.items():
            if name == SCORE_WEIGHT and stored_name(name) not in known:  # an adapter of another task
                load(model, {name: held[name]}, tensors, reads)
                continue
            if stored_name(name) not in known:
                raise fail("RL0727", f"{name} is missing from the adapter", place=str(file),
                           help="the adapter belongs to another base model, or adapter_config.json to another adapter")
            source = tensor_slice(reader, stored_name(name), file)
            if tuple(source.get_shape()) != parameter.spec.shape:
                raise fail("RL0723", f"{name} of the adapter has shape {tuple(source.get_shape())}, and "
                                     f"{parameter.spec.shape} on the base model", place=str(file),
                           help=f"the adapter was written again since the program was compiled, for another model than "
                                f'"{model.path}"; compile the program again')
            copy_pieces(tensors[name], parameter, pieces, source, file, reads)
