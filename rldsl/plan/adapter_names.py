"""Names of adapters, in a model and in PEFT's files (github.com/huggingface/peft).

In memory and in plans an adapter's factors stand under their module: "model.layers.0.mlp.up_proj.lora_A.weight". PEFT
puts the name of its wrapper before all of them. Nothing here depends on a rank.
"""

from __future__ import annotations

import re
from typing import Any

from rldsl.diag import internal_error
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.plan.model import Model

A, B = "lora_A.weight", "lora_B.weight"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WRAPPER = "base_model.model."
# modules of a model that reads images and not of its text model, which alone has adapters: for PEFT, which matches
# targets by the ends of names
TOWERS = r"model\.(?!language_model\.).*"


def module_of(name: str) -> str:
    """ "a.b.lora_A.weight" -> "a.b"; "" for a parameter that is no factor of an adapter."""
    return next((name.removesuffix(f".{end}") for end in (A, B) if name.endswith(f".{end}")), "")


def stored_name(name: str) -> str:
    """The key of a parameter in PEFT's file."""
    return _WRAPPER + name


def config(model: Model) -> dict[str, Any]:
    """What adapter_config.json says of a model with adapters."""
    if model.lora is None:
        raise internal_error(f"model {model.name} has no adapters")
    towers = any(p.stage == "first" and re.fullmatch(TOWERS, p.name.removesuffix(".weight")) for p in model.base
                 if p.name.removesuffix(".weight").rpartition(".")[2] in model.lora.targets)
    return ({"exclude_modules": TOWERS} if towers else {}) | {
        "peft_type": "LORA", "task_type": "CAUSAL_LM" if model.head.vocabulary else "SEQ_CLS",
        "base_model_name_or_path": model.path, "r": model.lora.r, "lora_alpha": model.lora.alpha, "lora_dropout": 0.0,
        "target_modules": list(model.lora.targets), "bias": "none", "fan_in_fan_out": model.lora.transposed,
        "modules_to_save": ["score"] if any(p.name == SCORE_WEIGHT for p in model.params) else None,
        "init_lora_weights": True, "inference_mode": True,
    }
