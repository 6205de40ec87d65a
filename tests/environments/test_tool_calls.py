"""Calls of tools as models write them, well and badly: never an exception."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rldsl.runtime.environments.tool_calls import FAMILIES as READERS
from rldsl.runtime.environments.tool_calls import TurnReader
from tests.environments.families import FAMILIES, TOOL, make

NAMES = {"gpt-oss": "gpt-oss", "DeepSeek": "DeepSeek", "Mistral": "Mistral", "Hermes and Qwen": "Qwen2.5", "Phi": "Phi",
         "Gemma": "Gemma", "Llama 3": "Llama 3.1"}
TOKENIZERS = {name: make(FAMILIES[name]) for name in NAMES.values()}


def calls(name: str, text: str) -> list[dict[str, Any]]:
    tokenizer = TOKENIZERS[name]
    return list(TurnReader(tokenizer, "tok", [TOOL]).turn(tokenizer(text, add_special_tokens=False)["input_ids"],
                                                          ()).calls)


@pytest.mark.parametrize("name, text, wanted", [
    ("Qwen2.5", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g"}</tool_call>',
     [("f", {"a": 1}), ("g", {})]),
    ("Qwen2.5", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", {"a": 1})]),
    ("Qwen2.5", "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\nx y\n</parameter>\n"
                "</function>\n</tool_call>", [("f", {"a": 3, "b": "x y"})]),
    ("Llama 3.1", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}<|eot_id|>',
     [("f", {"a": 1}), ("g", {})]),
    ("Mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</s>',
     [("f", {"a": 1}), ("g", {})]),
    ("Mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}</s>', [("f", {"a": 1}), ("g", {})]),
    ("DeepSeek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```"
                 "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [("f", {"a": 1})]),
    ("gpt-oss", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', [("f", {"a": 1})]),
    ("Gemma", "<start_function_call>call:f{a:1,b:{c:[true,null]},d:<escape>{x:1}<escape>}<end_function_call>",
     [("f", {"a": 1, "b": {"c": [True, None]}, "d": "{x:1}"})]),
    ("Phi", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|><|end|>', [("f", {"a": 1})]),
])
def test_calls(name: str, text: str, wanted: list[tuple[str, dict[str, Any]]]) -> None:
    assert calls(name, text) == [{"name": n, "arguments": a} for n, a in wanted]


@pytest.mark.parametrize("name, text, error", [
    ("Qwen2.5", "<tool_call>{", "Expecting"), ("Qwen2.5", "<tool_call>[1]</tool_call>", "it is no JSON object"),
    ("Qwen2.5", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "it has no name"),
    ("Qwen2.5", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "its arguments are no JSON object"),
    ("Qwen2.5", '<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "its arguments are no JSON: "),
    ("Llama 3.1", '{"name": "f", ', "Expecting"), ("Llama 3.1", '<|python_tag|>{"parameters": {}}', "it has no name"),
    ("Mistral", "[TOOL_CALLS]", "Expecting"), ("Mistral", "[TOOL_CALLS]f[ARGS]{1", "its arguments are no JSON"),
    ("DeepSeek", "<｜tool▁calls▁begin｜>", "it has no name"),
    ("DeepSeek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "its arguments are no JSON"),
    ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>{", "its arguments are no JSON"),
    ("Gemma", "<start_function_call>call:f{a:}<end_function_call>", "Expecting"),
    ("Gemma", "<start_function_call>nothing", "it has no name"), ("Phi", "<|tool_call|>{", "Expecting"),
])
def test_a_call_that_cannot_be_read_is_an_error_for_the_model(name: str, text: str, error: str) -> None:
    (found,) = calls(name, text)
    assert "arguments" not in found and found["error"].startswith("Malformed tool call: ") and error in found["error"]


@pytest.mark.parametrize("name", NAMES.values())
@given(text=st.lists(st.sampled_from(["{", "}", '"name"', ":", '"f"', "[", "]", ",", "call:f", " to=f", "1", "\n", "<",
                                      *{marker for family in FAMILIES.values() for marker in family.markers}]),
                     max_size=12).map("".join))
def test_whatever_a_model_writes(name: str, text: str) -> None:
    for found in calls(name, text):
        assert isinstance(found["name"], str) and found["name"]
        assert isinstance(found.get("arguments"), dict) != isinstance(found.get("error"), str)


def test_thinking_about_a_call_is_no_call() -> None:
    tokenizer = make(FAMILIES["Qwen3"])
    reader = TurnReader(tokenizer, "tok", [TOOL])
    for text in ('<think>\n<tool_call>{"name": "f"}</tool_call>\n</think>\n\nNo.<|im_end|>',
                 '<tool_call>{"name": "f"}</tool_call>\n</think>\n\nNo.<|im_end|>'):
        turn = reader.turn(tokenizer(text, add_special_tokens=False)["input_ids"], ())
        assert (turn.calls, turn.content) == ((), "No.")


def test_each_family_is_found_by_its_template() -> None:
    for family in READERS:
        assert any(family.template in FAMILIES[name].template for name in [NAMES[family.name]]) or (
            family.name in ("Gemma", "Llama 3"))  # which have several
    for reader, name in NAMES.items():
        found = TurnReader(TOKENIZERS[name], "tok", [TOOL]).family
        assert found is not None and found.name == reader


def test_a_response_template_of_the_tokenizer_comes_first() -> None:
    """transformers reads the turn, and what it cannot read is an error for the model."""
    class Tokenizer:
        chat_template = "anything"
        response_template = {"any": "thing"}

        def parse_response(self, ids: list[int], prefix: list[int], tools: list[Any]) -> dict[str, Any]:
            if ids == [0]:
                raise ValueError("cannot parse")
            assert prefix == [7] and tools == [TOOL]
            return {"content": "c", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}

    reader = TurnReader(Tokenizer(), "tok", [TOOL])
    assert reader.turn([1], [7]).calls == ({"name": "f", "arguments": {}},)
    assert reader.turn([0], [7]).calls == ({"name": "unknown", "error": "Malformed tool call: cannot parse"},)
