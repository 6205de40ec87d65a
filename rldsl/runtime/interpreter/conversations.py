"""The environments of a rank: opened at the first call that talks with them, and kept for the next steps.

In: the class, limits and tokenizer of a generate call; rows with the columns of their data. Out: conversations by row.
An environment gets a seed of its row, so that what it draws does not depend on the placement.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rldsl.plan.function import Function
from rldsl.plan.payloads import Conversation, Sampling
from rldsl.runtime.data.tokens import Tokens
from rldsl.runtime.environments import Arrival, Conversations, Stopped
from rldsl.runtime.environments.chat import ChatTemplate
from rldsl.runtime.environments.processes import EnvironmentProcesses
from rldsl.sharding.partition import mix


def open_conversations(function: Function, limits: Conversation, sampling: Sampling, tokens: Tokens, rank: int
                       ) -> Conversations:
    """The environments of one call on this rank; each has its own process, which is forked when it begins. A Failure if
    the environment or the chat template cannot be used. sampling: of a turn, which the requests of an agent are held
    against. rank: printed before each line that environments print."""
    chat = functools.partial(ChatTemplate, tokens.tokenizer, tokens.ends, tokens.directory)
    return EnvironmentProcesses(function, limits.turn_timeout, limits.on_error, rank).open(chat)


@dataclass
class Environments:
    """The environments that this rank has opened; they stay for the next steps."""

    opened: dict[int, Conversations] = field(default_factory=dict)  # id of a generate event -> its conversations

    def of(self, event: int, function: Function, limits: Conversation, sampling: Sampling, tokens: Tokens, rank: int
           ) -> Conversations:
        if event not in self.opened:
            self.opened[event] = open_conversations(function, limits, sampling, tokens, rank)
        return self.opened[event]

    def close(self) -> None:
        for conversations in self.opened.values():
            conversations.close()
        self.opened.clear()


@dataclass(frozen=True)
class RowTalk:
    """The conversations of some rows, with what each begins with (`rldsl.runtime.backend.Talk`)."""

    conversations: Conversations  # of the call
    columns: dict[int, dict[str, Any]]  # row -> the columns of its data
    prompt: str  # the column that has the prompt
    seed: int  # of this call in this step

    def begin(self, row: int) -> None:
        columns = self.columns[row]
        messages = columns[self.prompt]
        self.conversations.begin(row, columns, messages, mix(self.seed, row) >> 1)

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool, logprobs: Sequence[float]) -> None:
        self.conversations.said(row, ids, ended_by_limit, logprobs)

    def finish(self, row: int, why: Stopped) -> None:
        self.conversations.finish(row, why)

    def arrivals(self, wait: bool) -> list[Arrival]:
        return self.conversations.arrivals(wait)
