"""What a model directory says about its model, without reading a weight.

In: a HuggingFace directory and the kind of head. Out: a `Family`: parameters and how they are divided
(`parameter_specs.py`), sizes, and what is possible with them, from the config as transformers reads it and the model's
modules (`skeleton.py`, or `known.py` without building them). No remote code runs.
Errors: RL0301 no directory, RL0302 a file or tensor is missing, RL0303 the config cannot be used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from rldsl.diag import fail
from rldsl.models import arithmetic, experts, hub, known, rotary
from rldsl.models import directory as files
from rldsl.models.cache import cached_record, entry_key
from rldsl.models.execution import LOGIT_CAPS, Execution
from rldsl.models.parameter_specs import layer_number, parameter_specs
from rldsl.models.sizes import impossible_size, values_of
from rldsl.models.skeleton import Skeleton, build, first_line
from rldsl.models.vision import layers_with_images, processor_digest, processor_problem, vision_family
from rldsl.plan.heads import HEADS
from rldsl.plan.model import ExpertBlock, ParamSpec, Recurrence, Sizes, Tower
from rldsl.source import Span

# keys of a config that do not change what the model computes
WITHOUT_MEANING = ("_name_or_path", "architectures", "dtype", "id2label", "initializer_range", "label2id", "num_labels",
                   "problem_type", "torch_dtype", "transformers_version", "use_cache")


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer in the blocks of a model."""

    name: str  # as of a `ParamSpec`
    inputs: int  # width of the input
    outputs: int  # width of the output
    transposed: bool = False  # the weight is [in, out]


@dataclass(frozen=True, slots=True)
class Family:
    """A model as its directory describes it."""

    name: str  # the model_type of its config, "qwen3"
    path: str  # its directory
    head_name: str  # of `plan.heads.HEADS`
    params: tuple[ParamSpec, ...]  # all parameters
    layers: int  # transformer layers
    heads: int  # attention heads
    kv_heads: int  # key and value heads
    hidden: int  # width
    head_dim: int  # width of a head
    intermediate: int  # width of the MLP
    vocab: int  # tokens
    max_positions: int  # that its config states
    itemsize: int  # bytes of a parameter in the directory's own dtype
    config_digest: str  # sha256 of config.json
    tokenizer: str  # sha256 of what decides token ids
    tp_problem: str = ""  # why tensor parallelism cannot divide this model; "" if it can
    pp_problem: str = ""  # the same for pipeline parallelism
    config: tuple[tuple[str, str], ...] = ()  # (key, JSON) of what says how the parameters are used, sorted
    linears: tuple[Linear, ...] = ()  # what can have an adapter
    experts: int = 0  # of a layer; 0 without any
    chosen: int = 0  # experts that work on a token
    expert_width: int = 0  # of one expert
    recurrent: bool = False  # whether some layers carry a state from token to token
    invariant_problem: str = ""  # why its numbers depend on the batch that they are computed in; "" if they need not
    by_rows: str = ""  # why each sequence is a separate row; "": sequences are packed (`execution.py`)
    reads_images: bool = False  # whether it has a vision tower
    layers_with_images: int = 0  # how many of the first layers get features of images added to their outputs
    image_processor: str = ""  # sha256 of the files that say how images are preprocessed; "": there are none
    image_problem: str = ""  # how the image processor does not fit the vision tower; "" if it does
    recurrences: tuple[Recurrence, ...] = ()  # what layers that carry a state need in memory
    other_norms: bool = False  # whether norms of layers keep their inputs for the backward pass (Gemma's)
    towers: tuple[Tower, ...] = ()  # what its vision tower needs
    uncounted: str = ""  # what the memory estimate leaves out; "": nothing that is known
    expert_blocks: tuple[ExpertBlock, ...] = ()  # what blocks with experts of a special form need in memory
    rotates_halves: bool = False  # whether rotary embeddings rotate halves of what they get
    gated_products: bool = False  # whether MLPs of layers compute down(silu(gate(x)) * up(x)) as modules


