"""The environments of a rank: opened before the run begins, and kept for all of its steps.

In: the class, limits and tokenizer of a generate call; rows with the columns of their data. Out: conversations by row.
An environment gets a seed of its row, so that what it draws does not depend on the placement. A Failure names the line
of the call in the program, besides what the environment's own error names.
Code, besides those of `runtime/environments`: RL0720 the columns of the data are not those that `reset` takes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from rldsl.diag import Failure, fail
from rldsl.plan.function import Function
from rldsl.plan.payloads import Conversation, Sampling
from rldsl.runtime.data import Source
from rldsl.runtime.data.image_prompts import ImagePrompts, RowImages
from rldsl.runtime.data.row_schema import Row
from rldsl.runtime.data.source import WholeRow
from rldsl.runtime.data.tokens import Tokens
from rldsl.runtime.environments import Arrival, Conversations, ResetParameters, Stopped
from rldsl.runtime.environments.chat import ChatTemplate
from rldsl.runtime.environments.processes import EnvironmentProcesses
from rldsl.runtime.environments.requests import Rules
from rldsl.runtime.environments.several import COLUMN, SeveralEnvironments
from rldsl.runtime.state.data_reader import ROWS_AT_ONCE
from rldsl.sharding.partition import mix


def open_conversations(function: Function, limits: Conversation, sampling: Sampling, tokens: Tokens, rank: int,
                       at: str = "") -> Conversations:
    """The environments of one call on this rank; each has its own process, which is forked when it begins. A Failure if
    the environment or the chat template cannot be used. sampling: of a turn, which the requests of an agent are held
    against. rank: printed before each line that environments print. at: the call's place in the program."""
    images = tokens.images
    chat = functools.partial(ChatTemplate, tokens.tokenizer, tokens.ends, tokens.directory,
                             in_parts=images is not None)
    rules = Rules(sampling, frozenset(tokens.ends), limits.max_turns, limits.max_tokens, len(tokens.tokenizer),
                  limits.branches, None if images is None else images.processor.token_id)
    return EnvironmentProcesses(function, limits.turn_timeout, limits.on_error, rank, rules, at).open(chat)


@dataclass
class Environments:
    """The environments that this rank has opened; they stay for all steps."""

    opened: dict[int, Conversations] = field(default_factory=dict)  # id of a generate event -> its conversations
    # the same -> how prompts with images are read, of data that has images
    images: dict[int, ImagePrompts] = field(default_factory=dict)
    # conversations that a time limit ended: of this rank, and on rank 0 also those before the checkpoint resumed from
    timeouts: int = 0
    errors: int = 0  # those that an error of their environment ended, since this process started

    def open(self, event: int, functions: Sequence[Function], limits: Conversation, sampling: Sampling, tokens: Tokens,
             rank: int, rows: Source | None, at: str = "") -> None:
        """Open those of a generate event, and check that they fit the tokenizer and the data. Codes: RL0713, RL0716 ..
        RL0720, RL0770 .. RL0774. rows: of the data, if this rank compares them with what `reset` takes. at: the call's
        place in the program, for messages."""
        with _failures_name(at):
            self._open(event, functions, limits, sampling, tokens, rank, rows, at)

    def _open(self, event: int, functions: Sequence[Function], limits: Conversation, sampling: Sampling, tokens: Tokens,
              rank: int, rows: Source | None, at: str) -> None:
        named: dict[str, Conversations] = {}
        if tokens.images is not None:
            self.images[event] = tokens.images
        self.opened[event] = SeveralEnvironments(named)
        for function in functions:
            named[function.name] = open_conversations(function, limits, sampling, tokens, rank, at)
        if limits.branches > 1 and all(isinstance(c, EnvironmentProcesses) and c.endpoint is None
                                       for c in named.values()):
            raise _never_branches(functions[0], limits.branches)
        if len(named) == 1:
            self.opened[event] = named[functions[0].name]
        if rows is not None:
            check_columns([(function, named[function.name].takes) for function in functions], rows)

    def close(self) -> None:
        for conversations in self.opened.values():
            conversations.close()
        self.opened.clear()


@contextmanager
def _failures_name(at: str) -> Iterator[None]:
    """Let Failures name a place in the program, too. at: "p.rlf:7:3"; "" for none."""
    try:
        yield
    except Failure as failure:
        if not at:
            raise
        note = f"in the conversations of the call at {at}"
        raise Failure(replace(d, notes=(*d.notes, note)) for d in failure.diagnostics) from failure.__cause__


