"""The skeletons of common dense families, without building their modules, which takes two thirds of the time in which a
model is described: the modules of transformers import much that a description does not need.

In: a config as transformers reads it. Out: the `Skeleton` that `skeleton.build` makes of it, or None where that is not
certain. It is certain where the installed code of the family is the code that was compared (its sha256 is in `SOURCES`;
tests/compiler/test_known.py compares every switch of it with the modules), and nothing in the config is out of the
ordinary: no key that the family does not have, and only values for which the modules can be built.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rldsl.models.execution import Execution
from rldsl.models.rotary import has_odd_head
from rldsl.models.skeleton import LinearModule, Skeleton

# sha256 of the sources that decide what modules a family has, of each release that was compared: 5.23.0
SOURCES = {
    "llama": frozenset({"3c0f5ffcd91ed7b11cfd964cb761f090eadf22cf5f20d3b92b99a4810c079bfb"}),
    "mistral": frozenset({"28d2fc82fb9b17fbc753a2c33ef1decebcdef9a5010810623bf3b0328cafedcc"}),
    "qwen2": frozenset({"d281ba762bda7990abe657d2da990185da54ac8a661b95d80185a895ac25cbf0"}),
    "qwen3": frozenset({"ab88e8a65a00a9eb3bc2d9efdd1c034d7b1242bf5a5bd20d8130c431137ea4a9"}),
}
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu", "silu")
DTYPES = ("None", "bfloat16", "float16", "float32")
ROPE = {"default": {"rope_theta"},  # rope_type -> the numbers that it needs
        "llama3": {"rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}}
LAYER_TYPES = {"full_attention", "sliding_attention"}


class _Module(NamedTuple):
    """A module with a weight, and perhaps a bias."""

    name: str  # dotted
    shape: tuple[int, ...]  # of the weight
    bias: bool = False  # whether it has one


def skeleton(config: Any) -> Skeleton | None:
    """The skeleton of the model of `config`; None: it must be built."""
    family = str(config.model_type)
    if family not in SOURCES or installed(family) not in SOURCES[family] or not _ordinary(config):
        return None
    layers = [_Module(f"model.layers.{i}.{m.name}", m.shape, m.bias)
              for i in range(config.num_hidden_layers) for m in _layer(family, config)]
    matrix = (config.vocab_size, config.hidden_size)
    embedding, head = _Module("model.embed_tokens", matrix), _Module("lm_head", matrix)
    norm = _Module("model.norm", (config.hidden_size,))
    params = [p for m in (embedding, *layers, norm) for p in _params(m)]
    return Skeleton(
        prefix="model",
        tp_plan={"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"},
        params=tuple(params if config.tie_word_embeddings else [*params, *_params(head)]),
        linears=tuple(LinearModule(m.name, m.shape[1], m.shape[0], False) for m in (*layers, head)
                      if len(m.shape) == 2),
        embedding="model.embed_tokens.weight",
        buffers=(), execution=Execution("layers", config.num_hidden_layers, (), "", 0),
        after_layers=frozenset({"norm"}), shared=frozenset(), experts={}, transforms=(),
        gated_products=config.hidden_act == "silu", rotates_halves=True)


def _params(module: _Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{module.name}.weight", module.shape
    if module.bias:
        yield f"{module.name}.bias", module.shape[:1]


def _layer(family: str, config: Any) -> Iterator[_Module]:
    """The modules of a layer that have parameters, in module order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    everywhere = family in ("llama", "qwen3") and config.attention_bias
    inputs = everywhere or family == "qwen2"
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield _Module(f"self_attn.{name}", (rows, hidden), inputs)
    yield _Module("self_attn.o_proj", (hidden, queries), everywhere)
    if family == "qwen3":
        yield _Module("self_attn.q_norm", (width,))
        yield _Module("self_attn.k_norm", (width,))
    bias = family == "llama" and config.mlp_bias
    for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
        yield _Module(f"mlp.{name}", shape, bias)
    yield _Module("input_layernorm", (hidden,))
    yield _Module("post_attention_layernorm", (hidden,))


@cache
def installed(family: str) -> str:
    """sha256 of the installed sources that decide what modules a family has; "" without transformers."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return ""
    folder = Path(spec.origin).parent
    files = (f"models/{family}/configuration_{family}.py", f"models/{family}/modeling_{family}.py",
             "models/auto/modeling_auto.py", "conversion_mapping.py", "configuration_utils.py", "modeling_utils.py",
             "distributed/mixin.py")
    try:
        return sha256(b"\0".join((folder / file).read_bytes() for file in files)).hexdigest()
    except OSError:
        return ""


def _ordinary(config: Any) -> bool:
    """Whether the modules can certainly be built of it, so that no refusal is missed."""
    if not type(config).__module__.startswith("transformers.models."):
        return False
    values = config.to_dict()
    if not values.keys() <= type(config)().to_dict().keys() | {"_name_or_path", "architectures", "rope_parameters"}:
        return False
    sizes = [config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads,
             config.num_key_value_heads, config.vocab_size]
    width = getattr(config, "head_dim", None)
    if not all(_size(x) for x in sizes) or width is not None and not _size(width):
        return False
    pad, kinds = config.pad_token_id, getattr(config, "layer_types", None)
    return (config.hidden_act in ACTIVATIONS
            and str(config.dtype).removeprefix("torch.") in DTYPES
            and getattr(config, "_attn_implementation", None) in (None, "eager", "sdpa")
            and (pad is None or type(pad) is int and 0 <= pad < config.vocab_size)
            and (kinds is None or len(kinds) == config.num_hidden_layers and set(kinds) <= LAYER_TYPES)
            and all(type(getattr(config, name, False)) is bool
                    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"))
            and _ordinary_rope(config.rope_parameters)
            and not has_odd_head(values))


def _size(value: Any) -> bool:
    return type(value) is int and value > 0


def _ordinary_rope(rope: Any) -> bool:
    """Known positions, with all numbers that they need and none that they do not."""
    if not isinstance(rope, dict):
        return False
    numbers = {k: v for k, v in rope.items() if k != "rope_type"}
    return (numbers.keys() == ROPE.get(str(rope.get("rope_type")))
            and all(type(v) in (int, float) and 0 < v < float("inf") for v in numbers.values()))
