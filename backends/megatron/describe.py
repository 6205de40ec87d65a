"""What the megatron backend can express, as the compiler and the verifier know it.

In: facts of a model, and a layout. Out: `DESCRIPTION`, and which feature of a model Megatron's GPTModel, as `names.py`
and `model.py` build it, does not have. Nothing here imports torch or megatron.
"""

from __future__ import annotations

import json
import re
from typing import Any, get_args

from rldsl.backends.megatron.names import FAMILIES, mapped_parameters
from rldsl.plan.backends import Description, Facts
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.plan.model import Layout, OptimizerKind

ROPES = ("default", "linear", "llama3", "yarn")  # angles that depend only on the position


def problem(facts: Facts, layout: Layout) -> str:
    """The first feature that cannot be expressed, or ""."""
    if facts.name not in FAMILIES:
        return f"the family {facts.name}; supported families: {', '.join(FAMILIES)}"
    config: dict[str, Any] = {key: json.loads(text) for key, text in facts.config}
    names = {spec.name for spec in facts.params}
    rope = config.get("rope_parameters") or {}
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        return f"the activation `{activation}`"
    if rope.get("rope_type", "default") not in ROPES:
        return f"rope scaling of type `{rope['rope_type']}`; supported types: {', '.join(ROPES)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "rotary embeddings on only part of each head"
    if any(re.search(r"\.\d+\.", name) for name in names):
        return "layers that are not all the same"
    if others := sorted(names - mapped_parameters(FAMILIES[facts.name]) - {SCORE_WEIGHT}):
        return f"the parameter {others[0]}"
    width = config.get("moe_intermediate_size") or config.get("intermediate_size") or layout.tp
    if width % layout.tp:
        return f"an intermediate size of {width}, which tp={layout.tp} does not divide,"
    if config.get("num_experts_per_tok", 2) == 1:
        return "a single expert per token"
    biases = {name.split(".")[-2] for name in names if name.endswith("_proj.bias")}
    if "o_proj" in biases and "down_proj" not in biases:
        return "biases in all attention layers (`attention_bias`) without biases in the MLP (`mlp_bias`)"
    if "down_proj" in biases and "o_proj" not in biases:
        return "biases in the MLP (`mlp_bias`) without biases in attention (`attention_bias`)"
    return ""


DESCRIPTION = Description(
    zero=1, adapters=False, entries=True, first_pass=True, optimizers=get_args(OptimizerKind), groups=True,
    needs=("megatron.core", "pip install 'rldsl[megatron]'"), versions=("megatron-core", "0.16", "0.17"),
    problem=problem)
