"""The shapes of `benchmarks/bound.py`: models and steps drawn by seed, so that nothing is tuned to one of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALLEST, LARGEST = 0.5e6, 50e6  # parameters
FEWEST, MOST = 16, 512           # tokens of a response
BUDGET = 6e10                    # multiplications and additions of a forward pass over all tokens, at most


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and the work of one step."""

    model: dict[str, Any]  # options of the config, with "family"; empty: a directory that exists
    prompts: int           # different ones, of a quarter of `prompt` to `prompt` tokens
    n: int                 # samples of each
    prompt: int            # tokens, at most
    tokens: int            # of a response, at most

    @property
    def name(self) -> str:
        m = self.model
        model = f"{m['hidden_size']}x{m['num_hidden_layers']} {m['num_attention_heads']}/{m['num_key_value_heads']}" \
            f"x{m['head_dim']} V={m['vocab_size']}{' tied' if m['tie_word_embeddings'] else ''}, " if m else ""
        return f"{model}{self.prompts}x{self.n} of {self.prompt}+{self.tokens}"


def parameters(m: dict[str, Any]) -> int:
    """Of a decoder with gated projections, without its norms."""
    hidden, heads, kv, width = (m[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    layer = hidden * (2 * heads + 2 * kv) * width + 3 * hidden * m["intermediate_size"]
    return m["num_hidden_layers"] * layer + (1 if m["tie_word_embeddings"] else 2) * m["vocab_size"] * hidden


def drawn(seed: int, count: int, budget: float = BUDGET) -> list[Shape]:
    """Shapes whose models' sizes lie in `count` equal parts of the logarithm of the range, one in each."""
    draw, found = random.Random(seed), []
    for i in range(count):
        low, high = (SMALLEST * (LARGEST / SMALLEST) ** (j / count) for j in (i, i + 1))
        while True:
            shape = _any(draw)
            size = parameters(shape.model)
            total = 2 * size * shape.prompts * shape.n * (shape.prompt + shape.tokens)
            if low <= size <= high and total <= budget:
                found.append(shape)
                break
    return found


def _any(draw: random.Random) -> Shape:
    hidden, width = draw.choice((64, 96, 128, 192, 256, 320, 384, 512, 640, 768)), draw.choice((16, 32, 64))
    heads = max(1, hidden // width)
    kv = draw.choice([k for k in range(1, heads + 1) if heads % k == 0 and heads // k <= 8])
    model = dict(family=draw.choice(("qwen3", "llama")), hidden_size=hidden, num_hidden_layers=draw.randint(2, 10),
                 num_attention_heads=heads, num_key_value_heads=kv, head_dim=width,
                 intermediate_size=16 * round(hidden * draw.choice((2, 2.75, 4)) / 16),
                 vocab_size=draw.choice((64, 512, 2048, 8192, 32768)), tie_word_embeddings=draw.random() < 0.5)
    tokens = round(FEWEST * (MOST / FEWEST) ** draw.random())
    return Shape(model, draw.choice((2, 4, 8, 16)), draw.choice((4, 8)), max(8, round(tokens * draw.choice((0.25, 0.5, 1)))),
                 tokens)


def directory(shape: Shape, where: Path) -> str:
    """A random model of the shape, with a tokenizer."""
    from examples.tiny import make_model

    options = {k: v for k, v in shape.model.items() if k != "family"}
    return str(make_model(where, shape.model["family"], scale=0.05, max_position_embeddings=2 * MOST, **options))


def prompt_lengths(shape: Shape, seed: int) -> Sequence[int]:
    draw = random.Random(seed)
    return [draw.randint(max(1, shape.prompt // 4), shape.prompt) for _ in range(shape.prompts)]
