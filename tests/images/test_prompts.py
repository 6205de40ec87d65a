"""Placeholders of images in prompts: as many tokens as transformers' own processors write, each of its image; and rows
whose placeholders do not fit their images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from examples.tiny import make_vision_model, write_jsonl
from rldsl.diag import Failure
from rldsl.models.vision import FAMILIES
from rldsl.runtime.data.image_processor import PROCESSOR_OF, image_processor
from rldsl.runtime.data.images import ImageColumn
from rldsl.runtime.data.source import open_source
from rldsl.runtime.image_tokens import ids_of, image_of, image_token, is_image, plain_ids
from tests.images.models import MAKERS, make
from tests.images.pictures import SIZES, data_of, make_rows, picture


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("model") / "m", num_hidden_layers=2)


def rows(folder, prompt: Any, images: Any, answer: Any = "a"):
    for i in range(3):
        picture(8, 8, i).save(folder / f"{i}.png")
    return write_jsonl(folder / "rows.jsonl", [{"prompt": prompt, "answer": answer, "images": images}] * 4)


def chat(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": list(content)}]


TEXT, IMAGE = {"type": "text", "text": "what?"}, {"type": "image"}


def test_tokens_carry_ids_and_images():
    stored = torch.tensor([5, image_token(7, 0), image_token(7, 3), image_token(2**20, 2**30)])
    assert ids_of(stored).tolist() == plain_ids(stored.tolist()) == [5, 7, 7, 2**20]
    assert image_of(stored).tolist() == [-1, 0, 3, 2**30]


def test_every_family_has_a_processor():
    assert FAMILIES.keys() == PROCESSOR_OF.keys() == MAKERS.keys()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava"])
def test_as_many_tokens_as_the_processor_of_the_family(tmp_path, family):
    """Its class, without the part for videos, which needs torchvision."""
    import transformers

    path = make(tmp_path / "m", family)
    name = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor",
            "gemma3": "Gemma3Processor", "llava": "LlavaProcessor"}[family]
    ours = image_processor(str(path))
    tokenizer = ours.tokenizer
    for word in ("boi", "eoi", "image"):  # which real tokenizers name so
        token = {"boi": ours.marker, "eoi": getattr(ours, "end", ""), "image": ours.placeholder}[word]
        setattr(tokenizer, f"{word}_token", token)
        setattr(tokenizer, f"{word}_token_id", tokenizer.convert_tokens_to_ids(token))
    theirs = object.__new__(getattr(transformers, name))
    theirs.image_processor, theirs.tokenizer = ours.processor, tokenizer
    theirs.image_token, theirs.patch_size, theirs.num_additional_image_tokens = ours.placeholder, 4, 1
    theirs.vision_feature_select_strategy = "default"
    for number, (width, height) in enumerate([*SIZES, (12, 60), (100, 9)]):
        image = picture(width, height, number)
        inputs = dict(ours.inputs([image]))
        count = ours.count((height, width))
        if family == "gemma3":
            assert count == ours.config.mm_tokens_per_image
            assert ours.expanded((1, 1)) == f"\n\n<boi>{'<image>' * 9}<eoi>\n\n"
        else:
            assert ours.expanded((height, width)) == theirs.replace_image_token(inputs, 0)
            assert count == ours.expanded((height, width)).count(ours.placeholder)


def test_prompts_have_the_tokens_of_their_images(tmp_path, model):
    source = open_source(data_of(make_rows(tmp_path, count=9), model), 1)
    processor, seen = image_processor(str(model)), set()
    for number in range(9):
        (tokens,) = source.read([number])[""].tokens
        found, counts = torch.unique_consecutive(image_of(tokens)[image_of(tokens) >= 0], return_counts=True)
        names = source.table.read([number])[0]["images"]
        sizes = [Image.open(tmp_path / name).size[::-1] for name in names]
        assert counts.tolist() == [processor.count(size) for size in sizes]
        assert [source.image_column.row_of(n) for n in found.tolist()] == [(number, i) for i in range(len(names))]
        assert not seen & {*found.tolist()}
        seen |= {*found.tolist()}
        assert bool((ids_of(tokens)[image_of(tokens) >= 0] == processor.token_id).all())


def test_images_that_no_message_mentions_come_first(tmp_path, model):
    found = []
    for content in ("what?", [TEXT], [IMAGE, IMAGE, TEXT]):
        path = rows(tmp_path, [{"role": "user", "content": content}], ["0.png", "1.png"])
        found.append(open_source(data_of(path, model), 1).read([0])[""].tokens[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_answers_may_be_messages(tmp_path, model):
    answer = [{"role": "assistant", "content": "a cat"}]
    given = open_source(data_of(rows(tmp_path, chat(IMAGE, TEXT), ["0.png"], answer), model), 1).read([0])[""]
    text = ids_of(given.tokens[0])[given.prompt_lens[0]:]
    assert image_processor(str(model)).tokenizer.decode(text) == "a cat<eos>"


def test_two_sources_number_their_images_apart():
    columns = [ImageColumn("images", Path(), per_row, source, 2) for source, per_row in ((0, 3), (1, 1))]
    numbers = [(c.source, c.number(row, i)) for c in columns for row in range(5) for i in range(c.per_row)]
    assert len({n for _, n in numbers}) == len(numbers)
    assert all(n % 2 == source for source, n in numbers)


BAD = [  # prompt, images, what is said
    (chat(TEXT, IMAGE), [], "the prompt has 1 image placeholder, but the row has 0 images"),
    (chat(TEXT, IMAGE), ["0.png", "1.png"], "the prompt has 1 image placeholder, but the row has 2 images"),
    (chat(IMAGE, IMAGE, TEXT), ["0.png"], "the prompt has 2 image placeholders, but the row has 1 image"),
    ("no placeholder", ["0.png"], "the prompt has 0 image placeholders, but the row has 1 image"),
    ("<|image_pad|> and <|image_pad|>", ["0.png"], "the prompt has 2 image placeholders, but the row has 1 image"),
    (chat({"type": "text", "text": "<|image_pad|>"}, IMAGE), ["0.png"], "2 image placeholders, but the row has 1 image"),
    (chat({"type": "video"}, TEXT), [], "a message has a part that is neither text nor an image"),
    (chat({"type": "text", "text": "<|video_pad|>"}, IMAGE), ["0.png"], "the prompt has a video token, and rows have no"),
    (chat({"type": "text", "text": "<|video_pad|>"}), [], "the prompt has a video token, and rows have no videos"),
    (chat("what?"), [], "a message has a part that is neither text nor an image"),
    (chat({"type": "image", "image": "0.png"}), ["0.png"], "a message names its image as `image`"),
    (chat({"type": "image", "url": "http://x/0.png"}), ["0.png"], "a message names its image as `url`"),
    (chat({"type": "text"}), [], "a text part of a message has no text"),
    ([{"role": "user", "content": 7}], [], "a message has a part that is neither text nor an image"),
]


NOWHERE = [  # answer, columns of images, what is said: places of images that would stand for none
    ("a", "", "the prompt has a place for an image, but the data names no column of images"),
    ([{"role": "assistant", "content": [IMAGE, TEXT]}], "images", "`answer` has a place for an image, which only a prompt"),
    ("an <|image_pad|>", "images", "the column `answer` has an image token, and only a prompt can have images"),
    ("a <|video_pad|>", "images", "the column `answer` has a video token, and rows have no videos"),
]


@pytest.mark.parametrize("answer, column, why", NOWHERE)
def test_places_of_images_that_would_stand_for_none(tmp_path, model, answer, column, why):
    path = rows(tmp_path, chat(IMAGE, TEXT), ["0.png"], answer)
    with pytest.raises(Failure) as failure:
        open_source(data_of(path, model, images=column), 1)
    found = failure.value.diagnostics[0]
    assert found.code == "RL0767" and why in found.title and found.place == f"{path}:1" and found.help


def test_messages_of_parts_need_no_column_of_images(tmp_path, model):
    path = rows(tmp_path, chat(TEXT), [], [{"role": "assistant", "content": [TEXT]}])
    given = open_source(data_of(path, model, images=""), 1).read([0])[""]
    assert image_processor(str(model)).tokenizer.decode(given.tokens[0][given.prompt_lens[0]:]) == "what?<eos>"


def test_a_long_row_with_images_is_not_told_to_be_truncated(tmp_path, model):
    path = rows(tmp_path, chat(IMAGE, TEXT), ["0.png"])
    with pytest.raises(Failure) as failure:
        open_source(data_of(path, model, max_prompt_tokens=5), 1)
    found = failure.value.diagnostics[0]
    assert found.code == "RL0756" and "drop" in found.help and "truncate" not in found.help


def test_a_row_whose_images_have_more_tokens_than_allowed_is_an_error_or_is_dropped(tmp_path, model):
    """Of two images one alone would fit; text does not count."""
    few, many = chat(IMAGE, {"type": "text", "text": "what? " * 50}), chat(IMAGE, TEXT, IMAGE)
    path = write_jsonl(tmp_path / "rows.jsonl", [
        {"prompt": few, "answer": "a", "images": ["0.png"]}, {"prompt": many, "answer": "a", "images": ["0.png"] * 2}] * 2)
    picture(32, 32, 0).save(tmp_path / "0.png")
    whole = open_source(data_of(path, model), 1).read([0, 1])[""]
    one, two = (sum(map(is_image, tokens.tolist())) for tokens in whole.tokens)
    assert 0 < one and two == 2 * one
    with pytest.raises(Failure) as failure:
        open_source(data_of(path, model, max_image_tokens=two - 1), 1)
    first = failure.value.diagnostics[0]
    assert (first.code, first.place) == ("RL0756", f"{path}:2")
    assert f"`images` has {two} tokens, but max_image_tokens={two - 1}" in first.title
    dropped = open_source(data_of(path, model, max_image_tokens=two - 1, over_long="drop", batch=2), 1)
    assert len(dropped.table) == 2
    assert len(open_source(data_of(path, model, max_image_tokens=two), 1).table) == 4


@pytest.mark.parametrize("prompt, images, why", BAD)
def test_placeholders_that_do_not_fit(tmp_path, model, prompt, images, why):
    path = rows(tmp_path, prompt, images)
    with pytest.raises(Failure) as failure:
        open_source(data_of(path, model), 1)
    found = failure.value.diagnostics[0]
    assert found.code == "RL0767" and why in found.title and found.place == f"{path}:1" and found.help


def test_an_image_that_the_processor_refuses(tmp_path, model):
    path = rows(tmp_path, chat(IMAGE, TEXT), ["thin.png"])
    picture(1600, 2, 0).save(tmp_path / "thin.png")
    with pytest.raises(Failure) as failure:
        open_source(data_of(path, model), 1)
    found = failure.value.diagnostics[0]
    assert found.code == "RL0740" and "with 1600 x 2 pixels, the image processor refuses it" in found.title
    assert found.place == f"{path}:1"


def test_a_row_with_more_tokens_than_allowed_is_an_error_or_is_dropped(tmp_path, model):
    path = rows(tmp_path, chat(IMAGE, TEXT), ["0.png"])
    with pytest.raises(Failure) as failure:
        open_source(data_of(path, model, max_prompt_tokens=10), 1)
    assert failure.value.diagnostics[0].code == "RL0756"
    with pytest.raises(Failure) as failure:
        open_source(data_of(path, model, max_prompt_tokens=10, over_long="drop"), 1)
    assert failure.value.diagnostics[0].code == "RL0748"


@pytest.mark.parametrize("change, why", [
    (lambda d: (d / "preprocessor_config.json").unlink(), "this model directory has no image processor"),
    (lambda d: (d / "preprocessor_config.json").write_text("{"), "the image processor cannot be loaded"),
    (lambda d: (d / "preprocessor_config.json").write_text('{"image_processor_type": "Unknown"}'),
     "the image processor cannot be loaded"),
])
def test_a_directory_without_a_usable_processor(tmp_path, change, why):
    path = make_vision_model(tmp_path / "m", num_hidden_layers=2)
    change(path)
    with pytest.raises(Failure) as failure:
        open_source(data_of(rows(tmp_path, chat(IMAGE, TEXT), ["0.png"]), path), 1)
    found = failure.value.diagnostics[0]
    assert (found.code, found.title, found.place) == ("RL0768", why, str(path))


def test_a_minibatch_on_disk_has_ids_and_images_apart(tmp_path):
    """Of a gradient that is not finite."""
    from safetensors.torch import load_file

    from rldsl.runtime.interpreter.nonfinite import _write

    stored, text = torch.tensor([5, image_token(7, 3), 6]), torch.tensor([5, ~6, 7])  # ~id: what an environment said
    assert not _write(tmp_path / "rank.safetensors", {"a.tokens": stored, "b.tokens": text}, {})
    found = load_file(tmp_path / "rank.safetensors")
    assert {name: x.tolist() for name, x in found.items()} == {
        "a.tokens": [5, 7, 6], "a.images": [-1, 3, -1], "b.tokens": text.tolist()}
