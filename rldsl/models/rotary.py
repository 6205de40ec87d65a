"""Rotary position embeddings: configs that rotate an odd number of dimensions, and which forwards rotate halves.

In: a model on the meta device and its config. Out: why it cannot run, or "". transformers refuses some configs with an
odd number of dimensions when it reads them, builds the others, and fails in their first forward pass.
In: the forward of an attention module. Out: whether kernels that rotate halves of a head compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from types import FunctionType, TracebackType
from typing import Any

WIDTHS = ("head_dim", "qk_rope_head_dim", "rotary_dim")
NAMES_OF_SHARE = ("partial_rotary_factor", "rotary_pct")  # of the share of a head that is rotated
ROTARY = "apply_rotary_pos_emb"  # what transformers calls the function in the modules of all families
WORDS = ("rotary", "rope")  # in the names of the functions that rotate
HELP = ("`head_dim`, or else hidden_size / num_attention_heads, must be even, and so must what is rotated of it: train "
        "the model with other sizes, or choose another one")


def rotates_odd_width(model: Any, config: Any) -> str:
    """Why the model cannot run; "" if it can, or fails for another reason. Only where a width is odd is it tried: a
    partly rotated head of odd width may well run."""
    odd = next((width for width in _rotated(config.get_text_config().to_dict()) if width % 2), 0)
    if not odd or not _rotation_fails(model):
        return ""
    return f"rotary position embeddings rotate numbers in pairs; in each attention head they would rotate {odd}"


def has_odd_head(config: Mapping[str, Any]) -> bool:
    """Whether any number of dimensions that may be rotated is odd."""
    return any(width % 2 for width in _rotated(config))


def _rotated(config: Mapping[str, Any]) -> Iterator[int]:
    """How many dimensions of a head may be rotated; which of these numbers counts is up to the family. config: as a
    dict."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    shares = {1.0, *(share for part in _parts(config) for name in NAMES_OF_SHARE
                     if isinstance(share := part.get(name), int | float))}
    widths = [config.get(name) for name in WIDTHS]
    if type(hidden) is int and type(heads) is int and heads > 0:
        widths.append(hidden // heads)
    for share in sorted(shares):  # what is rotated of a head, before its whole width
        yield from (int(width * share) for width in widths if type(width) is int)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config, and what it says of positions, by kind of layer where these differ."""
    rope = config.get("rope_parameters")
    nested = rope.values() if isinstance(rope, Mapping) else ()
    yield from (part for part in (config, rope, *nested) if isinstance(part, Mapping))


def _rotation_fails(model: Any) -> bool:
    """Whether a forward pass, of three tokens and without storage, ends in a function that rotates."""
    import torch

    tokens = torch.zeros(1, 3, dtype=torch.long, device="meta")
    mask = torch.zeros(1, 1, 3, 3, device="meta")  # of this form it is used as it is: no number of it is read
    try:
        with torch.no_grad():
            model(tokens, attention_mask=mask, position_ids=tokens, use_cache=False)
    except Exception as error:  # whatever else a family cannot do without storage
        return any(word in name.lower() for name in _functions(error.__traceback__) for word in WORDS)
    return False


def _functions(trace: TracebackType | None) -> Iterator[str]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_name
        trace = trace.tb_next


@cache
def forward_rotates_halves(forward: Any, exact: bool = False) -> bool:
    """Whether a forward of attention calls, by the usual name, a function that rotates halves of queries and keys, as
    the kernels of backends do. exact: bit for bit; otherwise within 1e-6."""
    import torch

    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return False
    draw = torch.Generator(device="cpu").manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=draw, device="cpu") for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 3, 8, generator=draw, device="cpu")
    try:
        found = forward.__globals__[ROTARY](q, k, cos, sin)
    except Exception:  # a function with another signature, or for other shapes
        return False
    same = torch.equal if exact else partial(torch.allclose, atol=1e-6)
    return len(found) == 2 and all(same(a, rotated_halves(x, cos, sin)) for a, x in zip(found, (q, k), strict=True))


def rotated_halves(x: Any, cos: Any, sin: Any) -> Any:
    """x: [S, heads, T, size]. cos, sin: [S, T, size]. Returns x, rotated as by Llama's `apply_rotary_pos_emb` of
    transformers: element i together with element i + size / 2."""
    import torch

    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]
