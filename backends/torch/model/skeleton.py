"""A family's model without numbers, and what is asked of it before parameters are put in.

In: a config of transformers. Out: the model with parameters on the meta device, how it runs, and questions about its
head, its parameters and their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.pytorch_utils import Conv1D

from rldsl.backends.torch.model import attention
from rldsl.models.execution import LOGIT_CAPS, Execution, body_name, execution, keep_weights, shared_name
from rldsl.models.vision import auto_class, vision_family
from rldsl.plan.adapter_names import module_of
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.sharding.boxes import Parameter


def empty_model(config: Any) -> tuple[Any, Execution]:
    """The model with parameters on the meta device but real buffers (rotary frequencies are computed, not stored), and
    how it runs. Its vision tower attends in transformers' own way: an image is complete, and nothing is kept of it."""
    attention.register()
    config = keep_weights(config)
    unknown: Exception | None = None
    try:  # first as nearly every family runs: constructing a model is a good part of a rank's start
        model, how = _construct(config, attention.NAME)
    except Exception as error:  # the code of a family may choose its attention by the names that it knows
        unknown = error
    else:
        if not how.by_rows:
            return model, how
    model, how = _construct(config, None)
    if unknown is not None and not how.by_rows:
        raise unknown
    return model, how


def _construct(config: Any, implementation: str | None) -> tuple[Any, Execution]:
    """implementation: of the attention, None for the family's own."""
    of: Any = {"text_config": implementation, "vision_config": "sdpa"} if vision_family(config) else implementation
    with _parameters_on_meta(), no_init_weights():
        model = auto_class(config).from_config(config, attn_implementation=of, trust_remote_code=False)
    model.tie_weights()  # otherwise a part of the initialization
    for module in model.modules():  # it looks at tokens on the host, so no decode step could be captured
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _warn_not  # type: ignore[method-assign]  # of a method
    return model, execution(model.get_submodule(body_name(model)), config)


def _warn_not(*_: object) -> None:
    """In the place of a warning that padded sequences need a mask: no sequence is padded without one here."""


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]  # only while the model is constructed
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as before


def shallow_copy(module: nn.Module) -> Any:
    """A module with the same children, in a separate dictionary."""
    result = copy(module)
    result._modules = dict(module._modules)
    return result


class HeadWithoutProducts:
    """What a family's head does before its products with the vocabulary: (tokens [S, T], hidden [S, T, H]) -> [S, T, H]
    (BERT and its descendants transform hidden states)."""

    def __init__(self, skeleton: Any):
        output = skeleton.get_output_embeddings()
        output.forward = lambda hidden: hidden
        self.model, self.given = shallow_copy(skeleton), _Given()
        self.model._modules[body_name(skeleton)] = self.given

    def __call__(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        self.given.hidden = hidden
        out: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return out


class _Given(nn.Module):
    """In place of a model below its head: gives hidden states that are known."""

    hidden: torch.Tensor

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden)


def has_more(skeleton: Any) -> bool:
    """Whether a family's head has parameters besides those of its output embedding."""
    output, name = skeleton.get_output_embeddings(), body_name(skeleton)
    products = {id(p) for p in output.parameters()} if output is not None else set()
    root = name.partition(".")[0]  # a vision tower is beside the text model
    return any(id(p) not in products for n, p in skeleton.named_parameters() if not n.startswith(root + "."))


def logit_form(text: Any) -> tuple[float, float]:
    """(scale, cap) of a family's logits, which are cap * tanh(scale * z / cap) of products z with the head; 0: no cap.
    The products of scaled hidden states are scaled products."""
    scale = 1.0
    for name, inverse in (("logits_scaling", True), ("logit_scale", False), ("lm_head_multiplier", False)):
        factor = float(getattr(text, name, None) or 1)
        scale *= 1 / factor if inverse else factor
    caps = (getattr(text, name, None) for name in LOGIT_CAPS)
    return scale, float(next((cap for cap in caps if cap), 0))


def aliases_of(skeleton: nn.Module, output: nn.Module | None, prefix: str) -> Mapping[str, list[tuple[nn.Module, str]]]:
    """Name of a parameter or buffer -> (module, attribute) of all that share it, without the output embedding's if it
    is tied: the head is read from the parameter itself. prefix: of the model below its head."""
    places: dict[int, dict[str, tuple[nn.Module, str]]] = {}
    for path, module in skeleton.named_modules():
        for attribute, x in (*module._parameters.items(), *module._buffers.items()):
            if x is not None:
                places.setdefault(id(x), {})[f"{path}.{attribute}" if path else attribute] = module, attribute
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    for of in places.values():
        name = shared_name([*of], prefix)
        found[name] = [place for n, place in of.items() if n == name or place[0] is not output]
    return found


def move_buffers(skeleton: nn.Module, device: torch.device) -> None:
    """Put the buffers of all modules on a device, as tensors that every module has for itself."""
    for module in skeleton.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def only_multiplied(name: str, parameter: Parameter, skeleton: nn.Module) -> bool:
    """Whether a parameter is read only by matrix products, for which autocast casts it: weights of experts, adapters,
    linear layers and the head."""
    return parameter.spec.experts > 0 or module_of(name) != "" or name == SCORE_WEIGHT or isinstance(
        skeleton.get_submodule(name.rpartition(".")[0]), nn.Linear | Conv1D)


def rope_width(text: Any, layer: int) -> int:
    """Of what all heads of a layer with latent attention share; 0 with any other. layer: -1 outside of layers."""
    if getattr(text, "is_heterogeneous", False):
        return int(getattr(text.per_layer_config[layer], "qk_rope_head_dim", 0) or 0) if layer >= 0 else 0
    return int(getattr(text, "qk_rope_head_dim", 0) or 0)
