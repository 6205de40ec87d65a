"""What a vision tower needs in memory, and its work, found by trials of its own code without storage.

In: a model of a family that reads images, on the meta device. Out: a `Tower` for each size of an element, by the token
that a prompt has for its images. Images of a trial are of a middle size; what is kept grows with their patches.
Invariant: a tower whose trial fails has no `Tower`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from rldsl.models.trials import (
    ITEMSIZES,
    backward_pass,
    fuse_gates,
    fuse_norms,
    quiet,
    renew,
    storages,
    without_storage,
)
from rldsl.models.vision import vision_family
from rldsl.plan.model import Tower

SIDE = 16  # tokens of an image along each side, where images are of any size
IMAGES = (1, 2)  # of two trials, whose difference is what an image needs


def towers(model: Any, prefix: str) -> tuple[Tower, ...]:
    """For each size of an element in bytes; () for a text model, and where a trial fails. prefix: of the text model."""
    import torch

    family = vision_family(model.config)
    if family is None:
        return ()
    root = prefix.rpartition(".")[0]
    with torch.device("meta"):
        part = copy.deepcopy(model.get_submodule(root))
    part.language_model = None  # which takes time and has no part in it
    fuse_norms(part)
    gates = fuse_gates(part)
    names = tuple(f"{root}.{module}" for module in family.tower)
    found = []
    with quiet():
        for item in ITEMSIZES:
            try:
                with without_storage(item, "cpu"):
                    renew(part)
                    few, more = (_trial(part, gates, family.positions == "grid", n) for n in IMAGES)
            except Exception:  # a family's code may need anything at all
                return ()
            tokens = more[0] - few[0]
            found.append(Tower(item, names, *((b - a) // tokens for a, b in zip(few[1:], more[1:], strict=True))))
    return tuple(found)


def _trial(root: Any, gates: list[int], by_grid: bool, images: int) -> tuple[int, ...]:
    """(tokens, bytes of pixels, saved, peak of the forward pass without saving, peak of the backward pass, operations
    of a forward pass, what is saved besides without kernels of gated products). gates: of `fuse_gates`."""
    import torch

    inputs = _inputs(root.config.vision_config, by_grid, images)
    with storages() as count, torch.no_grad():
        tokens, _ = _vectors(root, inputs)
        forward, work = count.most, count.operations
    gates.clear()
    saved, backward = backward_pass(lambda: _vectors(root, inputs)[1])
    root.zero_grad()
    return tokens, inputs["pixel_values"].nbytes, saved, forward, backward, work, sum(gates)


def _inputs(vision: Any, by_grid: bool, images: int) -> dict[str, Any]:
    """Of a tower, as its image processor makes them."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if not by_grid:
        return {"pixel_values": torch.empty(images, vision.num_channels, vision.image_size, vision.image_size)}
    side = SIDE * vision.spatial_merge_size
    with unset_fake_temporarily():  # sizes decide how the code divides pixels, so they are numbers
        grid = torch.tensor([[1, side, side]] * images)
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    return {"pixel_values": torch.empty(images * side * side, width), "image_grid_thw": grid}


def _vectors(root: Any, inputs: Mapping[str, Any]) -> tuple[int, Any]:
    """(tokens of all images, what the language model reads of them)."""
    import torch

    with _numbers():
        made = root.get_image_features(**inputs, return_dict=True)
    features = list(made.pooler_output)
    of_layers = [x for layer in getattr(made, "deepstack_features", None) or () for x in layer]
    return sum(map(len, features)), torch.cat([*features, *of_layers])


def _numbers() -> Any:
    """A mode of torch in which tensors of integers that depend on no shape alone have numbers."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Numbers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
            dtype = kwargs.get("dtype") or (torch.int64 if "arange" in str(func) else torch.float32)
            if any(isinstance(x, FakeTensor) for x in tensors) or not tensors and dtype.is_floating_point:
                return func(*args, **kwargs)
            with unset_fake_temporarily():
                return func(*args, **kwargs)

    return Numbers()  # type: ignore[no-untyped-call]
