"""Prompts that Python functions write: the ids are those that data of the same text has; every mistake names its row."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.function import Function
from rldsl.runtime.data.tokens import Tokens, text_tokens
from rldsl.runtime.data.written_prompts import prompt_ids
from tests.tiny import CHARACTERS, make_tokenizer

ASK = Function("ask", "judge.py", "ask", "", "prompts?")
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}.{% endfor %}{% if add_generation_prompt %}go {% endif %}"
NAMES = ["0 (d.jsonl:4)", "1 (d.jsonl:9)", "2 (d.jsonl:2)"]


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(c) + 2 for c in text]


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    made = make_tokenizer(tmp_path)
    made.chat_template = TEMPLATE
    made.save_pretrained(str(tmp_path))
    return text_tokens(str(tmp_path))


def mistake(*args: object) -> Diagnostic:
    with pytest.raises(Failure) as raised:
        prompt_ids(*args)  # type: ignore[arg-type]
    (found,) = raised.value.diagnostics
    return found


def test_texts_messages_and_missing_rows(tokens: Tokens) -> None:
    texts = ["12+1=", None, [{"role": "user", "content": "hi"}]]
    assert prompt_ids(tokens, ASK, texts, NAMES, 20, "error") == [ids("12+1="), [], ids("user hi.go ")]


def test_as_in_data_an_end_token_at_the_end_is_left_out(tokens: Tokens) -> None:
    assert prompt_ids(tokens, ASK, ["7<eos>"], NAMES, 20, "error") == prompt_ids(tokens, ASK, ["7"], NAMES, 20, "error")


def test_no_rows(tokens: Tokens) -> None:
    assert prompt_ids(tokens, ASK, [], [], 20, "error") == []
    assert prompt_ids(tokens, ASK, [None], NAMES[:1], 20, "error") == [[]]


def test_too_long(tokens: Tokens) -> None:
    texts = ["123", "1234", "12345"]
    assert prompt_ids(tokens, ASK, texts, NAMES, 4, "truncate") == [ids("123"), ids("1234"), ids("2345")]
    assert prompt_ids(tokens, ASK, texts, NAMES, 4, "drop") == [ids("123"), ids("1234"), []]
    found = mistake(tokens, ASK, texts, NAMES, 4, "error")
    assert found.code == "RL0789" and found.place == "judge.py"
    assert found.title == "`ask` returned a prompt of 5 tokens for row 2 (d.jsonl:2), but max_tokens=4"


def test_a_prompt_without_tokens(tokens: Tokens) -> None:
    found = mistake(tokens, ASK, ["1", None, "<eos>"], NAMES, 4, "error")
    assert found.code == "RL0749" and found.place == "judge.py, `ask` for row 2 (d.jsonl:2)"


def test_messages_without_a_template(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    found = mistake(text_tokens(str(tmp_path)), ASK, [[{"role": "user", "content": "hi"}]], NAMES, 9, "error")
    assert found.code == "RL0750" and "row 0 (d.jsonl:4)" in found.place


def test_a_template_that_raises(tokens: Tokens) -> None:
    tokens.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    found = mistake(tokens, ASK, [None, [{"role": "user", "content": "hi"}]], NAMES, 9, "error")
    assert found.code == "RL0750" and "roles must alternate" in found.title and "row 1" in found.place


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir()])
def test_no_tokenizer(tmp_path: Path, make: object) -> None:
    make(tmp_path / "m")  # type: ignore[operator]
    with pytest.raises(Failure) as raised:
        text_tokens(str(tmp_path / "m"))
    assert raised.value.diagnostics[0].code == "RL0751"
