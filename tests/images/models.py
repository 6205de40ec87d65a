"""Tiny random models of the families that read images, each with its tokenizer, chat template and image processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from examples.tiny import CHARACTERS, make_tokenizer, make_vision_model

TEMPLATE = """{% for m in messages %}<|start|>{{ m.role }}
{% for part in m.content %}{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}<eos>
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TEXT = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=None)


def make(directory: Path, family: str) -> Path:
    return MAKERS[family](directory)


def qwen2_vl(directory: Path) -> Path:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor

    _, ids = _tokenizer(directory, "<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>", "<|video_pad|>",
                        "<|vision_start|>", "<|vision_end|>")
    text = TEXT | dict(rope_parameters=ROPE | {"mrope_section": [1, 1, 2]}, vocab_size=60, tie_word_embeddings=False)
    vision = dict(depth=2, embed_dim=32, hidden_size=32, mlp_ratio=2, num_heads=2, patch_size=4, spatial_merge_size=2)
    _model(directory, "qwen2_vl", text_config=text, vision_config=vision, image_token_id=ids[0], video_token_id=ids[1],
           vision_start_token_id=ids[2], vision_end_token_id=ids[3], tie_word_embeddings=False)
    return _processor(directory, Processor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}))


def qwen3_vl(directory: Path) -> Path:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor

    _, ids = _tokenizer(directory, "<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>", "<|video_pad|>",
                        "<|vision_start|>", "<|vision_end|>")
    text = TEXT | dict(rope_parameters=ROPE | {"mrope_section": [2, 1, 1]}, vocab_size=60, head_dim=8)
    vision = dict(depth=3, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, spatial_merge_size=2,
                  out_hidden_size=32, num_position_embeddings=36, deepstack_visual_indexes=[0])
    _model(directory, "qwen3_vl", text_config=text, vision_config=vision, image_token_id=ids[0], video_token_id=ids[1],
           vision_start_token_id=ids[2], vision_end_token_id=ids[3], tie_word_embeddings=False)
    return _processor(directory, Processor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}))


def gemma3(directory: Path, text: Mapping[str, Any] = MappingProxyType({}),
           vision: Mapping[str, Any] = MappingProxyType({}), tokens: int = 9) -> Path:
    """text, vision: other sizes. tokens: of an image."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil as Processor

    _, ids = _tokenizer(directory, "<boi>", "<image>", "<boi>", "<eoi>")
    text = TEXT | dict(vocab_size=60, head_dim=8, query_pre_attn_scalar=8, sliding_window=6, tie_word_embeddings=True) | text
    text["layer_types"] = (["sliding_attention", "full_attention"] * 2)[: text["num_hidden_layers"]]
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=24,
                  patch_size=4) | vision
    _model(directory, "gemma3", text_config=text, vision_config=vision, image_token_index=ids[0],
           boi_token_index=ids[1], eoi_token_index=ids[2], mm_tokens_per_image=tokens)
    side = vision["image_size"]
    return _processor(directory, Processor(size={"height": side, "width": side}))


def llava(directory: Path) -> Path:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil as Processor

    _, ids = _tokenizer(directory, "<image>", "<image>")
    text = TEXT | dict(model_type="llama", vocab_size=60, rope_parameters=ROPE)
    vision = dict(model_type="clip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                  num_attention_heads=2, image_size=16, patch_size=4, projection_dim=32)
    _model(directory, "llava", text_config=text, vision_config=vision, image_token_index=ids[0], image_seq_length=16)
    return _processor(directory, Processor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}))


def _tokenizer(directory: Path, marker: str, *tokens: str) -> tuple[Any, list[int]]:
    made = make_tokenizer(directory, CHARACTERS + "\n", TEMPLATE.replace("MARKER", marker), ("<|start|>", *tokens))
    return made, made.convert_tokens_to_ids(list(tokens))


def _model(directory: Path, family: str, **config: Any) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(directory)


def _processor(directory: Path, processor: Any) -> Path:
    processor.save_pretrained(directory)
    return directory


MAKERS = {"qwen2_5_vl": make_vision_model, "qwen2_vl": qwen2_vl, "qwen3_vl": qwen3_vl,
          "gemma3": gemma3, "llava": llava}
