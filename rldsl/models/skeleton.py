"""The modules of a model without its weights: names and shapes, as far as a description needs them.

In: a config of transformers. Out: a `Skeleton`, from the model's own code on the meta device. No remote code runs.
Errors: RL0303 the config is not that of a causal language model, or no head fits its rotary embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rldsl.diag import fail
from rldsl.models import experts, rotary
from rldsl.models.execution import Execution, body_name, called_after_layers, execution, keep_weights, shared_name
from rldsl.models.expert_blocks import expert_blocks
from rldsl.models.expert_blocks import uncounted as uncounted_experts
from rldsl.models.float32_products import float32_products, read_by_others
from rldsl.models.recurrence import recurrences, uncounted
from rldsl.models.tower import towers
from rldsl.models.trials import has_gated_products, has_other_norms, rotates_halves
from rldsl.models.vision import auto_class, only_with_images, supported_families, vision_family
from rldsl.plan.model import ExpertBlock, Recurrence, Tower
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

    prefix: str  # of the names of parameters below the head: "model"
    tp_plan: Mapping[str, str]  # module -> tensor-parallel style, of the model's class
    params: tuple[tuple[str, tuple[int, ...]], ...]  # (name, shape) in module order; tied ones once
    linears: tuple[LinearModule, ...]  # in module order
    embedding: str  # name of the weight of the input embedding; "" if the model does not say
    # (name, shape, whether floating-point) of what a checkpoint holds besides parameters
    buffers: tuple[tuple[str, tuple[int, ...], bool], ...]
    execution: Execution  # how it runs
    after_layers: frozenset[str] | None  # modules that run after the layers; None: not known
    shared: frozenset[str]  # parameters that several layers share
    experts: Mapping[str, int]  # parameter -> the number of experts whose weights it holds
    transforms: tuple[Any, ...]  # of `experts.transforms`
    recurrences: tuple[Recurrence, ...] = ()  # what layers that carry a state need in memory
    other_norms: bool = False  # of `trials.has_other_norms`
    gated_products: bool = False  # of `trials.has_gated_products`
    rotates_halves: bool = False  # of `trials.rotates_halves`
    towers: tuple[Tower, ...] = ()  # what its vision tower needs
    uncounted: str = ""  # what the memory estimate leaves out
    expert_blocks: tuple[ExpertBlock, ...] = ()  # what blocks with experts of a special form need in memory
    fixed: frozenset[str] = frozenset()  # parameters for which transformers asks for no gradient
    float32: frozenset[str] = frozenset()  # parameters and buffers that are float32 in transformers' bfloat16 models
    float32_products: frozenset[str] = frozenset()  # matrices with which these models multiply in float32


@cache
def _is_only_a_product(kind: Any) -> bool:
    """Whether linear layers of this class compute what torch's do, tried on a small one. Others, such as Llama 4's
    routers, do more."""
    import torch

    if kind.forward is torch.nn.Linear.forward:
        return True
    try:
        with torch.random.fork_rng(devices=()), torch.no_grad():
            layer, x = kind(3, 2, device="cpu"), torch.randn(5, 3, device="cpu")
            found, expected = layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias)
    except Exception:  # a class that is built from something else
        return False
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected)


def build(config: Any, path: str, span: Span | None) -> Skeleton:
    """The skeleton of the model of `config`, which is on the meta device: shapes without storage."""
    import torch
    from transformers.initialization import no_init_weights
    from transformers.pytorch_utils import Conv1D

    family = str(config.model_type)
    if vision_family(config) is None and only_with_images(family):
        raise fail("RL0303", f'the family {family} of "{path}" is not supported', span,
                   "it reads images in a form that is not known here",
                   help=f"families that read images and run: {supported_families()}")
    config = keep_weights(config)
    try:
        with torch.device("meta"), no_init_weights():
            model = auto_class(config).from_config(config, trust_remote_code=False)
        model.tie_weights()  # else a part of the initialization
    except Exception as error:
        raise fail("RL0303", f'the model in "{path}" is not a causal language model', span, first_line(error),
                   help="every model must be based on a causal language model") from None
    if why := rotary.rotates_odd_width(model, config):
        raise fail("RL0303", f'the config of "{path}" cannot be used', span, why, help=rotary.HELP)
    linears, aside = [], read_by_others(model)
    for name, module in model.named_modules():
        kind: Any = type(module)
        if name not in aside and (
                kind is Conv1D or isinstance(module, torch.nn.Linear) and _is_only_a_product(kind)):
            rows, columns = module.weight.shape
            swapped = kind is Conv1D
            linears.append(LinearModule(name, *((rows, columns) if swapped else (columns, rows)), swapped))
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    prefix = body_name(model)
    body = model.get_submodule(prefix)
    how = execution(body, config)
    layers: Any = body.get_submodule(how.layers) if how.layers else ()
    states, seen = recurrences(model, body, how), towers(model, prefix)
    blocks = expert_blocks(body, how, int(config.get_text_config().hidden_size))
    float32 = _float32(model, config)
    return Skeleton(
        prefix=prefix,
        tp_plan=dict(getattr(model, "_tp_plan", None) or {}),
        params=_parameters(model, prefix),
        linears=tuple(linears),
        embedding=_embedding(model, prefix),
        buffers=tuple((n, tuple(x.shape), x.is_floating_point()) for n, x in model.state_dict().items()
                      if n not in named),
        execution=how,
        after_layers=called_after_layers(body, how),
        shared=_shared(model, f"{prefix}.{how.layers}."),
        experts=experts.counts(model),
        transforms=tuple(experts.transforms(model)), recurrences=states,
        other_norms=bool(layers) and has_other_norms(layers[0]), gated_products=has_gated_products(layers),
        rotates_halves=rotates_halves(layers), towers=seen,
        expert_blocks=blocks,
        uncounted=uncounted(how, states) or uncounted_experts(body, how, blocks)
        or ("its vision tower" if vision_family(config) and not seen else ""),
        fixed=frozenset(name for name, p in model.named_parameters() if not p.requires_grad),
        float32=float32, float32_products=frozenset(float32_products(model, float32).values()))


def _float32(model: Any, config: Any) -> frozenset[str]:
    """What `from_pretrained` loads in float32 into a model in bfloat16: what the family's code names for this, and what
    it makes in float32 whatever the dtype of the model."""
    import torch
    from transformers.initialization import no_init_weights

    plan = model._get_dtype_plan(torch.bfloat16)  # pattern, with "*" for anything -> dtype
    named = [re.compile(pattern.replace("*", ".*")) for pattern, dtype in plan.items() if dtype == torch.float32]
    half = model
    if model.dtype not in (torch.bfloat16, torch.float16):
        with torch.device("meta"), no_init_weights():
            half = auto_class(config).from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    return frozenset(name for name, x in half.state_dict().items() if x.is_floating_point()
                     and (x.dtype == torch.float32 or any(pattern.search(name) for pattern in named)))


def _parameters(model: Any, prefix: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(name, shape) of each; one that is tied by its name below the head, as directories have it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple((shared_name(names[id(p)], prefix), tuple(p.shape)) for p in model.parameters())


def _shared(model: Any, layers: str) -> frozenset[str]:
    """The parameters that several layers have, by their first name. layers: how names of layers begin."""
    owners: dict[int, tuple[str, set[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(layers):
            owners.setdefault(id(parameter), (name, set()))[1].add(name.removeprefix(layers).split(".")[0])
    return frozenset(name for name, numbers in owners.values() if len(numbers) > 1)


def _embedding(model: Any, prefix: str) -> str:
    try:
        weight = model.get_input_embeddings().weight
    except (NotImplementedError, AttributeError):
        return ""
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is weight]
    return shared_name(names, prefix) if names else ""


def first_line(error: Exception) -> str:
    """Of a message of transformers; cut between words where it is long. A line that only announces the next one is
    skipped."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN].rsplit(" ", 1)[0] + " ..."
