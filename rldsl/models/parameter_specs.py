"""The parameters of a model, and how tensor and pipeline parallelism divide them.

In: a model's modules (`skeleton.py`), its config with its own plans for tensor and pipeline parallelism, and the names
of the stored tensors. Out: a `ParamSpec` for each parameter, in the order of the modules, and why the model cannot be
divided, if so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rldsl.models import experts
from rldsl.models.skeleton import Skeleton
from rldsl.models.vision import earlier_names, vision_family
from rldsl.plan.heads import HEADS, SCORE_WEIGHT
from rldsl.plan.model import ParamSpec, Split, StageKind

PER_LAYER = "hidden_size_per_layer_input"  # width of the embeddings that each layer reads, in configs that have them
# families whose plans do not fit their code -> why
WITHOUT_TP = {"gemma3n_text": "its layers mix several streams of hidden states"}
# families whose layers need more of the stages before them than hidden states -> what
WITHOUT_PP = {"hy_v4": "its layers mix several streams of hidden states", "zaya": "its layers pass on residuals, too",
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


_Tensors = list[tuple[str, tuple[int, ...]]]  # (name, shape), in the order of the modules
_Division = tuple[Split | None, str, bool, str]  # split, style of the plan, partial gradient, problem


@dataclass(frozen=True, slots=True)
class _Model:
    """What the specs of all parameters are made from."""

    skeleton: Skeleton
    config: Any
    layers: int  # how many there are
    sizes: Mapping[str, int]  # "heads", "kv_heads", "hidden"
    there: frozenset[str]  # names of the tensors of the directory
    styles: Mapping[str, str]  # name of a module or parameter, with "*" for numbers -> its tensor-parallel style
    buffers: frozenset[str]  # what no optimizer changes

    @property
    def inner(self) -> str:
        """How names of layers begin."""
        return f"{self.skeleton.prefix}.{self.skeleton.execution.layers}."

    def stored(self, name: str) -> tuple[str, ...]:
        return _stored(name, self.config, self.skeleton.transforms, self.there)


def parameter_specs(skeleton: Skeleton, config: Any, layers: int, kind: str, sizes: dict[str, int],
                    there: frozenset[str]) -> tuple[tuple[ParamSpec, ...], str, str]:
    """Parameter specs in module order, and why tp or pp are impossible; "" if they are not. layers: how many there are.
    kind: the name of the head. sizes: by name, as of a `Family`. there: names of the tensors of the directory."""
    tower, base, head = _parts(skeleton)
    tied = _is_tied(config, head)
    owner = config.get_text_config() if vision_family(config) else config  # of the plans of the layers
    declared = getattr(owner, "base_model_tp_plan", None) or PLANS.get(str(config.model_type)) or {}
    pipeline = list(getattr(owner, "base_model_pp_plan", None) or {})
    model = _Model(skeleton, config, layers, sizes, there, _styles(skeleton, config, declared, kind, tied),
                   frozenset({n for n, _, _ in skeleton.buffers} | skeleton.fixed))
    names = _fold(base, model.inner, layers)
    stages = _stages(names, model, pipeline, skeleton.embedding if tied and HEADS[kind].vocabulary else "")
    score = [(SCORE_WEIGHT, (1, sizes["hidden"]))]
    found = [*(_base_spec(model, name, shape, stage) for (name, shape), stage in zip(names, stages, strict=True)),
             *(_head_spec(model, name, shape) for name, shape in (head if HEADS[kind].vocabulary else score))]
    problems = [*([] if declared else ["its config has no tensor-parallel plan"]),
                *([WITHOUT_TP[str(config.model_type)]] if str(config.model_type) in WITHOUT_TP else []),
                *(problem for _, problem in found if problem)]
    specs = [*(_tower_spec(model, name, shape) for name, shape in tower), *(spec for spec, _ in found)]
    if problems:  # one whole copy on every rank: no style must look divided
        specs = [replace(s, split=None, style="experts" if s.experts else "replicated", partial_grad=False)
                 for s in specs]
    return tuple(specs), problems[0] if problems else "", _pp_problem(skeleton, config, bool(pipeline))


def _parts(skeleton: Skeleton) -> tuple[_Tensors, _Tensors, _Tensors]:
    """The parameters and buffers of the vision tower, of the text model, and of the head."""
    prefix = skeleton.prefix
    tensors = (*skeleton.params, *((n, shape) for n, shape, _ in skeleton.buffers))
    base = [(n, shape) for n, shape in tensors if n.startswith(prefix + ".")]
    tower = [(n, shape) for n, shape in tensors if _of_tower(n, prefix)]
    return tower, base, [(n, shape) for n, shape in tensors
                         if not n.startswith(prefix + ".") and not _of_tower(n, prefix)]


def _is_tied(config: Any, head: _Tensors) -> bool:
    """Whether the input embedding is the matrix of the head. A head may have more than that, as BERT's."""
    products = any(len(shape) == 2 and shape[0] == config.get_text_config().vocab_size for _, shape in head)
    return bool(getattr(config, "tie_word_embeddings", False)) and not products


