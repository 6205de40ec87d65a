"""Data sources: the rows of every step, tokenized.

In: a plan's Data record. Out: for each step the sequences of its frames, and the columns for Python functions.
Invariant: what a step reads is a function of the file, seed and step alone, equal on all ranks.

Batches: the rows of an epoch are permuted by (seed, epoch) when the source shuffles, else in file order; batch b of
the run is batch b of the endless sequence of epochs. Rows at the end of an epoch that do not fill a batch are dropped.
Codes, besides those of `runtime/jsonl.py`: RL0748 fewer rows than a batch, RL0750 no chat template, RL0751 the
tokenizer cannot be used.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rldsl.diag import fail
from rldsl.plan.model import Data
from rldsl.plan.partition import permutation
from rldsl.runtime.jsonl import Row, Table, scan

ROLES = {"prompts": ("prompt",), "answers": ("prompt", "answer"), "pairs": ("prompt", "chosen", "rejected")}
# kind -> frame (as named after the user's name: "" or ".chosen") -> the role of its responses
FRAMES: dict[str, dict[str, str | None]] = {
    "prompts": {"": None}, "answers": {"": "answer"}, "pairs": {"chosen": "chosen", "rejected": "rejected"},
}


@dataclass(frozen=True, slots=True)
class FetchedFrame:
    """tokens: for each row an int64 tensor, the prompt and then the response (empty for a prompt alone)."""

    prompt_lens: list[int]
    response_lens: list[int]
    tokens: list[Tensor]


@dataclass(frozen=True)
class Source:
    """An open data source. passes: how often the run goes over the rows. Steps count from 0."""

    data: Data
    table: Table
    tokenizer: Any = field(repr=False)
    passes: float

    def step(self, step: int, seed: int) -> dict[str, FetchedFrame]:
        """The frames of one step: "" for prompts and answers, "chosen" and "rejected" for pairs."""
        numbers, rows = self._rows(step, seed)
        prompts = [self._prompt(row, self.table.place(n)) for n, row in zip(numbers, rows)]
        return {name: self._frame(prompts, rows, role) for name, role in FRAMES[self.data.kind].items()}

    def columns(self, step: int, seed: int) -> list[Row]:
        """All columns of the step's rows, in row order."""
        return self._rows(step, seed)[1]

    def batch(self, step: int, seed: int) -> list[int]:
        """The row numbers of a step."""
        size = self.data.batch
        epoch, first = divmod(step, len(self.table) // size)
        order = self._order(seed, epoch)
        return list(order[first * size : (first + 1) * size])

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a sequence: the tokenizer's, and those of a generation config beside it."""
        from transformers import GenerationConfig

        try:
            declared = GenerationConfig.from_pretrained(self.data.tokenizer, local_files_only=True).eos_token_id
        except (OSError, ValueError):  # a directory need not have one
            declared = None
        more = declared if isinstance(declared, list) else [declared]
        return frozenset(i for i in (self.tokenizer.eos_token_id, *more) if i is not None)

    def _rows(self, step: int, seed: int) -> tuple[list[int], list[Row]]:
        numbers = self.batch(step, seed)
        return numbers, self.table.read(numbers)

    @functools.cached_property
    def _orders(self) -> dict[tuple[int, int], tuple[int, ...]]:
        return {}

    def _order(self, seed: int, epoch: int) -> tuple[int, ...] | range:
        if not self.data.shuffle:
            return range(len(self.table))
        if (seed, epoch) not in self._orders:
            self._orders.clear()  # only the current epoch is ever needed again
            self._orders[seed, epoch] = permutation(len(self.table), seed, epoch)
        return self._orders[seed, epoch]

    def _frame(self, prompts: list[list[int]], rows: list[Row], role: str | None) -> FetchedFrame:
        answers = [self._answer(row[column(self.data, role)]) if role else [] for row in rows]
        tokens = [torch.tensor(p + a, dtype=torch.int64) for p, a in zip(prompts, answers)]
        return FetchedFrame([len(p) for p in prompts], [len(a) for a in answers], tokens)

    def _prompt(self, row: Row, place: str) -> list[int]:
        """Token ids of a prompt: with the special tokens that the tokenizer puts before it, the last ones when there
        are too many."""
        value = row[column(self.data, "prompt")]
        if isinstance(value, str):
            ids = cast("list[int]", self.tokenizer(value, verbose=False)["input_ids"])
            ids = ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids
        else:
            ids = self._chat(value, place)
        if not ids:
            raise fail("RL0749", "the prompt has no tokens", place=place, help="remove the line")
        return ids[-self.data.max_prompt_tokens :]  # [-0:] is everything

    def _chat(self, messages: list[dict[str, Any]], place: str) -> list[int]:
        if not self.tokenizer.chat_template:
            raise fail("RL0750", "the prompt is a list of chat messages, and the tokenizer has no chat template",
                       place=place, notes=(f"tokenizer: {self.data.tokenizer}",),
                       help="use a chat model's tokenizer, or write the prompt as text")
        try:
            return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True,
                                                           return_dict=False))
        except Exception as error:  # a template is a program: it may raise anything
            raise fail("RL0750", f"the chat template does not take these messages: {error}", place=place) from None

    def _answer(self, text: str) -> list[int]:
        """Token ids of an answer and the end of the sequence, without it when there are too many."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id][: self.data.max_answer_tokens or None]


def column(data: Data, role: str) -> str:
    """The name of the column that plays `role`."""
    return dict(data.columns).get(role, role)


def open_source(data: Data, steps_needed: int) -> Source:
    """Check the file and load its tokenizer. Raises a Failure when either cannot be used."""
    table = scan(data.path, {role: column(data, role) for role in ROLES[data.kind]}, data.numbers)
    if len(table) < data.batch:
        raise fail("RL0748", f"this data file has {len(table)} rows, and a batch needs {data.batch}", place=data.path,
                   help=f"add rows, or declare `batch={len(table)}` or less")
    return Source(data, table, load_tokenizer(data), steps_needed / (len(table) // data.batch))


def load_tokenizer(data: Data) -> Any:
    """The tokenizer in a model's directory; nothing is downloaded and no code of the directory is run."""
    from transformers import AutoTokenizer

    directory = data.tokenizer
    if not Path(directory).is_dir():
        raise fail("RL0751", "there is no such tokenizer directory", place=directory,
                   help=f"the data `{data.name}` is read with the tokenizer of this model")
    if not any(f.name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece")) for f in Path(directory).iterdir()):
        # transformers would make an empty tokenizer of the model's class from config.json alone
        raise fail("RL0751", "the tokenizer cannot be loaded: this directory has no tokenizer", place=directory,
                   help="the directory needs the files that `tokenizer.save_pretrained` writes")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its readers meet
        raise fail("RL0751", "the tokenizer cannot be loaded", place=directory,
                   notes=(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",),
                   help="the directory needs the files that `tokenizer.save_pretrained` writes") from None
    if data.kind != "prompts" and tokenizer.eos_token_id is None:
        raise fail("RL0751", "the tokenizer has no end-of-sequence token", place=directory,
                   help="answers are closed by it; set `eos_token` in its tokenizer_config.json")
    return tokenizer
