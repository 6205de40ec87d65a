"""Rows as token ids.

In: rows that were checked. Out: for each the ids of its prompt, or of an answer, uncut. Ids are a function of the row
and the tokenizer alone. Codes: RL0749 a prompt without tokens, RL0750 the chat template, RL0751 the tokenizer cannot
be used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from rldsl.diag import fail
from rldsl.plan.model import Data
from rldsl.plan.processor_files import PROCESSORS
from rldsl.runtime.data.chat_messages import without_nulls
from rldsl.runtime.data.image_prompts import ImagePrompts
from rldsl.runtime.data.row_schema import Row
from rldsl.runtime.files import digest

RowLocation = Callable[[int], str]  # index in a list of rows -> file and line


@dataclass(frozen=True)
class Tokens:
    """Makes token ids of rows."""

    tokenizer: Any = field(repr=False)  # of transformers
    directory: str                      # where the tokenizer is, for messages
    roles: Mapping[str, str]            # as in `RowNeeds`
    images: ImagePrompts | None = None  # of rows with images

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a sequence."""
        return end_tokens(self.directory, self.tokenizer)

    def prompts(self, rows: Sequence[Row], place: RowLocation, numbers: Sequence[int] = ()) -> list[list[int]]:
        """The ids of the rows' prompts, with the special tokens that the tokenizer puts before a text. numbers: of the
        rows in their source, where images are to be found by what is returned."""
        values = [row[self.roles["prompt"]] for row in rows]
        if self.images is None:
            found = self._each(values, lambda i: self._ids(self._chat(values[i], place(i)), special=False),
                               special=True)
        else:
            found = [self._with_images(self.images, row, numbers[i] if numbers else 0, place(i))
                     for i, row in enumerate(rows)]
        for i, (value, ids) in enumerate(zip(values, found, strict=True)):
            if isinstance(value, str) and ids and ids[-1] == self.tokenizer.eos_token_id:
                found[i] = ids = ids[:-1]
            if not ids:
                raise fail("RL0749", "the prompt has no tokens", place=place(i), help="remove the row")
        return found

    def answers(self, rows: Sequence[Row], role: str, place: RowLocation) -> list[list[int]]:
        """The ids of the rows' answers, with the end of the sequence."""
        name = self.roles[role]
        values = [row[name] for row in rows]
        found = self._each(values, lambda i: self._turns(rows[i], values[i], place(i)), special=False)
        if self.images is not None:
            self.images.check_answers(found, name, place)
        return [[*ids, self.tokenizer.eos_token_id] if isinstance(value, str) else ids
                for value, ids in zip(values, found, strict=True)]

    def _each(self, values: Sequence[Any], chat: Callable[[int], list[int]], special: bool) -> list[list[int]]:
        """The ids of each value. Texts are tokenized in one call, which is parallel; other values one by one."""
        texts = [value for value in values if isinstance(value, str)]
        ids = iter(self._ids(texts, special) if texts else [])
        return [next(ids) if isinstance(value, str) else chat(i) for i, value in enumerate(values)]

    def _ids(self, text: Any, special: bool) -> Any:
        return self.tokenizer(text, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]

    def _with_images(self, images: ImagePrompts, row: Row, number: int, place: str) -> list[int]:
        """The ids of the prompt of a row."""
        value = row[self.roles["prompt"]]
        chat = not isinstance(value, str)
        text = self._chat(images.messages(value, row, place), place) if chat else value
        return images.ids(text, row, number, place, lambda text: list(self._ids(text, special=not chat)))

    def _turns(self, row: Row, answer: list[dict[str, Any]], place: str) -> list[int]:
        """What the template adds to the prompt for the assistant's turns, up to the last end of a sequence."""
        prompt = row[self.roles["prompt"]]
        if self.images is not None:
            prompt, answer = self.images.messages(prompt, row, place), self.images.messages(answer, {}, place)
        before, after = self._chat(prompt, place), self._chat([*prompt, *answer], place, generation=False)
        if not after.startswith(before):
            raise fail("RL0750", "the chat template renders the prompt differently when an answer follows",
                       place=place, notes=(f"tokenizer: {self.directory}",),
                       help="provide the prompt and the answer as strings")
        ids = self._ids(after[len(before) :], special=False)
        last = max((i for i, token in enumerate(ids) if token in self.ends), default=-1)
        ended = last >= 0 and not self.tokenizer.decode(ids[last + 1 :]).strip()  # a template may close with a new line
        return ids[: last + 1] if ended else [*ids, self.tokenizer.eos_token_id]

    def _chat(self, messages: list[dict[str, Any]], place: str, generation: bool = True) -> str:
        if not self.tokenizer.chat_template:
            raise fail("RL0750", "the prompt is a list of chat messages, but the tokenizer has no chat template",
                       place=place, notes=(f"tokenizer: {self.directory}",),
                       help="use the tokenizer of a chat model, or provide the prompt as a string")
        chat = without_nulls(messages)
        try:
            return str(self.tokenizer.apply_chat_template(chat, add_generation_prompt=generation, tokenize=False))
        except Exception as error:  # a template is a program: it may raise anything
            raise fail("RL0750", f"the chat template rejects these messages: {error}", place=place) from None


