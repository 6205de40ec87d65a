"""In which dtype the parameters of a model lie, and in which they travel. Which of them travel where: `reshard/`.

In: models and layouts. Out: dtypes, or the model in one.
"""

from __future__ import annotations

from dataclasses import replace

from rldsl.plan.model import Model


def storage_dtype(model: Model, layout: str) -> str:
    """The dtype of the parameters under a layout: where they are trained, or a mean is taken, a small change counts."""
    return "float32" if layout in (model.train_layout, model.ema_layout) else model.dtype


def in_wire_dtype(source: Model, src: str, model: Model, dst: str, decay: float) -> Model:
    """`model` in the dtype in which parameters of `source` under layout `src` travel to it under `dst`: the narrower of
    the two, but that of the source where a mean is taken."""
    both = (storage_dtype(source, src),) if decay else (storage_dtype(source, src), storage_dtype(model, dst))
    return replace(model, dtype="bfloat16" if "bfloat16" in both else "float32")
