"""What a model directory says about its model, without reading a weight.

In: a HuggingFace directory and the kind of head. Out: a `Family`: parameter shapes, and how tensor and pipeline
parallelism divide them, from the config as transformers reads it, the model's modules (`skeleton.py`, or `known.py`
without building them) and the config's own plans. No remote code runs.
Errors: RL0301 no directory, RL0302 a file or tensor is missing, RL0303 the config cannot be used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from rldsl.diag import fail
from rldsl.models import arithmetic, experts, hub, known
from rldsl.models import directory as files
from rldsl.models.cache import cached_record, entry_key
from rldsl.models.execution import Execution
from rldsl.models.skeleton import Skeleton, build, first_line
from rldsl.models.vision import earlier_names, layers_with_images, processor_digest, vision_family
from rldsl.plan.heads import HEADS, SCORE_WEIGHT
from rldsl.plan.model import ExpertBlock, ParamSpec, Recurrence, Sizes, Split, StageKind, Tower
from rldsl.source import Span

# keys of a config that do not change what the model computes
WITHOUT_MEANING = ("_name_or_path", "architectures", "dtype", "id2label", "initializer_range", "label2id", "num_labels",
                   "problem_type", "torch_dtype", "transformers_version", "use_cache")


PER_LAYER = "hidden_size_per_layer_input"  # width of the embeddings that each layer reads, in configs that have them
# families whose plans do not fit their code -> why
WITHOUT_TP = {"gemma3n_text": "its layers mix several streams of hidden states"}
# families whose layers need more of the stages before them than hidden states -> what
WITHOUT_PP = {"zaya": "its layers pass on residuals, too",
              "roformer": "its layers read positions that the first stage has"}
# tensor-parallel plans of families whose configs have none, in the form of these
PLANS = {"gpt_oss": {"embed_tokens": "embedding_rowwise", "layers.*.self_attn.q_proj": "colwise",
                     "layers.*.self_attn.k_proj": "colwise", "layers.*.self_attn.v_proj": "colwise",
                     "layers.*.self_attn.o_proj": "rowwise", "layers.*.self_attn.sinks": "local_params",
                     "layers.*.mlp.experts": "moe_tp_experts"},
         "qwen3_vl": {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "colwise",
                      "layers.*.self_attn.v_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
                      "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
                      "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
                      "layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise",
                      "layers.*.mlp.down_proj": "rowwise"}}


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
    by_rows: str = ""  # why each sequence is a row of its own; "": sequences are packed (`execution.py`)
    reads_images: bool = False  # whether it has a vision tower
    layers_with_images: int = 0  # how many of the first layers get features of images added to their outputs
    image_processor: str = ""  # sha256 of the files that say how images are preprocessed; "": there are none
    recurrences: tuple[Recurrence, ...] = ()  # what layers that carry a state need in memory
    other_norms: bool = False  # whether norms of layers keep their inputs for the backward pass (Gemma's)
    towers: tuple[Tower, ...] = ()  # what its vision tower needs
    uncounted: str = ""  # what the memory estimate leaves out; "": nothing that is known
    expert_blocks: tuple[ExpertBlock, ...] = ()  # what blocks with experts of a form of their own need in memory
    gated_products: bool = False  # whether MLPs of layers compute down(silu(gate(x)) * up(x)) in modules of their own


def describe(path: str, kind: str, span: Span | None = None, trained: bool = False) -> Family:
    """The family of the model in directory `path`; kind: the name of its head. trained: a model
    that is trained may begin with a new head."""
    directory = hub.directory(path, span)
    names = files.check(directory, path, kind, span, trained)
    found = describe_architecture(path, kind, names, span)
    return replace(found, tokenizer=files.tokenizer(directory),
                   image_processor=processor_digest(directory) if found.reads_images else "")


def describe_architecture(path: str, kind: str, names: frozenset[str], span: Span | None = None) -> Family:
    """What follows from config.json, the names of the tensors of the directory, and the installed transformers; the
    rest of the directory is not looked at: `tokenizer` and `image_processor` are "". Kept for the next time. Errors:
    RL0303."""
    digest = sha256((hub.directory(path) / "config.json").read_bytes()).hexdigest()
    found = cached_record(Family, entry_key("family", digest, kind, *sorted(names)),
                          lambda: replace(_described(path, kind, names, digest, span), path=""))
    return replace(found, path=path)


def _described(path: str, kind: str, names: frozenset[str], digest: str, span: Span | None) -> Family:
    directory = hub.directory(path)
    config = _config(directory, path, span)
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
    params, tp_problem, pp_problem = _specs(skeleton, config, layers, kind, sizes, names)
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
    try:
        value = getattr(text, name, None)
    except AttributeError:
        raise
    except Exception:  # transformers' error for what differs from layer to layer, which is no AttributeError
        value = [getattr(text.per_layer_config[i], name, None) for i in range(text.num_hidden_layers)]
    values = value if isinstance(value, list | tuple) else [value]
    return max((int(x) for x in values if isinstance(x, int | float)), default=0)


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
                 family.gated_products)


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
                   help="config.json must have a model_type that the installed transformers supports") from None


def _check_head(config: Any, path: str, kind: str, span: Span | None) -> None:
    """Value and reward models are saved as sequence classifiers, so the family must have one. Those that read images
    need none: transformers has classifiers for few of them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    if not HEADS[kind].vocabulary and config.model_type not in CLASSIFIERS and vision_family(config) is None:
        raise fail("RL0303", f'"{path}" cannot be a {kind}', span,
                   f"transformers has no sequence classifier for {config.model_type}",
                   help="use another family for critics and reward models")


