"""Creates tiny models and data for the examples: HuggingFace directories and data files.

    python examples/tiny.py runs/tiny        # models/sft, models/chat, data/prompts.jsonl, data/pairs.jsonl, ...
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+-*=abcdefghijklmnopqrstuvwxyz ?.,"
PAD, EOS = "<pad>", "<eos>"
# of a chat model: tokens besides characters, the last of which end a turn, and a template that only adds. It writes
# tools by name alone, since every character is a token
CHAT_TOKENS = ("<|start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = """{% if tools %}<|start|>tools{% for tool in tools %} {{ tool.function.name }}{% endfor %}
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>
{%- else %}<|start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments":
{{- ' ' }}{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<eos>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""

_SIZES: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
                              num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False)
_GPT2: dict[str, Any] = dict(n_embd=32, n_layer=4, n_head=4, n_positions=256)


def make_tokenizer(directory: str | Path, characters: str = CHARACTERS, chat: str = "",
                   tokens: tuple[str, ...] = CHAT_TOKENS) -> Any:
    """A tokenizer with one token per character, after <pad> (0) and <eos> (1). chat: a chat template, which may have
    `tokens`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {PAD: 0, EOS: 1} | {c: i + 2 for i, c in enumerate(characters)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]" if chat else "."), "isolated")
    raw.decoder = decoders.Fuse()
    more = {"additional_special_tokens": [t for t in tokens if t in chat or tokens is not CHAT_TOKENS]} if chat else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=PAD, eos_token=EOS, **more)
    if chat:
        tokenizer.chat_template = chat
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def make_model(directory: str | Path, family: str = "qwen3", head: str = "causal_lm", seed: int = 0,
               characters: str = CHARACTERS, scale: float = 0.15, chat: str = "", **overrides: Any) -> Path:
    """Write a random model of `family` ("qwen3", "llama", "gpt2", ...) with its tokenizer; returns the directory.

    chat: see `make_tokenizer`. scale: standard deviation of the matrices (0: the family's own initialization). HF's
    0.02 leaves a tiny model's outputs nearly uniform; a wider one makes differences visible."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    tokenizer = make_tokenizer(directory, characters, chat)
    sizes = dict(_GPT2 if family == "gpt2" else _SIZES)
    if family == "qwen3":
        sizes["head_dim"] = 8
    sizes |= dict(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, bos_token_id=None) | overrides
    config = AutoConfig.for_model(family, **sizes)
    torch.manual_seed(seed)
    if head == "causal_lm":
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    _widen(model, scale)
    model.save_pretrained(str(directory))
    return Path(directory)


# of a model that reads images: the tokens around an image, and a template that only adds
VISION_TOKENS = ("<|start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
VISION_TEMPLATE = """{% for m in messages %}<|start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""


def make_vision_model(directory: str | Path, seed: int = 0, characters: str = CHARACTERS + "\n", scale: float = 0.15,
                      patch: int = 4, tower: dict[str, Any] | None = None, max_pixels: int = 32 * 32,
                      **overrides: Any) -> Path:
    """Write a random Qwen2.5-VL model with its tokenizer and image processor; returns the directory.

    patch: side of a patch in pixels, four of which are one token. tower: sizes of the vision tower. max_pixels: of an
    image; larger ones are scaled down. Otherwise as `make_model`."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer(directory, characters, VISION_TEMPLATE, VISION_TOKENS)
    ids = dict(zip(VISION_TOKENS, tokenizer.convert_tokens_to_ids(list(VISION_TOKENS)), strict=True))
    text = dict(_SIZES) | dict(
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, bos_token_id=None) | overrides
    vision = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=patch, spatial_merge_size=2,
                  temporal_patch_size=2, window_size=4 * patch, out_hidden_size=text["hidden_size"],
                  fullatt_block_indexes=[1]) | (tower or {})
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=bool(text["tie_word_embeddings"]),
        pad_token_id=0, eos_token_id=1)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _widen(model, scale)
    model.save_pretrained(str(directory))
    Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, temporal_patch_size=2,
                             size={"shortest_edge": 4 * patch * patch, "longest_edge": max_pixels},
                             ).save_pretrained(str(directory))
    return Path(directory)