def _styles(skeleton: Skeleton, config: Any, declared: Mapping[str, str], kind: str, tied: bool) -> dict[str, str]:
    """The tensor-parallel style of modules and parameters, by name. declared: the plan of the text model."""
    styles = dict(skeleton.tp_plan) | {f"{skeleton.prefix}.{k}": v for k, v in declared.items()}
    if not HEADS[kind].vocabulary:
        styles.pop("lm_head", None)
    elif tied and styles.get("lm_head") == "colwise_gather_output":  # the embedding is the head: divide it as such
        styles[skeleton.embedding.rpartition(".")[0]] = "embedding_rowwise"
    if getattr(config.get_text_config(), PER_LAYER, None):  # every layer reads its own embeddings, of all columns
        styles = {k: "" if "per_layer" in k else v for k, v in styles.items()}
    return styles


def _stages(names: _Tensors, model: _Model, pipeline: list[str], tied: str) -> list[StageKind]:
    """The pipeline stages that hold each parameter of the text model. pipeline: the modules of its pipeline-parallel
    plan. tied: the name of an embedding that is the head, too; "": none."""
    prefix, behind = model.skeleton.prefix + ".", False  # behind: the layers
    stages: list[StageKind] = []
    for name, _ in names:
        inner = name.removeprefix(prefix)
        in_layer = bool(layer_number(name, model.inner))
        behind = behind or in_layer
        if in_layer:
            stages.append("layer")
        elif name == tied:
            stages.append("ends")
        else:
            follows = _follows_layers(inner, inner.split(".")[0], pipeline, model.skeleton, behind)
            stages.append("last" if follows else "first")
    return stages


def _tower_spec(model: _Model, name: str, shape: tuple[int, ...]) -> ParamSpec:
    """Of the vision tower: whole on every rank of tp."""
    return ParamSpec(name, shape, "first", 0, None, "replicated", False, stored=model.stored(name),
                     buffer=name in model.buffers, float32=name in model.skeleton.float32)


def _base_spec(model: _Model, name: str, shape: tuple[int, ...], stage: StageKind) -> tuple[ParamSpec, str]:
    """Of the text model, and why tp cannot divide it; "" if it can."""
    number, first = layer_number(name, model.inner), name.replace("{}", "0", 1)
    count = model.skeleton.experts.get(first, 0)
    if count:
        split, problem = experts.division(name, shape, model.styles.get(_generic(name), ""))
        style, partial = "experts", False
    else:
        split, style, partial, problem = _division(name, shape, _style(name, model.styles), model.sizes)
        partial = partial or first not in model.buffers and _of_divided_columns(name, model.styles)
    return ParamSpec(name, shape, stage, model.layers if number == "{}" else 0, split, style, partial, count,
                     model.stored(name), layer=int(number) if number.isdigit() else -1,
                     buffer=first in model.buffers, float32=first in model.skeleton.float32,
                     float32_product=first in model.skeleton.float32_products), problem


def _head_spec(model: _Model, name: str, shape: tuple[int, ...]) -> tuple[ParamSpec, str]:
    """Of the head, and why tp cannot divide it; "" if it can."""
    split, style, partial, problem = _division(name, shape, _style(name, model.styles), model.sizes)
    return ParamSpec(name, shape, "last", 0, split, style, partial, stored=model.stored(name),
                     float32=name in model.skeleton.float32), problem


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


def _fold(params: _Tensors, inner: str, layers: int) -> _Tensors:
    """Parameters that every layer has with the same shape become one name with "{}"; all others stay. inner: how names
    of layers begin."""
    folded: dict[str, _Tensors] = {}
    for name, shape in params:
        number = layer_number(name, inner)
        folded.setdefault(inner + "{}" + name[len(inner + number) :] if number else name, []).append((name, shape))
    found: _Tensors = []
    for template, members in folded.items():
        same = "{}" in template and len(members) == layers and len({shape for _, shape in members}) == 1
        found += [(template, members[0][1])] if same else members
    return found


def layer_number(name: str, inner: str) -> str:
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


def _pp_problem(skeleton: Skeleton, config: Any, declared: bool) -> str:
    """Why a model cannot be divided into stages; "" if it can. declared: whether its config has a pipeline-parallel
    plan."""
    if getattr(config.get_text_config(), PER_LAYER, None):
        return "its layers read embeddings of their own, which the first stage makes"
    if not skeleton.execution.layers:
        return "it has no list of layers"
    if skeleton.shared:
        return "its layers share parameters"
    if not declared and skeleton.after_layers is None:
        return "it has no pipeline-parallel plan, and a trial does not show what follows its layers"
    return WITHOUT_PP.get(str(config.model_type), "")


def _style(name: str, styles: Mapping[str, str]) -> str:
    """The tensor-parallel style of a parameter's module, or of the parameter itself."""
    generic = _generic(name)
    return styles.get(generic.rpartition(".")[0]) or styles.get(generic) or ""


def _of_divided_columns(name: str, styles: Mapping[str, str]) -> bool:
    """Whether a parameter belongs to an activation, as xIELU's do, between weights that tp divides: a rank applies it
    to its own columns alone."""
    mlp, _, module = _generic(name).rpartition(".")[0].rpartition(".")
    return module.startswith("act") and any(k.rpartition(".")[0] == mlp and v == "colwise" for k, v in styles.items())


def _generic(name: str) -> str:
    """As plans of configs write it: "*" for numbers."""
    return re.sub(r"\.(\{\}|\d+)\.", ".*.", name)


def _division(name: str, shape: tuple[int, ...], style: str,
              sizes: Mapping[str, int]) -> _Division:
    """How tp divides a parameter of one module."""
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
