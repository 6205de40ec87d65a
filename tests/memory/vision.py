"""Programs with images whose runs reach the bounds of their plans: prompts of pictures, with little text."""

from __future__ import annotations

from pathlib import Path

from examples.tiny import make_vision_model, write_jsonl
from tests.images.models import gemma3
from tests.images.pictures import picture
from tests.memory.plans import GRPO

WIDE = dict(hidden_size=192, intermediate_size=384, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
            max_position_embeddings=1024)
SIDES = {"qwen2_5_vl": 64, "gemma3": 48}  # of a picture
TOWERS = {"qwen2_5_vl": "model.visual.*", "gemma3": "model.[vm][iu]*"}
TOKENS = {"qwen2_5_vl": 64, "gemma3": 42}  # of a picture, with what the processor writes around it
PLACEHOLDERS = {"qwen2_5_vl": 64, "gemma3": 36}  # of these, tokens of the image


def make_wide(directory: Path, family: str) -> None:
    if family == "gemma3":
        gemma3(directory, text=WIDE | dict(head_dim=32, query_pre_attn_scalar=32),
               vision=dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                           image_size=48), tokens=36)
    else:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
        make_vision_model(directory, scale=0.0, max_pixels=64 * 64, **WIDE, rope_parameters=rope,
                          tower=dict(depth=3, hidden_size=128, intermediate_size=256, num_heads=4))


def vision_program(folder: Path, family: str, batch: int = 4, n: int = 2, response: int = 8, images: int = 2,
                   limited: bool = False, freeze: bool = False, dtype: str = "float32", world: int = 1, place: str = "",
                   adapters: str = "") -> Path:
    """GRPO on prompts of `images` pictures, in `folder`, which is the working directory. limited: whether the
    data says how many tokens the pictures of a row have."""
    from transformers import AutoTokenizer

    make_wide(folder / "m", family)
    rows = []
    for i in range(2 * batch):
        names = [f"{i}_{j}.png" for j in range(images)]
        for j, name in enumerate(names):
            picture(SIDES[family], SIDES[family], seed=97 * i + j).save(folder / name)
        parts = [*({"type": "image"} for _ in names), {"type": "text", "text": "abc"[i % 3]}]
        rows.append({"prompt": [{"role": "user", "content": parts}], "images": names})
    write_jsonl(folder / "prompts.jsonl", rows)
    tokens = AutoTokenizer.from_pretrained(folder / "m").apply_chat_template(
        rows[0]["prompt"], add_generation_prompt=True, return_dict=False)
    text = GRPO.format(batch=batch, prompt=len(tokens) + images * (TOKENS[family] - 1), dtype=dtype, adapters=adapters,
                       n=n, response=response, sampling="temperature=1", minibatches=1, more="")
    limit = f", max_image_tokens={images * PLACEHOLDERS[family]}" if limited else ""
    text = text.replace('batch=', f'images="images"{limit}, batch=', 1)
    if freeze:
        text = text.replace("adamw(lr=1e-4)", f'adamw(lr=1e-4, freeze="{TOWERS[family]}")')
    program = folder / "run.rlf"
    program.write_text(f"cluster nodes=1 gpus={world}\n{text}\n{place}\n")
    return program
