"""The endpoint of a rank: agents with their own loops ask the model by HTTP, each in its own conversation.

In: requests of agents, whose key says which conversation they belong to. Out: the tokens that each adds to its
conversation, and answers with what the model said.
A request that extends what was said, message by message or id by id, is the next turn of that sequence. Any other one
begins a new sequence of the conversation, a branch, up to `branches` of the program. The tokens of a branch are those
that the agent asks with: what it shares with another one is not rendered again, and was not sampled in it.
A request that leaves its branch no room for a turn is refused and adds nothing; the agent may use another branch.
Invariant: a request is asked after the one before it was answered; so the order of an agent's requests, and which
branch each one is in, are the agent's alone, and no clock decides it.
Codes: RL0730 (`requests.py`), RL0736 a request that needs more branches than there are, RL0737 one that was not waited
for.
"""

from __future__ import annotations

import json
import secrets
import selectors
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rldsl.diag import Failure, internal_error
from rldsl.runtime.environments import ContextImages, Message, Stopped
from rldsl.runtime.environments.agent_branches import Branch, Dialogue, Heard, Point, difference, last_of, leads_to
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
    has_images,
    models_answer,
    token_answer,
    token_request,
)
from rldsl.runtime.environments.tool_calls import Turn

CHAT, TOKENS, MODELS = "/v1/chat/completions", "/inference/v1/generate", "/v1/models"


