"""The endpoint of a rank: agents with loops of their own ask the model by HTTP, each in its own conversation.

In: requests of agents, whose key says which conversation they belong to. Out: the tokens that each adds to its
conversation, and answers with what the model said.
Invariant: a conversation is one sequence. A request must extend what was said, message by message or id by id, and is
asked after the one before it was answered; so the order of its requests is the agent's alone, and no clock decides it.
Codes: RL0730 (`requests.py`), RL0736 a request that does not extend its conversation, RL0737 one that was not waited
for.
"""

from __future__ import annotations

import functools
import json
import secrets
import selectors
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rldsl.diag import Failure, internal_error
from rldsl.runtime.environments import Message, Stopped
from rldsl.runtime.environments.characters import half_in
from rldsl.runtime.environments.chat import Chat, ChatFactory
from rldsl.runtime.environments.contract import Speaks
from rldsl.runtime.environments.http_server import ADDRESS, HttpError, LoopbackServer, Request, error_body
from rldsl.runtime.environments.requests import (
    ChatRequest,
    Refused,
    Rules,
    Sampled,
    TokenRequest,
    chat_answer,
    chat_request,
    check_characters,
    models_answer,
    token_answer,
    token_request,
)
from rldsl.runtime.environments.tool_calls import Turn

Heard = tuple[int, ...] | Refused | Failure  # the tokens that a request adds, or why its conversation cannot go on
CHAT, TOKENS, MODELS = "/v1/chat/completions", "/inference/v1/generate", "/v1/models"


@dataclass
class Dialogue:
    """A conversation, as its agent has led it."""

    key: str                                                     # that its requests have
    asked: ChatRequest | TokenRequest | None = None              # the last request
    request: Request | None = None                               # the same, while the model works on it
    messages: list[Message] = field(default_factory=list)        # of both sides, if it is led in messages
    tokens: list[int] = field(default_factory=list)              # of both sides
    context: tuple[int, ...] = ()                                # what the last request added
    turns: int = 0                                               # of the model
    cut: bool = False                                            # whether the last one has no stop token
    limit: Stopped | None = None                                 # that ends it: no more requests are answered
    fault: Refused | None = None                                 # that ends it when the model's turn has ended

    @property
    def tool_names(self) -> dict[str, str]:
        """id of a call -> the tool."""
        return {c["id"]: c["function"]["name"] for m in self.messages for c in m.get("tool_calls", [])}


