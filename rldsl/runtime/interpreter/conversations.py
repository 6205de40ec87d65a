"""Conversations of a generate event: which rows talk with which environments, and what becomes values of the step.

In: the event, the rows of this rank, the columns of their data. Out: tokens with their turns, log-probs and rewards in
the step's buffers. An environment gets a seed of its row, so that what it draws does not depend on the placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rldsl.diag import internal_error
from rldsl.plan.events import Generate, split_buffer
from rldsl.plan.function import Function
from rldsl.plan.payloads import Conversation
from rldsl.runtime.backend import ConversationOutput
from rldsl.runtime.comm.row_assignment import RowLengths
from rldsl.runtime.data.tokens import Tokens
from rldsl.runtime.environments import Arrival, Conversations
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.model_store import ModelStore
from rldsl.runtime.state.step import StepState
from rldsl.runtime.state.turns import marked
from rldsl.sharding.partition import mix


def open_conversations(function: Function, limits: Conversation, tokens: Tokens, count: int) -> Conversations:
    """The environments of one call on this rank. count: the most conversations at once."""
    raise internal_error(f"no environment of {function.name} can be opened", "run")


@dataclass
class Environments:
    """The environments that this rank has opened; they stay for the next steps."""

    opened: dict[int, Conversations] = field(default_factory=dict)  # generate event -> its conversations

    def of(self, event: Generate, function: Function, tokens: Tokens, count: int) -> Conversations:
        if event.conversation is None:
            raise internal_error(f"{event.called} has no environment", "run")
        if event.id not in self.opened:
            self.opened[event.id] = open_conversations(function, event.conversation, tokens, count)
        return self.opened[event.id]

    def close(self) -> None:
        for conversations in self.opened.values():
            conversations.close()
        self.opened.clear()


@dataclass(frozen=True)
class _Talk:
    """The conversations of some rows, with what each begins with (`rldsl.runtime.backend.Talk`)."""

    conversations: Conversations  # of the call
    columns: dict[int, dict[str, Any]]  # row -> the columns of its data
    prompt: str  # the column that has the prompt
    seed: int  # of this call in this step

    def begin(self, row: int) -> None:
        columns = self.columns[row]
        messages = columns[self.prompt]
        self.conversations.begin(row, columns, messages, mix(self.seed, row) >> 1)

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool) -> None:
        self.conversations.said(row, ids, ended_by_limit)

    def finish(self, row: int, why: str) -> None:
        self.conversations.finish(row, why)

    def arrivals(self, wait: bool) -> list[Arrival]:
        return self.conversations.arrivals(wait)


def converse(models: ModelStore, step: StepState, reader: DataReader, environments: Environments, event: Generate
             ) -> None:
    """A generate event with an environment."""
    context, limits = step.context, event.conversation
    if limits is None:
        raise internal_error(f"{event.called} has no environment", "run")
    spread, frame = context.spreads[event.spread], context.frames[event.frame]
    rows, first = step.my_rows(spread, event.frame), step.first_row(frame.count)
    seed = step.sampling_seed(event.id, event.frame)
    columns = next(step.buffers.get(b) for b in event.reads if split_buffer(b)[0].endswith(".columns"))
    per_row = frame.count // frame.chain[-1].count
    data = context.data[frame.data]
    talk = _Talk(environments.of(event, context.functions[limits.environment], reader.tokens(frame),
                                 min(event.mbs or len(rows), len(rows))),
                 {row + first: columns[row // per_row][1] for row in rows.tolist()}, dict(data.columns)["prompt"],
                 mix(seed, step.index))
    made = models.shard_to_read(event.model, event.layout).converse(
        rows + first, event.sampling, limits, talk, seed=seed, step=step.index, max_num_seqs=event.mbs)
    _write(step, event, rows, made)


def _write(step: StepState, event: Generate, rows: torch.Tensor, made: ConversationOutput) -> None:
    context, batch = step.context, made.batch
    if batch.own is None:
        raise internal_error("conversations without turns", "generate")
    count = context.frames[event.frame].count
    lens = RowLengths(*(torch.zeros(count, dtype=torch.int64, device=context.device) for _ in range(2)))
    lens.prompt[rows], lens.response[rows] = batch.prompt_lens, batch.response_lens
    step.rows.lens[event.frame] = lens  # 0 for other ranks' rows, until the lengths are exchanged
    for name, data in (("tokens", marked(batch.tokens, batch.own)), ("logprobs", made.logprobs),
                       ("finished", made.stopped == 0), ("reward", made.rewards), ("turns", made.turns.float()),
                       ("stopped", made.stopped.float())):
        step.write(f"{event.frame}.{name}", event.spread, rows, data)
