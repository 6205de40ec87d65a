"""What conversations with images refuse: images that are not those of the row, and places where none can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.tiny import make_vision_model
from rldsl.diag import Failure
from rldsl.plan.events import Sampling
from rldsl.plan.function import Function
from rldsl.runtime.data.image_prompts import RowImages
from rldsl.runtime.data.source import open_source
from rldsl.runtime.environments.chat import ChatTemplate
from rldsl.runtime.environments.contract import TrlForm, checked_messages, with_more
from rldsl.runtime.environments.agent_branches import Dialogue, Point
from rldsl.runtime.environments.endpoint import Endpoint
from rldsl.runtime.environments.requests import Refused, Rules, chat_request, token_request
from rldsl.runtime.environments.text_form import TextForm
from rldsl.runtime.image_tokens import beginning, image_token
from tests.images.pictures import data_of, make_rows

FUNCTION = Function("f0", "talks.py", "Talk", "", "env")
IMAGE = {"type": "image"}
TWO = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "a"}, IMAGE]}]
RULES = Rules(Sampling(), frozenset([1]), 4, 100, 60, 2, 50)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    base = tmp_path_factory.mktemp("rows")
    make_vision_model(base / "m")
    return open_source(data_of(make_rows(base, count=4), base / "m"), 1)


def chat_of(source) -> ChatTemplate:
    tokens = source.tokens
    return ChatTemplate(tokens.tokenizer, tokens.ends, tokens.directory, [], "user", in_parts=True)


def images_of(source, row: int) -> RowImages:
    whole = source.whole([row])[0]
    return RowImages(source.tokens.images, whole.columns, whole.number, whole.place)


@pytest.mark.parametrize("row, messages, count", [
    (2, [{"role": "user", "content": "no picture"}], "0 image placeholders"), (1, TWO, "2 image placeholders"), (0, TWO, "2"),
    (2, [{"role": "user", "content": [*TWO[0]["content"], IMAGE]}], "3 image placeholders")])
def test_another_number_of_images_than_the_row_has(source, row: int, messages: Any, count: str) -> None:
    with pytest.raises(Failure) as failure:
        chat_of(source).first(messages, images_of(source, row))
    found = failure.value.diagnostics[0]
    assert found.code == "RL0767" and count in found.title and found.place.endswith(f"rows.jsonl:{row + 1}")


def test_a_marker_that_a_message_spells_is_text(source) -> None:
    tokens, processor = source.tokens, source.tokens.images.processor
    spelled = [{"role": "user", "content": [IMAGE, {"type": "text", "text": f" {processor.marker} "}, IMAGE]}]
    found = chat_of(source).first(spelled, images_of(source, 2))
    plain = chat_of(source).first(TWO, images_of(source, 2))
    assert {x for x in found if x >> 32} == {x for x in plain if x >> 32} and len(found) > len(plain)
    assert not any(x == processor.token_id for x in found)  # none without the number of its image
    assert len([x for x in found if x >> 32]) == len([x for x in plain if x >> 32]) and tokens.images is not None


def test_a_prompt_that_is_a_string_is_one_message_with_images(source) -> None:
    marker = source.tokens.images.processor.marker
    assert images_of(source, 2).messages(f"{marker}a{marker}") == TWO
    assert images_of(source, 2).messages("a") == [{"role": "user", "content": [IMAGE, IMAGE, {"type": "text", "text": "a"}]}]
    assert images_of(source, 0).messages("a") == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


# ---------------------------------------------------------------------------------------------- what environments say


class Says:
    """An environment that returns what the test gives it."""

    def __init__(self, found: Any):
        self.found = found

    def init(self, prompt: Any) -> Any:
        return self.found

    def step(self, text: str) -> Any:
        return {"observations": self.found, "done": False}

    def reset(self, **row: Any) -> Any:
        return self.found

    def look(self) -> Any:
        """Looks."""
        return self.found


def refused(call: Any) -> Any:
    with pytest.raises(Failure) as failure:
        call()
    return failure.value.diagnostics[0]


@pytest.mark.parametrize("content", [
    [{"type": "image", "url": "x.png"}], [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}], ["a"],
    [{"type": "text"}], 7, None, [{"type": "text", "text": 3}]])
def test_parts_that_are_neither_text_nor_the_place_of_an_image(content: Any) -> None:
    found = refused(lambda: TextForm(FUNCTION, Says([{"role": "user", "content": content}])).begin(TWO, {}, 0))
    assert found.code == "RL0715" and found.place == "talks.py"


def test_what_an_environment_draws_is_not_read() -> None:
    """The message says why: other ranks could not read it."""
    for said in (TWO, [{"role": "user", "content": [IMAGE]}]):
        found = refused(lambda said=said: TextForm(FUNCTION, Says(said)).answer("x", []))
        assert found.code == "RL0715" and "which every rank reads from the same files" in found.help
    tool = {"name": "look", "arguments": {}}
    found = refused(lambda: TrlForm(FUNCTION, Says([IMAGE])).answer("x", [tool]))
    assert found.code == "RL0715" and "a block that is not text" in found.title and "the same files" in found.help
    found = refused(lambda: TrlForm(FUNCTION, Says([IMAGE])).begin(TWO, {}, 0))
    assert found.code == "RL0715" and "the same files" in found.help


def test_a_prompt_without_images_has_text_alone() -> None:
    text = [{"role": "user", "content": "a"}]
    assert refused(lambda: checked_messages(FUNCTION, "`init` returned", TWO)).code == "RL0715"
    assert TextForm(FUNCTION, Says(text)).begin(text, {}, 0) == text
    assert TextForm(FUNCTION, Says(TWO)).begin(TWO, {}, 0) == TWO


def test_what_reset_returns_is_appended() -> None:
    text = {"type": "text", "text": "a"}
    assert with_more([{"role": "user", "content": "a"}], " b") == [{"role": "user", "content": "a b"}]
    for before, after in (([IMAGE, text], [IMAGE, {"type": "text", "text": "a b"}]),
                          ([text, IMAGE], [text, IMAGE, {"type": "text", "text": " b"}]),
                          ([], [{"type": "text", "text": " b"}])):
        assert with_more([{"role": "user", "content": before}], " b") == [{"role": "user", "content": after}]


# ---------------------------------------------------------------------------------------------- what agents ask


def asked(content: Any, role: str = "user", rules: Rules = RULES) -> Any:
    return chat_request(json.dumps({"messages": [{"role": role, "content": content}]}).encode(), rules)


@pytest.mark.parametrize("content", [
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], [{"type": "image", "image": "x.png"}],
    [IMAGE, {"type": "text"}], [IMAGE, "a"], [{"type": "input_image"}]])
def test_an_image_that_is_not_of_the_row_is_refused(content: Any) -> None:
    with pytest.raises(Refused) as found:
        asked(content)
    assert found.value.code == "RL0730" and "is not read" in found.value.help


def test_rows_without_images_have_no_places_for_them() -> None:
    with pytest.raises(Refused) as found:
        asked([IMAGE], rules=Rules(Sampling(), frozenset([1]), 4, 100, 60))
    assert found.value.code == "RL0730" and "blocks of text" in found.value.what
    assert asked([IMAGE, {"type": "text", "text": "a"}]).messages[0]["content"] == [IMAGE, {"type": "text", "text": "a"}]
    assert asked([{"type": "text", "text": "a"}]).messages[0]["content"] == "a"


def test_an_image_token_in_ids_is_refused() -> None:
    with pytest.raises(Refused) as found:
        token_request(b'{"token_ids": [3, 50]}', RULES)
    assert found.value.code == "RL0730" and "50" in found.value.what
    assert token_request(b'{"token_ids": [3, 51]}', RULES).ids == (3, 51)


def test_an_image_behind_the_first_turn_is_refused(source) -> None:
    endpoint = Endpoint(lambda tools, speaks: chat_of(source), RULES)
    try:
        dialogue, first = Dialogue("k", images_of(source, 2)), asked(TWO[0]["content"])
        tokens = endpoint._added(dialogue, first, None)
        assert tokens == chat_of(source).first(TWO, dialogue.images)
        point = Point(first, tuple(first.messages), len(tokens), answered=True)
        more = json.dumps({"messages": [*TWO, {"role": "user", "content": [IMAGE]}]}).encode()
        with pytest.raises(Refused) as found:
            endpoint._added(dialogue, chat_request(more, RULES), point)
        assert found.value.code == "RL0730" and "before the first turn" in found.value.help
    finally:
        endpoint.close()


# ---------------------------------------------------------------------------------------------- a context that is cut


def test_a_cut_never_divides_an_image() -> None:
    a, b = image_token(50, 0), image_token(50, 1)
    stored = [3, a, a, a, b, b, 4, 5]
    assert [len(beginning(stored, most)) for most in range(9)] == [0, 1, 1, 1, 4, 4, 6, 7, 8]
    assert list(beginning([a, a], 1)) == [] and list(beginning([7, 7, 7], 2)) == [7, 7] and list(beginning([], 4)) == []
