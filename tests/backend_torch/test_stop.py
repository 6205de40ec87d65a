"""Stop strings and end tokens, with a tokenizer that merges and splits characters into bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.backends.torch.generate.scheduler import num_to_admit
from rldsl.backends.torch.generate.stop_conditions import StopStrings
from rldsl.memory.decode_shapes import MAX_PREFILL_TOKENS
from rldsl.runtime.data.tokens import end_tokens
from tests.tiny import make_model

MERGES = [(">", "Ċ"), ("Ċ", "Ċ"), (".", "ĊĊ"), (".ĊĊ", "1")]
TURN = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {x: i for i, x in enumerate([*letters, *(a + b for a, b in MERGES)])}
    raw = Tokenizer(models.BPE(vocabulary, MERGES))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(TURN, special=True), AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


def ending(tokenizer: Any, text: str, *stop: str) -> list[int]:
    """The lengths at which a completion of this text, token by token, ends."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = StopStrings(stop, tokenizer)
    rows = torch.tensor([ids + [0] * 3] * len(ids))
    return [i + 1 for i, hit in enumerate(found.hit(rows, torch.arange(1, len(ids) + 1)).tolist()) if hit]


@pytest.mark.parametrize("text, stop, at", [
    ("x</a>\n", "</a>", [5]),             # the last token is ">\n"
    ("so.\n\n1", "\n\n", [3]),            # one token, ".\n\n1", with the stop string inside
    ("so" + TURN, TURN, [3]),             # a special token
    ("ab終わり", "終わり", [11]),          # three tokens a character
    ("🙂🙂🙂🙂🙂🙂🙂🙂", "🙂" * 8, [32]),  # more tokens than characters
    ("é終", "終", [5]),                    # the character before is of two
    ("a.a.", ".", [2, 4]),                # again, behind one that did not end it
    ("aaa", "aa", [2, 3]),
])
def test_the_token_that_completes_a_stop_string_is_the_last(tokenizer: Any, text: str, stop: str,
                                                            at: list[int]) -> None:
    assert ending(tokenizer, text, stop) == ending(tokenizer, text, stop, "never") == at


@pytest.mark.parametrize("text, stop", [
    ("ab", "abc"), ("</a\n>", "</a>"), ("終", "終わ"), ("終", "紙"), ("\n.\n", "\n\n"), ("<|im_end|", TURN),
    ("abcdefghijklmnopqrstuvwxyz", "az")])
def test_what_is_no_stop_string_does_not_end(tokenizer: Any, text: str, stop: str) -> None:
    assert ending(tokenizer, text, stop) == []


def test_a_stop_string_that_ended_earlier_does_not_end_later(tokenizer: Any) -> None:
    """Within min_new_tokens it may stand in the text; what comes behind it is judged by itself."""
    assert ending(tokenizer, "a.bcd", ".") == [2]


def test_every_declared_end_counts(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = make_model(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    assert end_tokens(str(directory), tokenizer) == {1}
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 5]}))
    (directory / "generation_config.json").unlink(missing_ok=True)
    assert end_tokens(str(directory), tokenizer) == {1, 5}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    assert end_tokens(str(directory), tokenizer) == {1, 5, 7}


def test_a_directory_without_configs_has_its_tokenizers_end(tmp_path: Path, tokenizer: Any) -> None:
    assert end_tokens(str(tmp_path), tokenizer) == {tokenizer.eos_token_id}


@pytest.mark.parametrize("lens, waiting, free, slots, begun", [
    ([5] * 40, 0, 32, 32, 32),       # at first all slots
    ([5] * 40, 32, 1, 32, 0),        # one is free: too few
    ([5] * 40, 32, 2, 32, 2),        # a sixteenth
    ([5] * 40, 39, 1, 32, 1),        # the last that waits
    ([5] * 40, 40, 32, 32, 0),       # none waits
    ([5] * 40, 10, 0, 32, 0),        # none is free
    ([MAX_PREFILL_TOKENS] * 40, 10, 1, 32, 1),  # one that is long
    ([MAX_PREFILL_TOKENS] * 40, 0, 32, 32, 1),  # at once no more than fit
    ([MAX_PREFILL_TOKENS + 9, 1], 0, 2, 2, 1),  # but one always
    ([5] * 9, 4, 1, 4, 1),
    ([], 0, 0, 0, 0)])
def test_how_many_sequences_begin(lens: list[int], waiting: int, free: int, slots: int, begun: int) -> None:
    assert num_to_admit(lens, waiting, free, slots) == begun