def describe(path: str, kind: str, span: Span | None = None, trained: bool = False) -> Family:
    """The family of the model in directory `path`; kind: the name of its head. trained: a model
    that is trained may begin with a new head."""
    directory = hub.directory(path, span)
    names = files.check(directory, path, kind, span, trained)
    found = describe_architecture(path, kind, names, span)
    return replace(found, tokenizer=files.tokenizer(directory),
                   image_processor=processor_digest(directory) if found.reads_images else "",
                   image_problem=processor_problem(directory) if found.reads_images else "")


def describe_architecture(path: str, kind: str, names: frozenset[str], span: Span | None = None) -> Family:
    """What follows from config.json, the names of the tensors of the directory, and the installed transformers; the
    rest of the directory is not looked at: `tokenizer`, `image_processor` and `image_problem` are "". Kept for the next
    time. Errors: RL0303."""
    digest = sha256((hub.directory(path) / "config.json").read_bytes()).hexdigest()
    found = cached_record(Family, entry_key("family", digest, kind, *sorted(names)),
                          lambda: replace(_described(path, kind, names, digest, span), path=""))
    return replace(found, path=path)


def _described(path: str, kind: str, names: frozenset[str], digest: str, span: Span | None) -> Family:
    directory = hub.directory(path)
    config = _config(directory, path, span)
    if why := impossible_size(config):
        raise fail("RL0303", f'the config of "{path}" cannot be used', span, why,
                   help="correct config.json, or choose another model")
    _check_head(config, path, kind, span)
    skeleton = known.skeleton(config) or build(config, path, span)
    arithmetic.check(skeleton, config, path, span)
    text, how = config.get_text_config(), skeleton.execution
    heads = _size(text, "num_attention_heads") or 1
    hidden = _size(text, "hidden_size") or _width(skeleton)
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": _size(text, "num_key_value_heads") or heads, "hidden": hidden,
                             "head_dim": _size(text, "head_dim") or hidden // heads}
    if _size(text, "kv_lora_rank"):  # latent attention: what is cached are the keys and values of all heads
        sizes |= {"kv_heads": heads, "head_dim": _size(text, "qk_nope_head_dim") + _size(text, "qk_rope_head_dim")}
    layers = how.num_layers or 1
    params, tp_problem, pp_problem = parameter_specs(skeleton, config, layers, kind, sizes, names)
    mixed = [s for s in params if s.experts]
    itemsize = {"bfloat16": 2, "float16": 2}.get(str(getattr(config, "dtype", "float32")).removeprefix("torch."), 4)
    return Family(name=str(config.model_type), path=path, head_name=kind, params=params, layers=layers,
                  intermediate=_size(text, "intermediate_size") or 4 * hidden, vocab=int(text.vocab_size),
                  max_positions=_size(text, "max_position_embeddings"), itemsize=itemsize,
                  config_digest=digest, tokenizer="", tp_problem=tp_problem, pp_problem=pp_problem,
                  config=_meaning(config), linears=_linears(skeleton, params),
                  experts=min((s.experts for s in mixed), default=0), chosen=experts.chosen(text) if mixed else 0,
                  expert_width=min((s.shape[2] for s in mixed if s.name.endswith("down_proj")), default=0),
                  recurrent=bool(how.recurrent), by_rows=how.by_rows, reads_images=vision_family(config) is not None,
                  layers_with_images=layers_with_images(config), recurrences=skeleton.recurrences,
                  other_norms=skeleton.other_norms, towers=skeleton.towers, uncounted=skeleton.uncounted,
                  expert_blocks=skeleton.expert_blocks, gated_products=skeleton.gated_products,
                  rotates_halves=skeleton.rotates_halves,
                  invariant_problem=_invariant_problem(config, how, params), **sizes)


def _invariant_problem(config: Any, how: Execution, params: tuple[ParamSpec, ...]) -> str:
    """What of a family has no implementation whose sums have one order."""
    text = config.get_text_config()
    if vision_family(config):
        return "its vision tower computes all images of a pass together"
    if how.recurrent:
        return "its layers carry a state, which decoding and training sum up in other orders"
    if how.by_rows:
        return "each sequence is a row of its own, whose padding differs from batch to batch"
    if getattr(text, "kv_lora_rank", None):
        return "its values are narrower than its keys"
    special = getattr(text, "attn_logit_softcapping", None) or _has_sinks(params)
    return "its attention has sinks or capped scores" if special else ""


