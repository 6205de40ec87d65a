"""Tokenizers that the tests of data share."""

from __future__ import annotations

import pytest

from tests.tiny import make_tokenizer

# turns are "u.... " and "a....$ ", where $ ends a sequence and a space stands for the new line of other templates
TEMPLATE = ("{% for m in messages %}{{ m.role[0] }}.{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
            "{% endif %} {% endfor %}{% if add_generation_prompt %}a.{% endif %}")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(place)
    return str(place)


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("chat")
    made = make_tokenizer(place)
    made.chat_template = TEMPLATE
    made.save_pretrained(place)
    return str(place)
