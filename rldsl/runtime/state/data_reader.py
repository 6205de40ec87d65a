"""The data sources that a rank reads, and how far the run has read them.

In: a run's context. Out: open sources; the number of the batch to read next. The position is part of a checkpoint.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from rldsl.plan.model import Frame
from rldsl.plan.projection import event_paths
from rldsl.plan.references import Role, references
from rldsl.runtime.comm.content_digests import ContentDigest
from rldsl.runtime.data import Source, open_source
from rldsl.runtime.data.read_positions import SourceReading, content_digest
from rldsl.runtime.data.tokens import Tokens, text_tokens, tokenizer_digest
from rldsl.runtime.state.context import RunContext

ROWS_AT_ONCE = 1024  # of a file, when a column of all its rows is read


@dataclass
class DataReader:
    """Sources by the name of their data declaration."""

    context: RunContext  # the plan and the communicators
    # those that are open, by the name of their data declaration
    sources: dict[str, Source] = field(default_factory=dict)
    # model directory -> its tokenizer, of frames whose tokens are not those of their data source
    tokenizers: dict[str, Tokens] = field(default_factory=dict)
    # source -> the batch read last, counted from 0
    position: dict[str, int] = field(default_factory=dict)
    # source -> digest of its files, as this rank read them
    digests: dict[str, str] = field(default_factory=dict)
    # how the sources that this rank reports on are read, for checkpoints
    readings: dict[str, SourceReading] = field(default_factory=dict)
    # (source, column) -> its number in every row, where weights of rows are made of it
    columns: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def source(self, data: str) -> Source:
        """The source, opened and checked at its first use."""
        if data not in self.sources:
            reports = self.reports(data)
            every = list(self.context.data)
            opened = self.sources[data] = open_source(self.context.data[data], self.context.plan.header.steps, reports,
                                                      (every.index(data), len(every)))
            if reports and opened.note:
                print(f"note: {opened.note}", file=sys.stderr, flush=True)
        return self.sources[data]

    def tokens(self, frame: Frame) -> Tokens:
        """What makes token ids of text, and text of the token ids of a frame."""
        if not frame.tokenizer:
            return self.source(frame.data).tokens
        if frame.tokenizer not in self.tokenizers:
            self.tokenizers[frame.tokenizer] = text_tokens(frame.tokenizer)
        return self.tokenizers[frame.tokenizer]

    def content_digests(self) -> list[ContentDigest]:
        """The digests of the files of all open sources, of their tokenizers, and of those of texts."""
        digests = [ContentDigest.of(path, "tokenizer of texts", tokenizer_digest(path).encode())
                   for path in self.tokenizers]
        for name, source in self.sources.items():
            self.digests[name] = content_digest(source.data)
            digests.append(ContentDigest.of(source.data.path, f"data `{name}`", self.digests[name].encode()))
            digests.append(ContentDigest.of(source.data.tokenizer, f"tokenizer of `{name}`",
                                          tokenizer_digest(source.data.tokenizer).encode()))
        return digests

    def number_column(self, data: str, column: str) -> torch.Tensor:
        """[rows] float32: a column of numbers, of all rows of a source. Read once, a part at a time."""
        if (data, column) not in self.columns:
            table = self.source(data).table
            numbers = torch.empty(len(table))
            for first in range(0, len(table), ROWS_AT_ONCE):
                rows = table.read(range(first, min(first + ROWS_AT_ONCE, len(table))))
                numbers[first:first + len(rows)] = torch.tensor([float(row[column]) for row in rows])
            self.columns[data, column] = numbers
        return self.columns[data, column]

    def reports(self, data: str) -> bool:
        """Whether this rank is the one that reports on a source to the user: the first that reads it."""
        context = self.context
        fetches = (e for e, _ in event_paths(context.plan)
                   if (Role.DATA, data) in {(r.role, r.id) for r in references(e)})
        return context.rank == min((min(context.world.meshes[e.mesh].members()) for e in fetches), default=0)

    def next_batch(self, data: str) -> int:
        """Which batch a fetch reads now: 0, 1, ... All ranks that read a source take part in each of its fetches, so
        their counts agree."""
        batch = self.position[data] = self.position.get(data, -1) + 1
        return batch