# beginnings of the names of files that decide token ids, the chat template and which tokens end a sequence
TOKENIZER_FILES = ("token", "vocab", "merges", "special", "added", "spiece", "sentencepiece", "generation_config",
                   "chat_template", "config.json", *PROCESSORS)


def tokenizer_digest(directory: str) -> str:
    """The digest of the small files that decide how texts are tokenized; weights are not read."""
    files = sorted(f for f in Path(directory).iterdir() if f.is_file() and f.name.startswith(TOKENIZER_FILES))
    return sha256("".join(f"{f.name} {digest(f)}\n" for f in files).encode()).hexdigest()


def load_tokenizer(data: Data) -> Any:
    """The tokenizer of a data source."""
    tokenizer = open_tokenizer(data.tokenizer, f"the data `{data.name}` uses")
    if data.row_format != "prompts" and tokenizer.eos_token_id is None:
        raise fail("RL0751", "the tokenizer has no end-of-sequence token", place=data.tokenizer,
                   help="it marks the end of answers; set `eos_token` in tokenizer_config.json")
    return tokenizer


def text_tokens(directory: str) -> Tokens:
    """What makes token ids of prompts that are no rows of data: texts, or chat messages."""
    return Tokens(open_tokenizer(directory, "texts of Python functions use"), directory, {"prompt": "prompt"})


def open_tokenizer(directory: str, use: str) -> Any:
    """The tokenizer in a model's directory; nothing is downloaded and no code of the directory is run. use: who needs
    it, as in "the data `prompts` uses"."""
    from transformers import AutoTokenizer

    if not Path(directory).is_dir():
        raise fail("RL0751", "no such tokenizer directory", place=directory,
                   help=f"{use} the tokenizer of this model")
    if not any(f.name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece")) for f in Path(directory).iterdir()):
        # transformers would make an empty tokenizer of the model's class from config.json alone
        raise fail("RL0751", "the tokenizer cannot be loaded: this directory has no tokenizer", place=directory,
                   help="the directory needs the files written by `tokenizer.save_pretrained`")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its readers meet
        raise fail("RL0751", "the tokenizer cannot be loaded", place=directory,
                   notes=(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",),
                   help="the directory needs the files written by `tokenizer.save_pretrained`") from None
    return tokenizer


def end_tokens(directory: str, tokenizer: Any) -> frozenset[int]:
    """The end-of-sequence tokens of a model's directory: those of its generation config, of its config, and the
    tokenizer's. A directory need not have the first two."""
    from transformers import AutoConfig, GenerationConfig

    ids = _declared_ids(tokenizer.eos_token_id)
    configs: tuple[Callable[[], object], ...] = (
        lambda: GenerationConfig.from_pretrained(directory, local_files_only=True),
        lambda: AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False))
    for config in configs:
        try:
            ids |= _declared_ids(getattr(config(), "eos_token_id", None))
        except (OSError, ValueError):  # no such file, or of a family that is not known
            continue
    return ids


def _declared_ids(declared: int | list[int] | None) -> frozenset[int]:
    return frozenset([declared] if isinstance(declared, int) else declared or ())