class Endpoint:
    """An HTTP server and the conversations of its agents. Nothing here waits."""

    def __init__(self, make_chat: ChatFactory, rules: Rules):
        self.make_chat, self.rules = make_chat, rules
        self.server = LoopbackServer(lambda key: self.row_of.get(key))
        self.dialogues: dict[int, Dialogue] = {}
        self.row_of: dict[str, int] = {}
        self.chats: dict[tuple[str, Speaks | None], Chat] = {}  # by tools and by what is said between turns
        self.heard: deque[tuple[int, Heard]] = deque()

    def begin(self, row: int) -> dict[str, str]:
        """Open a conversation. Returns what its agent needs to ask."""
        key = secrets.token_urlsafe(32)
        self.dialogues[row], self.row_of[key] = Dialogue(key), row
        return {"base_url": f"http://{ADDRESS}:{self.server.port}/v1", "api_key": key}

    def end(self, row: int) -> None:
        """Close a conversation: its key is no longer known."""
        if (dialogue := self.dialogues.pop(row, None)) is not None:
            del self.row_of[dialogue.key]
            self.heard = deque(heard for heard in self.heard if heard[0] != row)

    def close(self) -> None:
        """Close the server. It may be called again."""
        self.server.close()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let a selector wake when there is something to do here."""
        self.server.register(selector)

    def poll(self) -> None:
        """Take what has arrived. Errors: Failure, if the chat template cannot be used for what agents ask."""
        for request in self.server.requests():
            dialogue = self.dialogues[request.row]
            try:
                self._take(dialogue, request)
            except RecursionError:
                self.server.answer(request, 400, error_body("invalid_json", "the body is nested too deeply"))
            except HttpError as error:
                self.server.answer(request, error.status, error_body(error.code, str(error)))
            except Refused as refused:
                self._refuse(request, refused)
                if dialogue.request is None:
                    self.heard.append((request.row, refused))
                else:
                    dialogue.fault = dialogue.fault or refused

    def next(self) -> tuple[int, Heard] | None:
        """(row, what its agent has asked), in the order of arrival; None if nothing is left."""
        return self.heard.popleft() if self.heard else None

    def waits(self, row: int) -> bool:
        """Whether an agent has a request that is not answered."""
        return self.dialogues[row].request is not None

    def asked(self, row: int) -> bool:
        """Whether an agent has ever asked."""
        return self.dialogues[row].asked is not None

    def answer(self, row: int, ids: Sequence[int], logprobs: Sequence[float], cut: bool) -> None:
        """Answer the request of an agent with the model's turn."""
        dialogue = self.dialogues[row]
        asked, request = dialogue.asked, dialogue.request
        if asked is None or request is None:
            raise internal_error(f"the agent of row {row} has not asked", "run")
        self.poll()  # so that a client that is gone, or has asked twice, is known
        dialogue.request = None
        dialogue.turns, dialogue.cut = dialogue.turns + 1, cut
        if request.connection.closed:
            dialogue.fault = Refused("RL0737", "gave up a request before it was answered",
                                     "raise the client's time limit, or give it none: `turn_timeout` bounds the agent")
        if dialogue.fault is not None:
            self._refuse(request, dialogue.fault)
            self.heard.append((row, dialogue.fault))
            return
        chat = self._chat(asked, None)
        sampled = Sampled(dialogue.turns, tuple(dialogue.tokens), tuple(ids), tuple(logprobs), cut,
                          lambda i: chat.text([i], special=True))
        name = f"{row}-{dialogue.turns}"
        body, content = token_answer(asked, sampled, name) if isinstance(asked, TokenRequest) else b"", ""
        if isinstance(asked, ChatRequest):
            message = self._said(chat, dialogue, ids)
            dialogue.messages.append(message)
            body, content = chat_answer(asked, _on_the_wire(message), sampled, f"chatcmpl-{name}")
        dialogue.tokens += ids
        self.server.answer(request, 200, body, content or "application/json")

    def stop(self, row: int, why: Stopped) -> None:
        """Let a limit of the program end a conversation: its requests are answered with an error from now on."""
        dialogue = self.dialogues[row]
        dialogue.limit = why
        if dialogue.request is not None:
            error = self._limit(why)
            self.server.answer(dialogue.request, error.status, error_body(error.code, str(error)))
            dialogue.request = None

    def _limit(self, why: Stopped) -> HttpError:
        if why == "max_turns":
            return HttpError(400, why, f"the conversation has had its turns: max_turns={self.rules.max_turns}")
        return HttpError(400, "context_length_exceeded", "This model's maximum context length is "
                         f"{self.rules.max_tokens} tokens: the conversation leaves no room for another turn "
                         f"(max_tokens={self.rules.max_tokens})")

    def _refuse(self, request: Request, refused: Refused) -> None:
        self.server.answer(request, 400, error_body(refused.code, f"{refused.code}: this agent {refused.what}. "
                                                                  f"{refused.help}", refused.field))

    def _take(self, dialogue: Dialogue, request: Request) -> None:
        """Hear a request. HttpError if only the request fails, Refused if its conversation does."""
        if request.path == MODELS and request.method == "GET":
            self.server.answer(request, 200, models_answer(self.rules))
            return
        if request.path not in (CHAT, TOKENS):
            raise HttpError(404, "not_found", f"{request.path} is not served: {CHAT}, {TOKENS} and {MODELS} are")
        if request.method != "POST":
            raise HttpError(405, "method_not_allowed", f"{request.path} is asked with POST")
        if dialogue.limit is not None:
            raise self._limit(dialogue.limit)
        if dialogue.request is not None:
            raise Refused("RL0737", "asked again before its last request was answered",
                          "ask once at a time: which of two requests comes first would depend on the clock. Clients "
                          "that try again after a while do this, too: give them no time limit")
        asked = (chat_request if request.path == CHAT else token_request)(request.body, self.rules)
        if dialogue.asked is not None and type(asked) is not type(dialogue.asked):
            raise Refused("RL0736", "asked in messages and in tokens", "ask in one of the two ways in a conversation")
        render = self._tokens(dialogue, asked) if isinstance(asked, TokenRequest) else self._messages(dialogue, asked)
        try:
            context = render()
        except Failure as failure:  # the template rejects what the agent says
            (diagnostic,) = failure.diagnostics
            self.server.answer(request, 400, error_body(diagnostic.code, f"{diagnostic.code}: {diagnostic.title}"))
            self.heard.append((request.row, failure))
            return
        dialogue.asked, dialogue.request, dialogue.context = asked, request, context
        dialogue.tokens += context
        self.heard.append((request.row, context))

    def _tokens(self, dialogue: Dialogue, asked: TokenRequest) -> Callable[[], tuple[int, ...]]:
        had = tuple(dialogue.tokens)
        if asked.ids[: len(had)] != had:
            at = next((i for i, (a, b) in enumerate(zip(had, asked.ids, strict=False)) if a != b), len(asked.ids))
            raise _edited(f"token {at} is not the one that the conversation has")
        if len(asked.ids) == len(had):
            raise _edited("it adds no token")
        return lambda: asked.ids[len(had):]

    def _messages(self, dialogue: Dialogue, asked: ChatRequest) -> Callable[[], tuple[int, ...]]:
        before, had = dialogue.asked, dialogue.messages
        if isinstance(before, ChatRequest) and before.tools != asked.tools:
            raise _edited("its `tools` are others")
        for i, (old, new) in enumerate(zip(had, asked.messages, strict=False)):
            if _compared(old) != _compared(new):
                raise _edited(f"messages[{i}] ({new['role']}) is not the one that the conversation has")
        if len(asked.messages) <= len(had):
            raise _edited("it adds no message")
        added = asked.messages[len(had):]
        names = dialogue.tool_names | {c["id"]: c["function"]["name"] for m in added for c in m.get("tool_calls", [])}
        for message in added:
            if message["role"] == "tool" and message["tool_call_id"] not in names:
                raise _edited(f"a message answers the call {message['tool_call_id']!r}, which the model has not made")
        rendered = [_rendered(m, names) for m in added]
        for i, message in enumerate(rendered, len(had)):
            check_characters(f"messages[{i}]", message)
        dialogue.messages = asked.messages
        if not had:
            return functools.partial(self._chat(asked, None).first, rendered)
        chats = [self._chat(asked, kind) for kind in sorted({_kind(m) for m in added})]  # "tool" before "user"
        said = [{k: v for k, v in m.items() if k != "tool_call_id"} for m in rendered]  # `reply` numbers them
        return functools.partial(chats[0].reply, said, dialogue.cut)

    def _chat(self, asked: ChatRequest | TokenRequest, speaks: Speaks | None) -> Chat:
        tools = asked.tools if isinstance(asked, ChatRequest) else []
        key = json.dumps(tools, sort_keys=True), speaks
        if key not in self.chats:
            self.chats[key] = self.make_chat(tools, speaks)
        return self.chats[key]

    def _said(self, chat: Chat, dialogue: Dialogue, ids: Sequence[int]) -> Message:
        """The model's turn as a message. A turn with a call that cannot be read is text, all of it."""
        turn = chat.turn(ids, dialogue.context)
        if any("error" in call or half_in(call["name"]) or not _has_json(call["arguments"]) for call in turn.calls):
            turn = Turn(chat.text(ids[:-1] if ids[-1] in self.rules.ends else ids, special=True))
        message: Message = {"role": "assistant", "content": turn.content}
        if turn.calls:
            message["tool_calls"] = [
                {"id": f"call{dialogue.turns:03}{i:02}", "type": "function",
                 "function": {"name": call["name"], "arguments": call["arguments"]}}
                for i, call in enumerate(turn.calls)]
        return message