def _widen(model: Any, scale: float) -> None:
    """Draw the matrices of a model with a standard deviation of `scale`; 0: they stay as they are."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters() if scale else ():
            if parameter.dim() > 1:
                parameter.normal_(0.0, scale)


def write_jsonl(path: str | Path, rows: Iterable[dict[str, Any]]) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path(path)


def make_sums(count: int, seed: int = 0, low: int = 0, high: int = 100) -> list[dict[str, str]]:
    """`count` different sums as text: {"prompt": "12+34=", "answer": "46"}; prompts differ in length."""
    pairs = [(a, b) for a in range(low, high) for b in range(low, high)]
    random.Random(seed).shuffle(pairs)
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs[:count]]


def make_pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Preference pairs: the right sum is chosen, a wrong one (sometimes of another length) rejected."""
    draw = random.Random(seed + 1)
    sums = [(row["prompt"], row["answer"]) for row in make_sums(count, seed)]
    return [{"prompt": p, "chosen": right, "rejected": str(int(right) + draw.randint(1, 99))} for p, right in sums]


def make_rated(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs with a margin: the error of the rejected sum."""
    rows = make_pairs(count, seed)
    return [row | {"margin": (int(row["rejected"]) - int(row["chosen"])) / 100} for row in rows]


def make_labelled(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Answers that are right (label 1) or wrong (0), each with an answer to another prompt."""
    rows = make_pairs(count, seed)
    answers = [row["chosen"] if i % 2 else row["rejected"] for i, row in enumerate(rows)]
    return [{"prompt": row["prompt"], "answer": answers[i], "mismatched": answers[i - 1], "label": i % 2}
            for i, row in enumerate(rows)]


def make_calculations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """For a calculator: {"prompt": "(12 + 3) * 4", "answer": 60}."""
    draw = random.Random(seed)
    triples = [[draw.randint(2, 99) for _ in range(3)] for _ in range(count)]
    return [{"prompt": f"({a} + {b}) * {c}", "answer": (a + b) * c} for a, b, c in triples]


def make_words(count: int, seed: int = 0) -> list[dict[str, str]]:
    """For a word-guessing game: {"prompt", "word"}."""
    words = "apple beach chair dance eagle flame grape house igloo joker knife lemon mango night ocean piano".split()
    draw = random.Random(seed)
    return [{"prompt": "Guess a word of 5 letters.", "word": draw.choice(words)} for _ in range(count)]


def make_repairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """For code repair: {"prompt", "tests"}, with one of three mistakes each."""
    draw = random.Random(seed)
    kinds = (("total", "Add the numbers of a list.", "def total(xs):\n    return xs[0]",
              ["assert total([1, 2, 3]) == 6", "assert total([]) == 0"]),
             ("last", "Return the last character of a text, or '' if it is empty.", "def last(t):\n    return t[0]",
              ["assert last('abc') == 'c'", "assert last('') == ''"]),
             ("even", "Whether a number is even.", "def even(n):\n    return n % 2",
              ["assert even(4) is True", "assert even(7) is False"]))
    chosen = [draw.choice(kinds) for _ in range(count)]
    return [{"prompt": f"{what} Repair this code:\n{code}\n", "tests": tests} for _, what, code, tests in chosen]


def make_all(root: str | Path, **overrides: Any) -> Path:
    """Write every model and data file that the examples use by default, under `root`."""
    root = Path(root)
    for seed, name in enumerate(("sft", "base", "teacher")):
        make_model(root / "models" / name, seed=seed, **overrides)
    make_model(root / "models/chat", seed=3, characters=string.printable, chat=CHAT_TEMPLATE,
               **{"max_position_embeddings": 8192} | overrides)
    make_model(root / "models/rm", head="reward_model", seed=1, **overrides)
    for name, rows in (("prompts", make_sums(256)), ("heldout", make_sums(32, seed=1)), ("answers", make_sums(256)),
                       ("pairs", make_pairs(256)), ("rated_pairs", make_rated(256)), ("labelled", make_labelled(256)),
                       ("calculations", make_calculations(256)), ("words", make_words(256)),
                       ("repairs", make_repairs(64))):
        write_jsonl(root / "data" / f"{name}.jsonl", rows)
    return root


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write tiny random models and data for the examples.")
    parser.add_argument("folder", nargs="?", default="runs/tiny", help="output directory (default: runs/tiny)")
    made = make_all(parser.parse_args().folder)
    print(f"wrote {made / 'models'} and {made / 'data'}")
