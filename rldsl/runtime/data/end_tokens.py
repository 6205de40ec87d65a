"""Which tokens end a sequence: one answer for sampling, for reading data and for rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def end_tokens(directory: str, tokenizer: Any) -> frozenset[int]:
    """The end-of-sequence tokens of a model's directory: those of its generation config, of its config, and the
    tokenizer's. A directory need not have the first two."""
    from transformers import AutoConfig, GenerationConfig

    found = _ids(tokenizer.eos_token_id)
    configs: tuple[Callable[[], object], ...] = (
        lambda: GenerationConfig.from_pretrained(directory, local_files_only=True),
        lambda: AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False))
    for config in configs:
        try:
            found |= _ids(getattr(config(), "eos_token_id", None))
        except (OSError, ValueError):  # no such file, or of a family that is not known
            continue
    return found


def _ids(declared: int | list[int] | None) -> frozenset[int]:
    return frozenset([declared] if isinstance(declared, int) else declared or ())
