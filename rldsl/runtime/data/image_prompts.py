"""Prompts with images: the placeholders of a prompt, as many tokens as each image needs, and which image each is of.

In: a row with a prompt and a column of images. Out: its messages as chat templates want them, and token ids whose image
tokens carry the number of their image (`image_tokens.py`).
Errors: RL0767 the placeholders of a prompt do not fit its images, and those of `images.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rldsl.diag import Failure, counted, fail
from rldsl.runtime.data.chat_messages import without_nulls
from rldsl.runtime.data.image_processor import ImageProcessor, Size
from rldsl.runtime.data.images import ImageColumn, ImageFile, ImageProblem, problem
from rldsl.runtime.data.row_schema import Row
from rldsl.runtime.image_tokens import image_token, plain_ids

Message = Mapping[str, Any]
PARTS = ("text", "image")  # types of the parts of a message
# around a marker that a message spells: those with which transformers' `sanitize_control_tokens` marks such texts
SPELLED = "[\U000f0000-\U000ffffd]"


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """Of one source."""

    column: ImageColumn  # its images
    processor: ImageProcessor  # of the model whose tokenizer the source has

    def messages(self, messages: Sequence[Message], row: Row, place: str) -> list[dict[str, Any]]:
        """Messages whose contents are lists of parts. Images that no message mentions come before the text of the first
        message of the user, as in other trainers. row: with the images. Errors: RL0767."""
        made = [{**m, "content": _parts(m["content"], place)} for m in messages]
        count = len(self.column.images(row, place))
        mentioned = sum(part["type"] == "image" for m in made for part in m["content"])
        if count and not mentioned:
            first = next((m for m in made if m.get("role") == "user"), made[0])
            first["content"] = [{"type": "image"}] * count + first["content"]
        return made

    def ids(self, text: str, row: Row, number: int, place: str, tokenize: Callable[[str], list[int]]) -> list[int]:
        """The ids of a prompt with one marker for each image. number: of the row in its source. Errors: RL0767."""
        marker, files = self.processor.marker, self.column.images(row, place)
        pieces = re.split(f"(?<!{SPELLED}){re.escape(marker)}|{re.escape(marker)}(?!{SPELLED})", text)
        if len(pieces) - 1 != len(files):
            raise self._wrong_placeholders(len(pieces) - 1, len(files), place)
        sizes = self.column.sizes(files, place)
        counts = [self._count(file, size, place) for file, size in zip(files, sizes, strict=True)]
        whole = "".join(a + b for a, b in zip_longest(pieces, map(self.processor.expanded, sizes), fillvalue=""))
        ids, token = tokenize(whole), self.processor.token_id
        if ids.count(token) != sum(counts):
            raise fail("RL0767", f"the prompt has {ids.count(token)} image tokens, but its images need {sum(counts)}",
                       place=place, notes=(f"the image token: {self.processor.placeholder}",
                                           f"the place of an image: {self.processor.marker}"),
                       help="each image becomes its tokens at its place: neither a text nor the chat template of the "
                            "model may write other image tokens")
        if self.processor.video_id in ids:
            raise fail("RL0767", "the prompt has a video token, and rows have no videos", place=place,
                       notes=(f"the token: {self.processor.video}",), help="remove it; images can stand for a video")
        of = (image for image, count in enumerate(counts) for _ in range(count))
        return [image_token(token, self.column.number(number, next(of))) if x == token else x for x in ids]

    def check_answers(self, answers: Sequence[Sequence[int]], name: str, place: Callable[[int], str]) -> None:
        """RL0767 where the ids of an answer have the token of images or videos: it would stand for none. name: of the
        column."""
        made = self.processor
        for said, token, shown in (("an image token, and only a prompt can have images", made.token_id,
                                    made.placeholder),
                                   ("a video token, and rows have no videos", made.video_id, made.video)):
            wrong = next((i for i, ids in enumerate(answers) if token in ids), None)
            if wrong is not None:
                raise fail("RL0767", f"the column `{name}` has {said}", place=place(wrong),
                           notes=(f"the token: {shown}",), help="remove it, or write it in other words")

    def _wrong_placeholders(self, placeholders: int, images: int, place: str) -> Failure:
        if placeholders < images:
            help = ('each image needs one placeholder in the text, or one part {"type": "image"} of a message, in the '
                    "order of the column; if the messages have such parts, the chat template of the model writes no "
                    "placeholder for them")
        else:
            help = ('each placeholder in the text, or part {"type": "image"} of a message, needs an image, in the '
                    "order of the column; the texts of messages must not contain the placeholder")
        return fail("RL0767", f"the prompt has {counted(placeholders, 'image placeholder')}, but the row has "
                    f"{counted(images, 'image')}", place=place, help=help,
                    notes=(f"the placeholder: {self.processor.marker}",
                           f"the column of images: `{self.column.column}`"))

    def _count(self, file: ImageFile, size: Size, place: str) -> int:
        try:
            return self.processor.count(size)
        except ValueError as error:
            raise Failure([problem(ImageProblem(f"with {size[1]} x {size[0]} pixels, the image processor refuses it: "
                                                f"{error}"), self.column.column, place, file.shown)]) from None


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of one row, for a conversation that begins with it."""

    prompts: ImagePrompts  # of its source
    row: Row  # with the images
    number: int  # of the row in its source
    place: str  # of the row, for messages

    def messages(self, prompt: object) -> list[dict[str, Any]]:
        """A prompt as messages whose contents are lists of parts. A string is one message of the user. RL0767."""
        if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
            return self.prompts.messages(without_nulls(list(prompt)), self.row, self.place)
        first, *others = str(prompt or "").split(self.prompts.processor.marker)
        parts = [text_part(first), *(part for text in others for part in ({"type": "image"}, text_part(text)))]
        return self.prompts.messages([{"role": "user", "content": [p for p in parts if p.get("text") != ""]}], self.row,
                                     self.place)

    def ids(self, text: str, tokenize: Callable[[str], list[int]]) -> list[int]:
        """See `ImagePrompts.ids`."""
        return self.prompts.ids(text, self.row, self.number, self.place, tokenize)

    def plain_ids(self, tokens: Sequence[int]) -> list[int]:
        """Tokens without the numbers of images."""
        return plain_ids(tokens)