# ------------------------------------------------------------------------------------------------ parameters


def _specs(skeleton: Skeleton, config: Any, layers: int, kind: str, sizes: dict[str, int],
           there: frozenset[str]) -> tuple[tuple[ParamSpec, ...], str, str]:
    """Parameter specs in module order, and why tp or pp are impossible."""
    prefix = skeleton.prefix
    styles = dict(skeleton.tp_plan)
    owner = config.get_text_config() if vision_family(config) else config  # of the plans of the layers
    declared = getattr(owner, "base_model_tp_plan", None) or PLANS.get(str(config.model_type)) or {}
    styles |= {f"{prefix}.{k}": v for k, v in declared.items()}
    buffers = {n for n, _, _ in skeleton.buffers} | skeleton.fixed
    tensors = (*skeleton.params, *((n, shape) for n, shape, _ in skeleton.buffers))
    base = [(n, shape) for n, shape in tensors if n.startswith(prefix + ".")]
    tower = [(n, shape) for n, shape in tensors if _of_tower(n, prefix)]
    head = [(n, shape) for n, shape in tensors if not n.startswith(prefix + ".") and not _of_tower(n, prefix)]
    products = any(len(shape) == 2 and shape[0] == config.get_text_config().vocab_size for _, shape in head)
    tied = bool(getattr(config, "tie_word_embeddings", False)) and not products  # a head may have more, as BERT's
    if not HEADS[kind].vocabulary:
        head, styles = [(SCORE_WEIGHT, (1, sizes["hidden"]))], {k: v for k, v in styles.items() if k != "lm_head"}
    elif tied and styles.get("lm_head") == "colwise_gather_output":  # the embedding is the head: divide it as such
        styles[skeleton.embedding.rpartition(".")[0]] = "embedding_rowwise"
    inner = f"{prefix}.{skeleton.execution.layers}."
    names = _fold(base, inner, layers)
    pipeline = list(getattr(owner, "base_model_pp_plan", None) or {})
    pp_problem = _pp_problem(skeleton, bool(pipeline))
    if getattr(config.get_text_config(), PER_LAYER, None):  # every layer reads embeddings of its own, of all columns
        styles = {k: "" if "per_layer" in k else v for k, v in styles.items()}
        pp_problem = "its layers read embeddings of their own, which the first stage makes"
    pp_problem = pp_problem or WITHOUT_PP.get(str(config.model_type), "")
    problems = [] if declared else ["its config has no tensor-parallel plan"]
    problems += [WITHOUT_TP[str(config.model_type)]] if str(config.model_type) in WITHOUT_TP else []
    specs, behind, counted, renamed = [], False, skeleton.experts, skeleton.transforms
    for name, shape in tower:  # whole on every rank of tp
        specs.append(ParamSpec(name, shape, "first", 0, None, "replicated", False,
                               stored=_stored(name, config, renamed, there), buffer=name in buffers,
                               float32=name in skeleton.float32))
    stage: StageKind
    for name, shape in names:
        number, first = _layer(name, inner), name.replace("{}", "0", 1)
        in_layer = bool(number)
        behind = behind or in_layer
        module = name.removeprefix(prefix + ".").split(".")[0]
        if in_layer:
            stage = "layer"
        elif tied and HEADS[kind].vocabulary and name == skeleton.embedding:
            stage = "ends"
        else:
            inner_name = name.removeprefix(prefix + ".")
            stage = "last" if _follows_layers(inner_name, module, pipeline, skeleton, behind) else "first"
        if count := counted.get(first, 0):
            split, problem = experts.division(name, shape, styles.get(_generic(name), ""))
            style, partial = "experts", False
        else:
            split, style, partial, problem = _division(name, shape, _style(name, styles), sizes)
            partial = partial or first not in buffers and _of_divided_columns(name, styles)
        problems += [problem] if problem else []
        several = number == "{}"
        specs.append(ParamSpec(name, shape, stage, layers if several else 0, split, style, partial, count,
                               _stored(name, config, renamed, there),
                               layer=int(number) if in_layer and not several else -1,
                               buffer=first in buffers, float32=first in skeleton.float32))
    for name, shape in head:
        split, style, partial, problem = _division(name, shape, _style(name, styles), sizes)
        problems += [problem] if problem else []
        specs.append(ParamSpec(name, shape, "last", 0, split, style, partial,
                               stored=_stored(name, config, renamed, there), float32=name in skeleton.float32))
    if problems:  # one whole copy on every rank: no style must look divided
        specs = [replace(s, split=None, style="experts" if s.experts else "replicated", partial_grad=False)
                 for s in specs]
    return tuple(specs), problems[0] if problems else "", pp_problem