def _never_branches(function: Function, branches: int) -> Failure:
    return fail("RL0713", f"`{function.name}` is no agent: its conversations have one sequence each, and "
                          f"`branches={branches}` of `generate` allows more", place=function.path,
                help="leave `branches=` out, which reserves memory for rows that will never be; only the conversations "
                     "of an agent with its own loop, `run(row, base_url, api_key)`, have branches")


def check_columns(environments: Sequence[tuple[Function, ResetParameters]], source: Source) -> None:
    """RL0720: the first row that names no environment, or that `reset` of its environment cannot be called with.
    environments: those of a call, and what each takes."""
    named = {function.name: (function, takes) for function, takes in environments}
    have = set(source.tokens.roles.values())  # every row has its prompt
    if len(named) == 1 and all(t.accepted is None and set(t.required) <= have for _, t in environments):
        return
    for first in range(0, len(source.table), ROWS_AT_ONCE):
        numbers = range(first, min(first + ROWS_AT_ONCE, len(source.table)))
        for number, row in zip(numbers, source.table.read(numbers), strict=True):
            place = source.table.place(number)
            name = str(row.get(COLUMN)) if len(named) > 1 else environments[0][0].name
            wrong = _not_taken(*named[name], row, place) if name in named else _unnamed(row, named, place)
            if wrong is not None:
                raise wrong


def _unnamed(row: Row, named: Collection[str], place: str) -> Failure:
    shown = ", ".join(f"`{name}`" for name in named)
    if COLUMN not in row:
        return fail("RL0720", f"this row does not name its environment: it has no column `{COLUMN}`", place=place,
                    notes=(f"environments of the call: {shown}",), help="add the column, with the name of a class")
    near = get_close_matches(str(row[COLUMN]), named, n=1)
    return fail("RL0720", f"the column `{COLUMN}` is {row[COLUMN]!r}, which is no environment of the call", place=place,
                help=f"did you mean `{near[0]}`?" if near else f"environments of the call: {shown}")


def _not_taken(function: Function, takes: ResetParameters, row: Row, place: str) -> Failure | None:
    shown = (f"`reset` of `{function.name}` in {function.path}; columns of this row: "
             + ", ".join(f"`{c}`" for c in row),)
    for name in takes.required:
        if name not in row:
            near = get_close_matches(name, row, n=1)
            return fail("RL0720", f"`reset` needs the column `{name}`, which this row does not have", place=place,
                        notes=shown, help=f"did you mean `{near[0]}`?" if near else
                        "add the column, or give the parameter a default")
    for name in row:
        if takes.accepted is not None and name not in takes.accepted:
            return fail("RL0720", f"`reset` does not take the column `{name}`", place=place, notes=shown,
                        help="it gets all columns: add `**row` to its parameters")
    return None


@dataclass(frozen=True)
class RowTalk:
    """The conversations of some rows, with what each begins with (`rldsl.runtime.backend.Talk`)."""

    environments: Environments  # of this rank
    event: int  # the generate event
    rows: dict[int, WholeRow]  # row -> that of the data
    prompt: str  # the column that has the prompt
    seed: int  # of this call in this step
    at: str = ""  # the call's place in the program, for messages

    @property
    def conversations(self) -> Conversations:
        return self.environments.opened[self.event]

    def begin(self, row: int) -> None:
        place, columns, number = self.rows[row]
        prompts = self.environments.images.get(self.event)
        images = None if prompts is None else RowImages(prompts, columns, number, place)
        with _failures_name(self.at):
            self.conversations.begin(row, columns, columns[self.prompt], mix(self.seed, row) >> 1, images)

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool, logprobs: Sequence[float]) -> None:
        with _failures_name(self.at):
            self.conversations.said(row, ids, ended_by_limit, logprobs)

    def finish(self, row: int, why: Stopped) -> None:
        with _failures_name(self.at):
            self.conversations.finish(row, why)

    def arrivals(self, wait: bool) -> list[Arrival]:
        with _failures_name(self.at):
            found = self.conversations.arrivals(wait)
        self.environments.timeouts += sum(a.stopped == "timeout" for a in found)
        self.environments.errors += sum(a.stopped == "error" for a in found)
        return found
