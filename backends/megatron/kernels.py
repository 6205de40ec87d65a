"""Which kernels GPTModel is built with: those of Transformer Engine, Apex and flash-attn, where these can be used.

In: which packages there are, and what a stage computes on and in. Out: `Kernels`, which layer spec and config follow
(`model.py`, `engine.py`). Nothing of it is needed: what is missing, breaks or is of another version is left out.

All of them are for half precision alone. Transformer Engine multiplies float32 in TF32, which is no rounding of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from rldsl.backends.torch.kernels.optional_packages import FLASH, Package, Wanted, flash, look

ENGINE = Wanted(
    "Transformer Engine", ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8"),
    first=(2, 9), end=(2, 12), asked="megatron-core 0.16")  # its extra `dev`
APEX = Wanted("Apex", ("apex", "fused_weight_gradient_mlp_cuda"))  # the one extension of it that is taken
WANTED = (ENGINE, APEX, FLASH)
Found = Mapping[Wanted, Package]


@dataclass(frozen=True, slots=True)
class Kernels:
    """By title of the package; "" is the plain kernel.

    linear: linear layers, and the products of experts, all of a rank's in one. gradients: what adds the gradient of a
    matrix to the optimizer's buffer as it multiplies; plainly autograd adds a tensor. attention: over packed
    sequences, by the packings of the torch backend."""

    linear: str = ""
    gradients: str = ""
    attention: str = ""


def chosen(found: Found, device: str, half: bool, buffered: bool, biases: bool) -> Kernels:
    """buffered: gradients lie in one buffer from the start, and are not divided over dp as they come (`zero=1`).
    biases: whether layers have any."""
    if device != "cuda" or not half:
        return Kernels()
    engine, apex, attention = (wanted.title if found[wanted].usable else "" for wanted in WANTED)
    # Apex's extension reads an input and a gradient of one dtype, and a float32 bias makes one of them float32
    return Kernels(engine, (engine or ("" if biases else apex)) if buffered else "", attention)


@cache
def found(device: str) -> Found:
    """Nothing is imported but for CUDA: Transformer Engine fails elsewhere."""
    if device != "cuda":
        return {wanted: Package(wanted.title) for wanted in WANTED}
    return {ENGINE: look(ENGINE), APEX: look(APEX), FLASH: flash()}


def here(device: str, *, half: bool, buffered: bool, biases: bool) -> Kernels:
    """Those of this machine; see `chosen`."""
    return chosen(found(device), device, half, buffered, biases)


def hide(found: Found) -> None:
    """What cannot be used is not there for megatron-core either, which looks for it by itself and catches ImportError
    alone. Before megatron-core is imported."""
    for wanted, package in found.items():
        root = wanted.modules[0]
        if package.problem:  # a part of it may have been imported
            for name in [m for m in sys.modules if m.partition(".")[0] == root]:
                del sys.modules[name]
        if not package.usable:
            sys.modules.setdefault(root, None)  # type: ignore[arg-type]


def notes(kernels: Kernels, found: Found) -> Iterator[str]:
    """A line for what is taken, and one for each package that is there and cannot be used."""
    uses: dict[str, list[str]] = {}
    for title, what in ((kernels.linear, "linear layers"), (kernels.gradients, "gradients of matrices"),
                        (kernels.attention, "attention")):
        if title:
            uses.setdefault(title, []).append(what)
    packages = {package.title: package for package in found.values()}
    if uses:
        parts = (f"{title} {packages[title].version} ({', '.join(what)})" for title, what in uses.items())
        yield f"note: megatron-core computes with {', '.join(parts)}"
    for package in packages.values():
        if package.problem:
            name = f"{package.title} {package.version}".rstrip()
            yield f"note: {name} is not used, plain kernels are: {package.problem}"


@cache
def tell(line: str) -> None:
    """Once a process."""
    print(line, file=sys.stderr, flush=True)
