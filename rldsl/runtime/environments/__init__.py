"""What decoding sees of environments: conversations that begin, are answered in any order, and end.

In: for each conversation (a row) its data columns and messages, then the ids that the model sampled in each turn. Out:
arrivals, in the order in which environments answer, which depends on the clock and on nothing else.
Invariant: sampled ids are never encoded again. The sequence of a row is the concatenation of what `arrivals` brought
and of what was sampled, in turns: context, ids, context, ids, ... An agent's conversation may have several sequences,
its branches.
Errors: a Failure that names file, line, row and turn, where the environment fails and `on_error` is "stop".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from selectors import BaseSelector
from typing import Any, Literal, Protocol

# Why a conversation ended: the environment said so; the model called no tool; a limit of decoding was reached (of
# turns, of the tokens of a conversation, of the tokens of a turn); or, with `on_error="end"`, the environment failed or
# took too long.
Stopped = Literal["done", "no_call", "max_turns", "max_tokens", "max_new_tokens", "error", "timeout"]
OnError = Literal["stop", "end"]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the environment of one conversation said."""

    row: int                    # the conversation's row
    tokens: tuple[int, ...]     # context to prefill, after which the model's next turn begins. The first arrival of a
                                # row has all of its first context, even if it ended; later ones have () if it ended
    ended: bool                 # whether the conversation has ended: this is the row's last arrival
    stopped: Stopped | None     # why it ended
    reward: float | None        # what `get_reward()` returned at the end; None before, after an error, or if the
                                # environment gives none
    turn_reward: float | None   # reward of the turn that this answers, if the environment gives one
    branch: int = 0             # which sequence of its conversation the tokens extend: one that it has, or the next new
                                # one, whose whole context they are. Only agents have other ones than 0


@dataclass(frozen=True, slots=True)
class ResetParameters:
    """The columns that `reset` takes."""

    required: tuple[str, ...] = ()          # parameters without a default, without `seed`, which the run gives
    accepted: tuple[str, ...] | None = None  # all parameters; None: any column


class ContextImages(Protocol):
    """The images with which a conversation begins: those of its row (`rldsl.runtime.data.image_prompts.RowImages`)."""

    def messages(self, prompt: object) -> list[Message]:
        """A prompt as messages whose contents are lists of parts."""

    def ids(self, text: str, tokenize: Callable[[str], list[int]]) -> list[int]:
        """The tokens of a rendered text, in which each image has its own, with its number."""

    def plain_ids(self, tokens: Sequence[int]) -> list[int]:
        """Tokens without the numbers of images."""


class Conversations(Protocol):
    """The conversations of one data-parallel shard, on the rank that owns its environments. Each call of `begin`,
    `said` and `finish` brings exactly one arrival of its row; no second call for a row is made before that. After a
    row's last arrival the row may begin again."""

    @property
    def takes(self) -> ResetParameters:
        """What `reset` of the environment takes."""

    def begin(self, row: int, columns: Mapping[str, object], messages: str | Sequence[Message], seed: int,
              images: ContextImages | None = None) -> None:
        """Start a conversation: `reset(**columns)`. Its arrival has the tokens of the whole first context.

        messages: the prompt; a string is one message of the user. seed: passed to `reset` if it accepts one. images: of
        the row, where its data has images: their tokens carry their numbers."""

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool, logprobs: Sequence[float] = ()) -> None:
        """The model's turn has ended, with these sampled ids, the stop token included. ended_by_limit: it was cut off
        and has no stop token. logprobs: of the ids, for an agent that asks for them."""

    def finish(self, row: int, why: Stopped) -> None:
        """Decoding ends the conversation after the turn that `said` has reported last, or after `begin`; or in the
        middle of a turn that is not reported. The arrival has the reward. why: `stopped` of that arrival."""

    def arrivals(self, wait: bool) -> list[Arrival]:
        """What has arrived since the last call. wait: block until there is at least one. Errors: InternalError if
        `wait` and no environment has anything to answer."""

    def watch(self, selector: BaseSelector) -> float | None:
        """Register what shows that an environment needs attention. Returns the seconds after which `arrivals` must be
        called even if nothing does; None if no environment has anything to answer."""

    def close(self) -> None:
        """End all conversations, and the processes that they run in. It may be called again."""
