"""Shards on Megatron in gloo worlds, and tiny models of its families. What the library asks CUDA for is put on the CPU
here, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.plan.backends import described, lacking
from rldsl.plan.model import Layout, Model
from tests import world
from tests.backend_torch import shards
from tests.tiny import make_model

LOADED = "rldsl.backends.megatron.shard"
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=8)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(attention_bias=True, mlp_bias=True, num_hidden_layers=2),
    "linear": dict(family="llama", rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
    "llama3": dict(family="llama", max_position_embeddings=32, rope_parameters=LLAMA3),
    "yarn": dict(family="qwen3", max_position_embeddings=32, rope_parameters=YARN),
    "mistral": dict(sliding_window=3, num_hidden_layers=3),  # stages of one and of two layers
    "qwen2": dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=3, max_window_layers=1,
                  num_hidden_layers=2),
    "qwen3": {},
    "mixtral": dict(num_local_experts=4, num_hidden_layers=2),
    "qwen3_moe": dict(num_experts=8, moe_intermediate_size=24, num_experts_per_tok=3, num_hidden_layers=2,
                      norm_topk_prob=False),
}


def needed() -> None:
    """Skip a module, or a test, where the library is missing; where it is not, worlds load it once."""
    known = described("megatron")
    if known is None or lacking(known):
        pytest.skip("megatron-core is not installed: pip install 'rldsl[megatron]'", allow_module_level=True)
    if LOADED not in world._PRELOAD:
        world._PRELOAD.append(LOADED)


def on_cpu() -> None:
    """Buffers of tensor parallelism are made on the device that is current."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


def make(folder: Path, name: str, head: str = "causal_lm") -> str:
    options = dict(FAMILIES[name])
    return str(make_model(folder / f"{name}-{head}", options.pop("family", name), head, **options))


def layout_of(**degrees: int) -> Layout:
    return Layout("L0", "m0", backend="megatron", **degrees)


def shard_of(model: Model, layout: Layout, rank: int, trainable: bool = False) -> tuple[Any, int] | None:
    """As `backend_torch.shards.shard_of`."""
    on_cpu()
    return shards.shard_of(model, layout, rank, trainable)
