"""Sizes of a config with which no model can be built, or which its attention cannot use.

transformers accepts most of them, and fails later with a message that names none of them.
"""

from __future__ import annotations

from typing import Any

POSITIVE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings")


def impossible_size(config: Any) -> str:
    """What is wrong with a size of a config; "" if nothing is. Sizes are called what config.json calls them."""
    try:
        text = config.get_text_config()
    except ValueError:  # it has several, or none: whoever builds the model says that such a family is not supported
        return ""
    for name in POSITIVE:
        for value in values_of(text, name):
            if type(value) is int and value < 1:
                return f"{_own_name(text, name)} is {value}, and must be 1 or more"
    heads, kv_heads = (values_of(text, name) for name in ("num_attention_heads", "num_key_value_heads"))
    for query, key in zip(heads, kv_heads, strict=False):
        if type(query) is int and type(key) is int and query % key:
            return (f"{_own_name(text, 'num_attention_heads')} is {query}, and must be a multiple of "
                    f"{_own_name(text, 'num_key_value_heads')}, which is {key}")
    return ""


def values_of(text: Any, name: str) -> list[Any]:
    """What a config says for `name`: of each layer where they differ, otherwise one value; None where it says
    nothing."""
    try:
        value = getattr(text, name, None)
    except AttributeError:
        raise
    except Exception:  # transformers' error for what differs from layer to layer, which is no AttributeError
        value = [getattr(text.per_layer_config[i], name, None) for i in range(text.num_hidden_layers)]
    return list(value) if isinstance(value, list | tuple) else [value]


def _own_name(text: Any, name: str) -> str:
    return f"`{getattr(text, 'attribute_map', {}).get(name, name)}`"