def _of_tower(name: str, prefix: str) -> bool:
    """Whether a parameter is outside the text model of a family that reads images, and outside its head. prefix: of the
    text model."""
    root, _, inner = prefix.partition(".")
    return bool(inner) and name.startswith(f"{root}.") and not name.startswith(f"{prefix}.")


def _stored(name: str, config: Any, renamed: Sequence[Any], there: frozenset[str]) -> tuple[str, ...]:
    """As `experts.stored`, and the names of families with images in directories of an earlier form."""
    real = name.replace("{}", "0", 1)
    if real in there:
        return ()
    old = next((x for x in earlier_names(config, name) if x.replace("{}", "0", 1) in there), "")
    return (old,) if old else experts.stored(name, renamed, there)


def _linears(skeleton: Skeleton, params: tuple[ParamSpec, ...]) -> tuple[Linear, ...]:
    """The linear layers of the blocks, in module order; those of all layers once where their specs are."""
    there, inner = {s.name for s in params}, f"{skeleton.prefix}.{skeleton.execution.layers}."
    found: dict[str, Linear] = {}
    for module in skeleton.linears:
        number = _layer(module.name + ".", inner)
        folded = inner + "{}" + module.name[len(inner + number) :]
        name = folded if f"{folded}.weight" in there else module.name
        if number and f"{name}.weight" in there:
            found[name] = Linear(name, module.inputs, module.outputs, module.transposed)
    return tuple(found.values())


