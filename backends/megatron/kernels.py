"""Which kernels GPTModel is built with: those of Transformer Engine, Apex and flash-attn, where these can be used.

In: the optional packages that are installed, and the device and dtype of a stage. Out: `Kernels`, which layer spec and
config follow (`model.py`, `te_layers.py`). All are optional: what is missing, fails to import or has another version is
left out.

All of them are for half precision only. Transformer Engine multiplies float32 in TF32, which would change our numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from rldsl.backends.torch.kernels.optional_packages import FLASH_ATTN, Package, PackageSpec, flash_attn, probe

TRANSFORMER_ENGINE = PackageSpec(
    "Transformer Engine", ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8"),
    min_version=(2, 9), max_version=(2, 12), required_by="megatron-core 0.16")  # as its extra `dev`
APEX = PackageSpec("Apex", ("apex", "fused_weight_gradient_mlp_cuda"))  # only this extension of it is used
OPTIONAL_PACKAGES = (TRANSFORMER_ENGINE, APEX, FLASH_ATTN)
Packages = Mapping[PackageSpec, Package]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The package that provides each kernel, by title; "" is the plain kernel."""

    linear: str = ""        # linear layers, and the products of experts, all of a rank's in one
    weight_grads: str = ""  # adds the gradient of a matrix to the optimizer's buffer as it multiplies
    attention: str = ""     # over packed sequences, through the torch backend's `PackedAttention`


def select_kernels(packages: Packages, device: str, half: bool, grads_buffered: bool, biases: bool) -> Kernels:
    """half: whether matrices multiply in half precision. grads_buffered: whether gradients are in one buffer from the
    start, and are not divided over dp as they come (`zero=1`). biases: whether layers have any."""
    if device != "cuda" or not half:
        return Kernels()
    engine, apex, attention = (spec.title if packages[spec].usable else "" for spec in OPTIONAL_PACKAGES)
    # Apex's extension reads an input and a gradient of one dtype, and a float32 bias makes one of them float32
    return Kernels(engine, (engine or ("" if biases else apex)) if grads_buffered else "", attention)


@cache
def installed_packages(device: str) -> Packages:
    """Imported only for CUDA: Transformer Engine fails elsewhere."""
    if device != "cuda":
        return {spec: Package(spec.title) for spec in OPTIONAL_PACKAGES}
    return {TRANSFORMER_ENGINE: probe(TRANSFORMER_ENGINE), APEX: probe(APEX), FLASH_ATTN: flash_attn()}


def kernels_here(device: str, *, half: bool, grads_buffered: bool, biases: bool) -> Kernels:
    """The kernels of this machine; see `select_kernels`."""
    return select_kernels(installed_packages(device), device, half, grads_buffered, biases)


def hide_unusable(packages: Packages) -> None:
    """Make packages that cannot be used invisible to megatron-core too, which looks for them itself and catches only
    ImportError. Called before megatron-core is imported."""
    for spec, package in packages.items():
        root = spec.modules[0]
        if package.problem:  # a part of it may have been imported
            for name in [m for m in sys.modules if m.partition(".")[0] == root]:
                del sys.modules[name]
        if not package.usable:
            # None makes Python's import raise ImportError, though the type of sys.modules does not allow it
            sys.modules.setdefault(root, None)  # type: ignore[arg-type]  # see above


def describe_kernels(kernels: Kernels, packages: Packages) -> Iterator[str]:
    """A line for what is used, and one for each installed package that cannot be used."""
    uses: dict[str, list[str]] = {}
    for title, purpose in ((kernels.linear, "linear layers"), (kernels.weight_grads, "gradients of matrices"),
                           (kernels.attention, "attention")):
        if title:
            uses.setdefault(title, []).append(purpose)
    by_title = {package.title: package for package in packages.values()}
    if uses:
        parts = (f"{title} {by_title[title].version} ({', '.join(purposes)})" for title, purposes in uses.items())
        yield f"note: megatron-core uses {', '.join(parts)}"
    for package in by_title.values():
        if package.problem:
            name = f"{package.title} {package.version}".rstrip()
            yield f"note: {name} is not used; using torch kernels instead: {package.problem}"


@cache
def print_once(line: str) -> None:
    """Print once per process."""
    print(line, file=sys.stderr, flush=True)
