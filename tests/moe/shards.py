"""Tiny mixture-of-experts models."""

from __future__ import annotations

from pathlib import Path

from tests.tiny import make_model

FAMILIES = {
    "mixtral": ("mixtral", dict(num_local_experts=4, num_hidden_layers=2)),
    "qwen3_moe": ("qwen3_moe", dict(num_experts=8, moe_intermediate_size=24, num_experts_per_tok=3, num_hidden_layers=2,
                                    norm_topk_prob=True)),
    "shared": ("qwen2_moe", dict(num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=16,
                                 num_experts_per_tok=2, num_hidden_layers=2)),
}


def make(directory: Path, name: str, head: str = "causal_lm", **more: object) -> str:
    family, sizes = FAMILIES[name]
    return str(make_model(directory, family, head, **{**sizes, **more}))