def _fold(params: list[tuple[str, tuple[int, ...]]], inner: str, layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """Parameters that every layer has with the same shape become one name with "{}"; all others stay. inner: how names
    of layers begin."""
    folded: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in params:
        number = _layer(name, inner)
        folded.setdefault(inner + "{}" + name[len(inner + number) :] if number else name, []).append((name, shape))
    found: list[tuple[str, tuple[int, ...]]] = []
    for template, members in folded.items():
        same = "{}" in template and len(members) == layers and len({shape for _, shape in members}) == 1
        found += [(template, members[0][1])] if same else members
    return found


def _layer(name: str, inner: str) -> str:
    """The number of a parameter's layer, or "{}"; "" if it is in none. inner: how names of layers begin."""
    number = name.removeprefix(inner).split(".")[0] if name.startswith(inner) else ""
    return number if number.isdigit() or number == "{}" else ""


def _follows_layers(name: str, module: str, pipeline: list[str], skeleton: Skeleton, behind: bool) -> bool:
    """Whether a parameter outside layers belongs to what follows them. behind: whether it is listed after them."""
    if {module, "layers"} <= {*pipeline}:
        return pipeline.index(module) > pipeline.index("layers")
    if skeleton.after_layers is None:
        return behind
    return any(name.startswith(later + ".") for later in skeleton.after_layers)


def _pp_problem(skeleton: Skeleton, declared: bool) -> str:
    """Why a model cannot be divided into stages. declared: whether its config has a pipeline-parallel plan."""
    if not skeleton.execution.layers:
        return "it has no list of layers"
    if skeleton.shared:
        return "its layers share parameters"
    if declared or skeleton.after_layers is not None:
        return ""
    return "it has no pipeline-parallel plan, and a trial does not show what follows its layers"


def _style(name: str, styles: dict[str, str]) -> str:
    """The tensor-parallel style of a parameter's module, or of the parameter itself."""
    generic = _generic(name)
    return styles.get(generic.rpartition(".")[0]) or styles.get(generic) or ""


def _of_divided_columns(name: str, styles: dict[str, str]) -> bool:
    """Whether a parameter belongs to an activation, as xIELU's do, between weights that tp divides: a rank applies it
    to its own columns alone."""
    mlp, _, module = _generic(name).rpartition(".")[0].rpartition(".")
    return module.startswith("act") and any(k.rpartition(".")[0] == mlp and v == "colwise" for k, v in styles.items())


def _generic(name: str) -> str:
    """As plans of configs write it: "*" for numbers."""
    return re.sub(r"\.(\{\}|\d+)\.", ".*.", name)


def _division(name: str, shape: tuple[int, ...], style: str,
              sizes: dict[str, int]) -> tuple[Split | None, str, bool, str]:
    """(split, style of the plan, partial gradient, problem) of one parameter."""
    module = name.split(".")[-2] if "." in name else name
    units = {"q_proj": sizes["heads"], "o_proj": sizes["heads"], "out_proj": sizes["heads"],
             "k_proj": sizes["kv_heads"], "v_proj": sizes["kv_heads"]}.get(module)
    match style:
        case "":
            return None, "replicated", False, ""
        case "replicated_with_grad_allreduce":
            return None, "replicated", True, ""
        case "embedding_rowwise":
            return Split(0, ((shape[0], 1),)), "vocab", False, ""
        case "colwise_gather_output" if module == "lm_head":
            return Split(0, ((shape[0], 1),)), "head", False, ""
        case "colwise_gather_output" if len(shape) <= 2:
            return Split(0, ((shape[0], 1),)), "colwise_gather", False, ""
        case "rowwise_split_input" if len(shape) <= 2:
            if len(shape) == 1:
                return None, "replicated", False, ""
            return Split(1, ((shape[1], 1),)), "rowwise_split", False, ""
        case "mla_kv_a_proj":
            return None, "latent" if len(shape) == 2 else "replicated", False, ""
        case "local_params" if len(shape) == 1 and not shape[0] % sizes["heads"]:  # a number for each head, or several
            return Split(0, ((sizes["heads"], shape[0] // sizes["heads"]),)), "colwise", False, ""
        case "moe_tp_experts":  # experts in a form that is not known: every rank has and computes all of them
            return None, "replicated", False, ""
        case "colwise" | "rowwise":
            if style == "rowwise" and len(shape) == 1:  # a bias that is added once, after the sum
                return None, "replicated", False, ""
            dim = 0 if style == "colwise" else 1
            count = units or shape[dim]
            if len(shape) > 2 or shape[dim] % count:
                return None, "replicated", False, f"no tensor-parallel style is known for {name}"
            return Split(dim, ((count, shape[dim] // count),)), style, False, ""
        case _:
            return None, "replicated", False, f"its plan has the style {style!r} for {name}, which is not supported yet"