def _has_sinks(params: Sequence[ParamSpec]) -> bool:
    return any(p.name.endswith(".sinks") for p in params)


def _size(text: Any, name: str) -> int:
    """A size of a config, the largest one where layers differ; 0 if it has none."""
    return max((int(x) for x in values_of(text, name) if isinstance(x, int | float)), default=0)


def _width(skeleton: Skeleton) -> int:
    """Of the input embedding."""
    return next((shape[-1] for name, shape in skeleton.params if name == skeleton.embedding), 1)


def sizes_of(family: Family) -> Sizes:
    """As a plan's model record has them."""
    config = dict(family.config)
    config |= {k: json.dumps(v) for k, v in json.loads(config.get("text_config", "{}")).items()}
    activation = next((json.loads(config[k]) for k in ("hidden_activation", "hidden_act", "activation_function")
                       if config.get(k, "null") != "null"), "")
    return Sizes(family.hidden, family.expert_width or family.intermediate, family.heads, family.kv_heads,
                 family.head_dim, family.vocab, str(activation), family.chosen,
                 family.recurrent or bool(family.by_rows) or family.reads_images, family.recurrences,
                 family.other_norms, family.towers, family.uncounted, family.expert_blocks,
                 config.get("attn_logit_softcapping", "null") != "null" or _has_sinks(family.params),
                 family.gated_products, any(json.loads(config.get(name, "null")) for name in LOGIT_CAPS),
                 family.rotates_halves and not any("partial_rotary_factor" in value for value in config.values()))


def _meaning(config: Any) -> tuple[tuple[str, str], ...]:
    """What of a config bears on the arithmetic of the model."""
    return tuple(sorted((k, json.dumps(v, sort_keys=True, default=str)) for k, v in config.to_dict().items()
                        if k not in WITHOUT_MEANING and not k.endswith(("_token_id", "_dropout", "_pdrop"))))


# ------------------------------------------------------------------------------------------------ config and modules


def _config(directory: Path, path: str, span: Span | None) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises anything at all on a malformed config
        raise fail("RL0303", f'the config of "{path}" cannot be used', span, first_line(error),
                   help=_advice(directory, str(error))) from None


def _advice(directory: Path, reason: str) -> str:
    """What to do about a config that transformers cannot read, because of its model_type or of something else."""
    from transformers import CONFIG_MAPPING

    with suppress(OSError, ValueError, AttributeError, TypeError):
        config = json.loads((directory / "config.json").read_bytes())
        if "rotary" in reason and rotary.has_odd_head(config):
            return rotary.HELP
        if config.get("model_type") in CONFIG_MAPPING:
            return "correct config.json where transformers says that it is wrong, or choose another model"
    return "config.json must have a model_type that the installed transformers supports"


def _check_head(config: Any, path: str, kind: str, span: Span | None) -> None:
    """Value and reward models are saved as sequence classifiers, so the family must have one. Those that read images
    need none: transformers has classifiers for few of them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    if not HEADS[kind].vocabulary and config.model_type not in CLASSIFIERS and vision_family(config) is None:
        raise fail("RL0303", f'"{path}" cannot be a {kind}', span,
                   f"transformers has no sequence classifier for {config.model_type}",
                   help="use another family for critics and reward models")


def _linears(skeleton: Skeleton, params: tuple[ParamSpec, ...]) -> tuple[Linear, ...]:
    """The linear layers of the blocks, in module order; those of all layers once where their specs are."""
    there, inner = {s.name for s in params}, f"{skeleton.prefix}.{skeleton.execution.layers}."
    found: dict[str, Linear] = {}
    for module in skeleton.linears:
        number = layer_number(module.name + ".", inner)
        folded = inner + "{}" + module.name[len(inner + number) :]
        name = folded if f"{folded}.weight" in there else module.name
        if number and f"{name}.weight" in there:
            found[name] = Linear(name, module.inputs, module.outputs, module.transposed)
    return tuple(found.values())
