"""Families whose numbers would be others here: they compute with more than parameters and attention over packed
sequences.

In: the skeleton of a model and its config. Out: nothing, or RL0303 that says why the family is refused. Everything
else that transformers calls a causal language model runs its own code.
"""

from __future__ import annotations

from typing import Any

from rldsl.diag import fail
from rldsl.models.skeleton import Skeleton
from rldsl.source import Span

HELP = ("use a family with standard attention and feed-forward or expert layers, such as Llama, Qwen, Gemma, Mistral, "
        "Mixtral or Qwen3-MoE")


def check(skeleton: Skeleton, config: Any, path: str, span: Span | None) -> None:
    if why := _problem(skeleton, config.get_text_config()):
        raise fail("RL0303", f'the family {config.model_type} of "{path}" is not supported', span, why, help=HELP)


def _problem(skeleton: Skeleton, text: Any) -> str:
    if skeleton.stateful:
        return "its layers carry a recurrent state, which packed sequences would share"
    if not skeleton.attention_backend:
        return "its custom attention would cross the boundaries of packed sequences"
    if getattr(text, "attention_chunk_size", None):
        return "its attention works on chunks of a sequence"
    if getattr(text, "kv_lora_rank", None):
        return "it uses multi-head latent attention"
    kept = next(iter(skeleton.buffers), "")
    return f"it has the buffers {kept}, which are neither trained nor moved" if kept else ""
