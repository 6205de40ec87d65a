"""The conversation of an agent, as it has led it: its branches, and which of them a request extends.

In: what was said, and a request of the agent. Out: the branch that has most turns among those whose messages, or token
ids, the request begins with; or why a branch is not extended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rldsl.runtime.environments import ContextImages, Message, Stopped
from rldsl.runtime.environments.http_server import Request
from rldsl.runtime.environments.requests import ChatRequest, Refused, TokenRequest


@dataclass(frozen=True)
class Heard:
    """What a request adds to its conversation."""

    branch: int               # that it extends, or the next new one
    tokens: tuple[int, ...]   # of a new branch, all of them


@dataclass(frozen=True)
class Point:
    """Where a branch can be left: after a request, or after the model's turn that answered it."""

    asked: ChatRequest | TokenRequest  # the last request before it
    messages: tuple[Message, ...]      # of both sides, if it is led in messages
    num_tokens: int                    # of both sides
    answered: bool                     # whether the model has spoken since
    cut: bool = False                  # whether it has without a stop token


@dataclass
class Branch:
    """One sequence of a conversation."""

    tokens: list[int] = field(default_factory=list)  # of both sides
    points: list[Point] = field(default_factory=list)  # in order; the last one is its end


@dataclass
class Dialogue:
    """A conversation, as its agent has led it."""

    key: str                                                     # that its requests have
    images: ContextImages | None = None                              # of its row, if its data has images
    request: Request | None = None                               # the last one, while the model works on it
    branches: list[Branch] = field(default_factory=list)
    at: int = 0                                                  # the branch of the last request
    context: tuple[int, ...] = ()                                # the ids that the last request added
    turns: int = 0                                               # of the model
    limit: Stopped | None = None                                 # that ends it: no more requests are answered
    full: bool = False                                           # whether the last request left its branch no room
    fault: Refused | None = None                                 # that ends it when the model's turn has ended

    def plain(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The ids of tokens."""
        return tuple(self.images.plain_ids(tokens) if self.images else tokens)


def last_of(dialogue: Dialogue, extends: Callable[[Branch], bool]) -> int | None:
    """The number of the branch that a request extends: of several the one with the most turns, of these the one that
    the agent asked in last. None if there is none."""
    found = [i for i, branch in enumerate(dialogue.branches) if extends(branch)]
    return max(found, key=lambda i: (len(dialogue.branches[i].points), i == dialogue.at, i), default=None)


def leads_to(point: Point, asked: ChatRequest) -> bool:
    """Whether the messages of a request begin with all that was said up to a point."""
    return isinstance(point.asked, ChatRequest) and point.asked.tools == asked.tools \
        and len(point.messages) <= len(asked.messages) \
        and all(_compared(a) == _compared(b) for a, b in zip(point.messages, asked.messages, strict=False))


def difference(branch: Branch, asked: ChatRequest | TokenRequest) -> str:
    """Why a request does not extend a branch."""
    end = branch.points[-1]
    if type(asked) is not type(end.asked):
        return "it asks in messages and in tokens"
    if isinstance(asked, TokenRequest):
        at = next((i for i, (a, b) in enumerate(zip(branch.tokens, asked.ids, strict=False)) if a != b), None)
        if at is not None or len(asked.ids) < len(branch.tokens):
            return f"token {len(asked.ids) if at is None else at} is not the one that the conversation has"
        return "it adds no token"
    if isinstance(end.asked, ChatRequest) and end.asked.tools != asked.tools:
        return "its `tools` are others"
    for i, (old, new) in enumerate(zip(end.messages, asked.messages, strict=False)):
        if _compared(old) != _compared(new):
            return f"messages[{i}] ({new['role']}) is not the one that the conversation has"
    return "it adds no message"


def _compared(message: Message) -> tuple[Any, ...]:
    calls = [(c["function"]["name"], _comparable(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    return message["role"], message["content"], message.get("name"), calls, message.get("tool_call_id")


def _comparable(arguments: Any) -> Any:
    """Arguments that are equal to themselves: a model may write NaN."""
    return json.loads(json.dumps(arguments), parse_constant=str)
