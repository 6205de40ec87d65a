"""Whether two tokenizers make the same ids: what they put around a text counts, offsets and padding do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rldsl.models.directory import tokenizer

BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
BOS = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                 {"Sequence": {"id": "A", "type_id": 0}}],
       "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
EOS = BOS | {"single": [*BOS["single"][1:], {"SpecialToken": {"id": "</s>", "type_id": 0}}]}
BERT = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": True,
        "add_prefix_space": False}


def found(folder: Path, **more: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []} | more))
    return tokenizer(folder)


@pytest.mark.parametrize("one, other", [
    ({}, {"post_processor": None}), ({}, {"post_processor": BYTES}),
    ({"post_processor": BOS}, {"post_processor": {"type": "Sequence", "processors": [BYTES, BOS]}}),
    ({"post_processor": BERT}, {"post_processor": BERT | {"trim_offsets": False}}),
    ({"padding": {"length": 8}}, {"truncation": {"max_length": 9}}),
])
def test_the_same_ids(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert found(tmp_path / "a", **one) == found(tmp_path / "b", **other)


@pytest.mark.parametrize("one, other", [
    ({}, {"post_processor": BOS}), ({"post_processor": BOS}, {"post_processor": EOS}),
    ({"post_processor": BOS}, {"post_processor": BERT}),
    ({"post_processor": BYTES}, {"post_processor": {"type": "Sequence", "processors": [BYTES, BOS]}}),
    ({}, {"normalizer": {"type": "Lowercase"}}), ({}, {"added_tokens": [{"id": 9, "content": "<x>"}]}),
])
def test_other_ids(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert found(tmp_path / "a", **one) != found(tmp_path / "b", **other)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_a_damaged_file_is_equal_to_itself_alone(tmp_path: Path, text: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(text)
    assert tokenizer(tmp_path / "a") == tokenizer(tmp_path / "b") != found(tmp_path / "c")
