"""The modules of a model without its weights: names and shapes, as far as a description needs them.

In: a config of transformers. Out: a `Skeleton`, from the model's own code on the meta device. No remote code runs.
Errors: RL0303 the config is not that of a causal language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rldsl.diag import fail
from rldsl.models import experts
from rldsl.source import Span

MAX_SHOWN = 160  # characters of a message of transformers


@dataclass(frozen=True, slots=True)
class LinearModule:
    """A linear layer."""

    name: str  # dotted
    inputs: int  # width of the input
    outputs: int  # width of the output
    transposed: bool  # its weight is [in, out]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """What the modules of a model say about it."""

    prefix: str                                     # of the parameters below the head: "model"
    tp_plan: Mapping[str, str]                      # module -> style, of the model's class
    params: tuple[tuple[str, tuple[int, ...]], ...]  # (name, shape) in module order; tied ones once
    linears: tuple[LinearModule, ...]               # in module order
    embedding: str                                  # parameter of the input embedding; "" where the model names none
    buffers: tuple[str, ...]                        # what a checkpoint holds besides parameters
    stateful: bool                                  # its layers carry a recurrent state
    attention_backend: bool                         # its attention is exchangeable, so that it can work on packed rows
    experts: Mapping[str, int]                      # parameter -> how many experts it is of
    transforms: tuple[Any, ...]                     # of `experts.transforms`


def build(config: Any, path: str, span: Span | None) -> Skeleton:
    """The skeleton of the model of `config`, which is on the meta device: shapes without storage."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.pytorch_utils import Conv1D

    try:
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.tie_weights()  # else a part of the initialization
    except Exception as error:
        raise fail("RL0303", f'the model in "{path}" is not a causal language model', span, first_line(error),
                   help="every model must be based on a causal language model") from None
    linears = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            rows, columns = module.weight.shape
            swapped = isinstance(module, Conv1D)
            linears.append(LinearModule(name, *((rows, columns) if swapped else (columns, rows)), swapped))
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return Skeleton(
        prefix=model.base_model_prefix,
        tp_plan=dict(getattr(model, "_tp_plan", None) or {}),
        params=tuple((n, tuple(p.shape)) for n, p in model.named_parameters()),
        linears=tuple(linears),
        embedding=_embedding(model),
        buffers=tuple(n for n in model.state_dict() if n not in named),
        stateful=bool(getattr(model, "_is_stateful", False)),
        attention_backend=bool(getattr(model, "_supports_attention_backend", False)),
        experts=experts.counts(model),
        transforms=tuple(experts.transforms(model)))


def _embedding(model: Any) -> str:
    try:
        weight = model.get_input_embeddings().weight
    except (NotImplementedError, AttributeError):
        return ""
    return next((n for n, p in model.named_parameters() if p is weight), "")


def first_line(error: Exception) -> str:
    """Of a message of transformers; cut between words where it is long."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN].rsplit(" ", 1)[0] + " ..."
