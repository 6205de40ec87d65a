"""Low-rank adapters on the linear layers of a stage (Hu et al. 2021, arXiv:2106.09685).

In: this rank's pieces of the factors A [r, in] and B [out, r]. Out: what they add to their module's output, and their
first values: those of a PEFT directory, or A drawn as PEFT draws it (uniform, He et al. 2015 with a = sqrt 5, so within
1 / sqrt(in)) and B zero. A drawn element depends on seed, name and place alone, so every layout begins alike.
Errors: RL0727 the directory lacks a factor, or has weights that the model has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from rldsl.backends.torch.model.load_weights import Held, fill, load, open_file, stored

from rldsl.diag import fail
from rldsl.plan.adapter_names import HEAD, WEIGHTS, A, module_of, stored_name
from rldsl.plan.model import Model
from rldsl.runtime.draws import uniform
from rldsl.sharding.boxes import Piece, expand_specs, local_slice


@dataclass(frozen=True, slots=True)
class Adapter:
    """x [..., in] -> scale * B A x [..., out], from local pieces."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.a), self.b) * self.scale


def adapters(model: Model, parameters: Mapping[str, torch.Tensor]) -> dict[str, Adapter]:
    """Those of the modules whose factors are among `parameters`, by the module's name."""
    if model.lora is None:
        return {}
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in parameters.items():  # A stands before B
        if module := module_of(name):
            found.setdefault(module, []).append(tensor)
    return {module: Adapter(a, b, model.lora.alpha / model.lora.r) for module, (a, b) in found.items()}


@torch.no_grad()
def begin(model: Model, held: Held, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill the factors, and the head where the model has one of its own."""
    assert model.lora is not None
    if model.lora.path:
        _read(Path(model.lora.path) / WEIGHTS, model, held, tensors)
        return
    load(model, {name: held[name] for name in held if name == HEAD}, tensors)
    for name, (parameter, pieces) in held.items():
        if name.endswith(A):
            for piece in pieces:
                target = tensors[name][local_slice(piece, piece.box, parameter.dim)]
                target.copy_(_drawn(model.lora.seed, name, piece, parameter.spec.shape[1]))
        elif module_of(name):
            tensors[name].zero_()


def _drawn(seed: int, name: str, piece: Piece, inputs: int) -> torch.Tensor:
    """The elements of one box of A."""
    (top, bottom), (left, right) = piece.box
    rows = torch.arange(top, bottom)[:, None].expand(-1, right - left)
    columns = torch.arange(left, right).expand(bottom - top, -1)
    key = int.from_bytes(sha256(name.encode()).digest()[:7])
    return (2 * uniform(seed, key, rows, columns) - 1) / inputs**0.5


def _read(file: Path, model: Model, held: Held, tensors: Mapping[str, torch.Tensor]) -> None:
    with open_file(file) as reader:
        known = set(reader.keys())
        if unused := known - {stored_name(p.name) for p in expand_specs(model.params, model.layers)}:
            raise fail("RL0727", f"{min(unused)} of the adapter is not in the model", place=str(file),
                       notes=(f"{len(unused)} tensors of the file would be left out",),
                       help="it has biases, embeddings or a head besides LoRA's factors, or belongs to another model")
        for name, (parameter, pieces) in held.items():
            if name == HEAD and stored_name(name) not in known:  # an adapter of another task
                load(model, {name: held[name]}, tensors)
                continue
            if stored_name(name) not in known:
                raise fail("RL0727", f"{name} is not in the adapter", place=str(file),
                           help="it belongs to another base model, or adapter_config.json to another adapter")
            fill(tensors[name], parameter, pieces, stored(reader, stored_name(name), file), file)
