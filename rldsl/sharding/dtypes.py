"""In which dtype each parameter of a model lies, and in which it travels. Which of them travel where: `reshard/`.

In: models, layouts and parameters. Out: dtypes, or models whose parameters all have one. A model in bfloat16 has its
parameters in bfloat16, except where it is trained or averaged, and except those that transformers keeps in float32
(`ParamSpec.float32`): these are float32 under every layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from rldsl.plan.model import Model, ParamSpec

SIZES = {"float32": 4, "bfloat16": 2}  # bytes of an element


def storage_dtype(model: Model, layout: str) -> str:
    """The dtype of the parameters under a layout, without those that always are float32: where they are trained, or a
    mean is taken, a small change counts."""
    return "float32" if layout in (model.train_layout, model.ema_layout) else model.dtype


def parameter_dtype(spec: ParamSpec, dtype: str) -> str:
    """The dtype of one parameter. dtype: that of the others."""
    return "float32" if spec.float32 else dtype


def parameter_size(spec: ParamSpec, size: int) -> int:
    """Bytes of an element of one parameter. size: of an element of the others."""
    return SIZES["float32"] if spec.float32 else size


def float32_specs(specs: Iterable[ParamSpec]) -> tuple[ParamSpec, ...]:
    """Those that are float32 whatever the others are."""
    return tuple(s for s in specs if s.float32)


def in_wire_dtypes(source: Model, src: str, model: Model, dst: str, decay: float) -> tuple[Model, ...]:
    """`model`, once for each dtype in which parameters of `source` under layout `src` travel to it under `dst`, with
    those that do: first the narrower of the two, or the dtype of the source where a mean is taken, then float32, if
    that is another and some parameters always have it. They travel one after the other."""
    both = (storage_dtype(source, src),) if decay else (storage_dtype(source, src), storage_dtype(model, dst))
    return _by_dtype(model, "bfloat16" if "bfloat16" in both else "float32")


@lru_cache(maxsize=256)
def _by_dtype(model: Model, dtype: str) -> tuple[Model, ...]:
    always = float32_specs(model.params)
    if dtype == "float32" or not always:
        return (replace(model, dtype=dtype),)
    rest = tuple(s for s in model.params if not s.float32)
    narrow = (replace(model, dtype=dtype, params=rest),) if rest else ()
    return (*narrow, replace(model, dtype="float32", params=always))
