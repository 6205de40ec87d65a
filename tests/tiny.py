"""The tiny models and data of the examples, for tests."""

from examples.tiny import CHARACTERS, EOS, PAD, make_all, make_model, make_pairs, make_sums, make_tokenizer, write_jsonl

__all__ = ["CHARACTERS", "EOS", "PAD", "make_all", "make_model", "make_pairs", "make_sums", "make_tokenizer", "write_jsonl"]