def text_part(text: str) -> dict[str, Any]:
    """A text as a part of a message."""
    return {"type": "text", "text": text}


def _parts(content: Any, place: str) -> list[dict[str, Any]]:
    """The parts of a message. Those that Arrow has read have all the keys that any part has."""
    if content is None:
        return []
    if isinstance(content, str):
        return [text_part(content)]
    listed = content if isinstance(content, list) else [content]
    parts = [{k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {} for part in listed]
    wrong = next((whole for whole, part in zip(listed, parts, strict=True) if part.get("type") not in PARTS), None)
    if wrong is not None or not isinstance(content, list):
        raise fail("RL0767", "a message has a part that is neither text nor an image", place=place,
                   notes=(f"the part: {str(content if wrong is None else wrong)[:120]}",),
                   help='a part is {"type": "text", "text": "..."} or {"type": "image"}')
    if named := next((part for part in parts if part["type"] == "image" and len(part) > 1), None):
        key = next(k for k in named if k != "type")
        raise fail("RL0767", f"a message names its image as `{key}`", place=place,
                   help='write {"type": "image"}, and the image into the column of images: nothing else is read')
    if textless := next((part for part in parts if part["type"] == "text" and not isinstance(part.get("text"), str)),
                        None):
        raise fail("RL0767", "a text part of a message has no text", place=place, notes=(f"the part: {textless}",),
                   help='a part is {"type": "text", "text": "..."} or {"type": "image"}')
    return parts
