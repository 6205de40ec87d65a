"""The tiny models and data of the examples, for tests."""

from examples.tiny import (
    CHARACTERS,
    CHAT_TEMPLATE,
    EOS,
    PAD,
    make_all,
    make_model,
    make_pairs,
    make_sums,
    make_tokenizer,
    write_jsonl,
)

__all__ = ["CHARACTERS", "CHAT_TEMPLATE", "EOS", "PAD", "make_all", "make_model", "make_pairs", "make_sums", "make_tokenizer", "write_jsonl"]
