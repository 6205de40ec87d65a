"""Conversations in the samples log: who said what, with the calls of each family, whatever a model writes."""

from __future__ import annotations

import json

import pytest
import torch

from rldsl.plan.turns import STOPPED
from rldsl.runtime.data.tokens import Tokens
from rldsl.runtime.metrics.json_lines import encoded
from rldsl.runtime.metrics.sampled_turns import REASONS, turns_of
from rldsl.runtime.state.turns import marked
from tests.environments.families import FAMILIES, make

TOKENIZERS = {name: make(FAMILIES[name]) for name in ("Qwen2.5", "Llama 3.1", "Mistral")}


def stored(name: str, *pieces: tuple[bool, str]) -> torch.Tensor:
    """A row. pieces: whether the model wrote it, and the text."""
    ids = [(own, TOKENIZERS[name](text, add_special_tokens=False)["input_ids"]) for own, text in pieces]
    return marked(torch.tensor([i for _, piece in ids for i in piece]),
                  torch.tensor([own for own, piece in ids for _ in piece]))


def turns(name: str, *pieces: tuple[bool, str], rewards: tuple[float, ...] = ()) -> list[dict]:
    return turns_of(stored(name, *pieces), Tokens(TOKENIZERS[name], "tok", {"prompt": "prompt"}), rewards)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_roles_calls_and_rewards(name: str) -> None:
    found = turns(name, (False, "What?"), (True, FAMILIES[name].call), (False, "seen"), (True, "It is 4."),
                  rewards=(0.0, 2.5))
    assert [t["role"] for t in found] == ["assistant", "environment", "assistant"]  # the prompt is no turn
    assert found[0]["calls"] == [{"name": "add", "arguments": {"a": 2, "b": "x y"}}] and found[0]["reward"] == 0
    assert found[1] == {"role": "environment", "content": "seen"}
    assert found[2] == {"role": "assistant", "content": "It is 4.", "reward": 2.5}


def test_what_no_json_file_has() -> None:
    """A call with NaN, half a character, a key of it, and one that cannot be read: the line stays JSON."""
    body = '{"name": "add", "arguments": {"a": NaN, "b": [-Infinity, "\\ud800"]}}'
    found = turns("Qwen2.5", (False, "?"), (True, f"<tool_call>{body}</tool_call><tool_call>{{</tool_call>"))
    good, bad = found[0]["calls"]
    assert good["arguments"] == {"a": "nan", "b": ["-inf", "?"]} and "Malformed" in bad["error"]
    assert json.loads(encoded({"turns": found}).encode("utf-8"))["turns"] == found


def test_rewards_that_are_not_known() -> None:
    assert turns("Qwen2.5", (False, "?"), (True, "x")) == [{"role": "assistant", "content": "x"}]
    assert turns("Qwen2.5", (False, "no turn")) == []


def test_reasons() -> None:
    assert REASONS[0] == "done" and {REASONS[n] for n in STOPPED.values()} == set(STOPPED) - {"no_call"}
