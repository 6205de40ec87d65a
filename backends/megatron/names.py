"""Where the parameters of HuggingFace models are in Megatron's GPTModel: one table for each model family.

A key is a tensor of GPTModel; "{}" is the layer within its chunk. The value is the HuggingFace parameters whose rows
make it up, one after another. On a rank each of them is the boxes that the plan gives this rank, under every division
by tp, pp and ep, so a tensor of Megatron consists of boxes and nothing else, and whatever moves, loads or saves boxes
writes into it. "{expert}" stands for the experts of a rank: each is one slice of dimension 0.

The rows of `linear_qkv` are in this order, queries before keys before values, and not by query groups: the layer spec's
attention (`model.py`) reads them so. The vocabulary needs no padding rows, since embedding and head take the boxes as
they are, even or not.
"""

from __future__ import annotations

from collections.abc import Mapping

Table = Mapping[str, tuple[str, ...]]
LAYER, EXPERT = "{}", "{expert}"

ENDS: Table = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
}
ATTENTION: Table = {
    "decoder.layers.{}.input_layernorm.weight": ("model.layers.{}.input_layernorm.weight",),
    "decoder.layers.{}.self_attention.linear_qkv.weight": (
        "model.layers.{}.self_attn.q_proj.weight",
        "model.layers.{}.self_attn.k_proj.weight",
        "model.layers.{}.self_attn.v_proj.weight"),
    "decoder.layers.{}.self_attention.linear_proj.weight": ("model.layers.{}.self_attn.o_proj.weight",),
    "decoder.layers.{}.pre_mlp_layernorm.weight": ("model.layers.{}.post_attention_layernorm.weight",),
}
ATTENTION_BIAS: Table = {
    "decoder.layers.{}.self_attention.linear_qkv.bias": (
        "model.layers.{}.self_attn.q_proj.bias",
        "model.layers.{}.self_attn.k_proj.bias",
        "model.layers.{}.self_attn.v_proj.bias"),
}
HEAD_NORMS: Table = {
    "decoder.layers.{}.self_attention.q_layernorm.weight": ("model.layers.{}.self_attn.q_norm.weight",),
    "decoder.layers.{}.self_attention.k_layernorm.weight": ("model.layers.{}.self_attn.k_norm.weight",),
}
MLP: Table = {
    "decoder.layers.{}.mlp.linear_fc1.weight": (
        "model.layers.{}.mlp.gate_proj.weight",
        "model.layers.{}.mlp.up_proj.weight"),
    "decoder.layers.{}.mlp.linear_fc2.weight": ("model.layers.{}.mlp.down_proj.weight",),
}
OTHER_BIASES: Table = {
    "decoder.layers.{}.self_attention.linear_proj.bias": ("model.layers.{}.self_attn.o_proj.bias",),
    "decoder.layers.{}.mlp.linear_fc1.bias": (
        "model.layers.{}.mlp.gate_proj.bias",
        "model.layers.{}.mlp.up_proj.bias"),
    "decoder.layers.{}.mlp.linear_fc2.bias": ("model.layers.{}.mlp.down_proj.bias",),
}
EXPERTS: Table = {
    "decoder.layers.{}.mlp.router.weight": ("model.layers.{}.mlp.gate.weight",),
    "decoder.layers.{}.mlp.experts.local_experts.{expert}.linear_fc1.weight": (
        "model.layers.{}.mlp.experts.gate_up_proj",),
    "decoder.layers.{}.mlp.experts.local_experts.{expert}.linear_fc2.weight": (
        "model.layers.{}.mlp.experts.down_proj",),
}

# by `model_type`; rows of a table whose parameters a model has not are left out
FAMILIES: Mapping[str, Table] = {
    "llama": {**ENDS, **ATTENTION, **ATTENTION_BIAS, **MLP, **OTHER_BIASES},
    "mistral": {**ENDS, **ATTENTION, **MLP},
    "qwen2": {**ENDS, **ATTENTION, **ATTENTION_BIAS, **MLP},
    "qwen3": {**ENDS, **ATTENTION, **HEAD_NORMS, **MLP},
    "mixtral": {**ENDS, **ATTENTION, **EXPERTS},
    "qwen3_moe": {**ENDS, **ATTENTION, **HEAD_NORMS, **EXPERTS},
}
# where all experts of a rank are one module (`te_layers.py`), whose weights are numbered
GROUPED_EXPERTS: Mapping[str, str] = {
    f"decoder.layers.{{}}.mlp.experts.local_experts.{EXPERT}.{linear}.weight":
        f"decoder.layers.{{}}.mlp.experts.{linear}.weight{EXPERT}" for linear in ("linear_fc1", "linear_fc2")}
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def table_of(family: str, grouped_experts: bool) -> Table:
    """grouped_experts: whether all experts of a rank are one module."""
    return {GROUPED_EXPERTS.get(key, key) if grouped_experts else key: parts for key, parts in FAMILIES[family].items()}


def mapped_parameters(table: Table) -> set[str]:
    """All HuggingFace parameters that GPTModel has."""
    return {part for parts in table.values() for part in parts}