class Endpoint:
    """An HTTP server and the conversations of its agents. Nothing here waits."""

    def __init__(self, make_chat: ChatFactory, rules: Rules):
        self.make_chat, self.rules = make_chat, rules
        self.server = LoopbackServer(lambda key: self.row_of.get(key))
        self.dialogues: dict[int, Dialogue] = {}
        self.row_of: dict[str, int] = {}
        self.chats: dict[tuple[str, Speaks | None], Chat] = {}  # by tools and by what is said between turns
        self.heard: deque[tuple[int, Heard | Refused | Failure]] = deque()

    def begin(self, row: int, images: ContextImages | None = None) -> dict[str, str]:
        """Open a conversation. images: of its row. Returns what its agent needs to ask."""
        key = secrets.token_urlsafe(32)
        self.dialogues[row], self.row_of[key] = Dialogue(key, images), row
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

    def next(self) -> tuple[int, Heard | Refused | Failure] | None:
        """(row, what its agent has asked, or why its conversation cannot continue), in the order of arrival; None if
        nothing is left."""
        return self.heard.popleft() if self.heard else None

    def waits(self, row: int) -> bool:
        """Whether an agent has a request that is not answered."""
        return self.dialogues[row].request is not None

    def asked(self, row: int) -> bool:
        """Whether an agent has ever asked."""
        return bool(self.dialogues[row].branches)

    def full(self, row: int) -> bool:
        """Whether the last request of an agent was refused because its branch has no room for another turn."""
        return self.dialogues[row].full

    def answer(self, row: int, ids: Sequence[int], logprobs: Sequence[float], cut: bool) -> None:
        """Answer the request of an agent with the model's turn."""
        dialogue = self.dialogues[row]
        request = dialogue.request
        if request is None:
            raise internal_error(f"the agent of row {row} has not asked", "run")
        branch = dialogue.branches[dialogue.at]
        before = branch.points[-1]
        self.poll()  # so that a client that is gone, or has asked twice, is known
        dialogue.request = None
        dialogue.turns += 1
        if request.connection.closed:
            dialogue.fault = Refused("RL0737", "gave up a request before it was answered",
                                     "raise the client's time limit, or give it none: `turn_timeout` bounds the agent")
        if dialogue.fault is not None:
            self._refuse(request, dialogue.fault)
            self.heard.append((row, dialogue.fault))
            return
        asked, chat = before.asked, self._chat(before.asked, None)
        sampled = Sampled(dialogue.turns, dialogue.plain(branch.tokens), tuple(ids), tuple(logprobs), cut,
                          lambda i: chat.text([i], special=True))
        name, messages = f"{row}-{dialogue.turns}", before.messages
        body, content = token_answer(asked, sampled, name) if isinstance(asked, TokenRequest) else b"", ""
        if isinstance(asked, ChatRequest):
            message = self._said(chat, dialogue, ids)
            messages = (*messages, message)
            body, content = chat_answer(asked, _on_the_wire(message), sampled, f"chatcmpl-{name}")
        branch.tokens += ids
        branch.points.append(Point(asked, messages, len(branch.tokens), answered=True, cut=cut))
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
                         f"{self.rules.max_tokens} tokens: this request leaves no room for another turn "
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
        try:
            begun = (self._tokens(dialogue, asked) if isinstance(asked, TokenRequest)
                     else self._messages(dialogue, asked))
        except Failure as failure:  # the template rejects what the agent says
            (diagnostic,) = failure.diagnostics
            self.server.answer(request, 400, error_body(diagnostic.code, f"{diagnostic.code}: {diagnostic.title}"))
            self.heard.append((request.row, failure))
            return
        had = len(dialogue.branches[begun.branch].tokens) if begun.branch < len(dialogue.branches) else 0
        # decoding ends the conversation at its first context, or when all of its turns are used
        ends = not dialogue.branches or dialogue.turns >= self.rules.max_turns
        if had + len(begun.tokens) >= self.rules.max_tokens and not ends:
            dialogue.full = True
            raise self._limit("max_tokens")
        dialogue.full = False
        if begun.branch == len(dialogue.branches):
            dialogue.branches.append(Branch())
        branch = dialogue.branches[begun.branch]
        branch.tokens += begun.tokens
        branch.points.append(Point(asked, tuple(asked.messages) if isinstance(asked, ChatRequest) else (),
                                   len(branch.tokens), answered=False))
        dialogue.at, dialogue.request, dialogue.context = begun.branch, request, dialogue.plain(begun.tokens)
        self.heard.append((request.row, begun))

    def _tokens(self, dialogue: Dialogue, asked: TokenRequest) -> Heard:
        def extends(branch: Branch) -> bool:
            had = len(branch.tokens)
            return had < len(asked.ids) and isinstance(branch.points[-1].asked, TokenRequest) \
                and list(asked.ids[:had]) == branch.tokens

        if (number := last_of(dialogue, extends)) is not None:
            return Heard(number, asked.ids[len(dialogue.branches[number].tokens):])
        return Heard(self._new_branch(dialogue, asked), asked.ids)

    def _messages(self, dialogue: Dialogue, asked: ChatRequest) -> Heard:
        def extends(branch: Branch) -> bool:
            return len(branch.points[-1].messages) < len(asked.messages) and leads_to(branch.points[-1], asked)

        if (number := last_of(dialogue, extends)) is not None:
            return Heard(number, self._added(dialogue, asked, dialogue.branches[number].points[-1]))
        number = self._new_branch(dialogue, asked)
        shared = [(point, branch) for branch in dialogue.branches for point in branch.points if leads_to(point, asked)]
        # what it begins with, if the model has said it, is not rendered again
        for point, branch in sorted(shared, key=lambda found: len(found[0].messages), reverse=True):
            had = tuple(branch.tokens[: point.num_tokens])
            if len(point.messages) == len(asked.messages):
                return Heard(number, had)
            if point.answered:
                return Heard(number, had + self._added(dialogue, asked, point))
        return Heard(number, self._added(dialogue, asked, None))

    def _new_branch(self, dialogue: Dialogue, asked: ChatRequest | TokenRequest) -> int:
        """The number of a new branch. RL0736 if there may be none; HttpError if the agent has just heard that its
        branch is full, so that it may still end with a reward."""
        count = len(dialogue.branches)
        if count < self.rules.branches:
            return count
        if dialogue.full:
            raise self._limit("max_tokens")
        several = f" {self.rules.branches} times" if self.rules.branches > 1 else ""
        raise Refused(
            "RL0736", f"asked{several} for something else than the next turn of its conversation: "
                      f"{difference(dialogue.branches[dialogue.at], asked)}",
            f"such a request begins a new branch: allow them with `branches={2 * count}` of `generate`, or repeat all "
            "that was said and add to it")

    def _added(self, dialogue: Dialogue, asked: ChatRequest, point: Point | None) -> tuple[int, ...]:
        """The tokens of the messages after a point; None: of all messages."""
        had = point.messages if point is not None else ()
        added = asked.messages[len(had):]
        names = {c["id"]: c["function"]["name"] for m in (*had, *added) for c in m.get("tool_calls", [])}
        for message in added:
            if message["role"] == "tool" and message["tool_call_id"] not in names:
                raise Refused("RL0736", f"answered the call {message['tool_call_id']!r}, which nobody has made",
                              "a message with the role `tool` has the `tool_call_id` of a call in those before it")
        rendered = [_rendered(m, names) for m in added]
        for i, message in enumerate(rendered, len(had)):
            check_characters(f"messages[{i}]", message)
        shown = any(has_images(m) for m in rendered)
        if point is None:
            return self._chat(asked, None).first(rendered, dialogue.images if shown else None)
        if shown:
            raise Refused("RL0730", "asked for what this run does not do: a message after the model's first turn has "
                                    "an image", "put all images of the row into the messages before the first turn")
        chats = [self._chat(asked, kind) for kind in sorted({_kind(m) for m in added})]  # "tool" before "user"
        said = [{k: v for k, v in m.items() if k != "tool_call_id"} for m in rendered]  # `reply` numbers them
        return chats[0].reply(said, point.cut)

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


def _kind(message: Message) -> Speaks:
    return "tool" if message["role"] == "tool" else "user"


def _has_json(arguments: Any) -> bool:
    """Whether arguments can be given to the agent: a model may nest them deeper than they can be written."""
    try:
        json.dumps(arguments)
    except RecursionError:
        return False
    return True


def _rendered(message: Message, names: Mapping[str, str]) -> Message:
    """A message as chat templates want it."""
    return {**message, "name": names[message["tool_call_id"]]} if message["role"] == "tool" else message


def _on_the_wire(message: Message) -> Message:
    """A message of the model as OpenAI's clients read it."""
    calls = [{**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
             for c in message.get("tool_calls", [])]
    return {**message, "content": message["content"] or None, "tool_calls": calls} if calls else message