def _edited(why: str) -> Refused:
    return Refused("RL0736", f"asked for something else than the next turn of its conversation: {why}",
                   "a request repeats all that was said and adds to it; branches, samples of one context and shortened "
                   "histories are not supported")


def _kind(message: Message) -> Speaks:
    return "tool" if message["role"] == "tool" else "user"


def _compared(message: Message) -> tuple[Any, ...]:
    calls = [(c["function"]["name"], _comparable(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    return message["role"], message["content"], message.get("name"), calls, message.get("tool_call_id")


def _has_json(arguments: Any) -> bool:
    """Whether arguments can be given to the agent: a model may nest them deeper than they can be written."""
    try:
        json.dumps(arguments)
    except RecursionError:
        return False
    return True


def _comparable(arguments: Any) -> Any:
    """Arguments that are equal to themselves: a model may write NaN."""
    return json.loads(json.dumps(arguments), parse_constant=str)


def _rendered(message: Message, names: Mapping[str, str]) -> Message:
    """A message as chat templates want it."""
    return {**message, "name": names[message["tool_call_id"]]} if message["role"] == "tool" else message


def _on_the_wire(message: Message) -> Message:
    """A message of the model as OpenAI's clients read it."""
    calls = [{**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
             for c in message.get("tool_calls", [])]
    return {**message, "content": message["content"] or None, "tool_calls": calls} if calls else message
