"""Requests of agents, checked, and answers to them, as in OpenAI's chat completions and vLLM's token endpoint.

In: JSON bodies. Out: a ChatRequest or a TokenRequest; bodies of answers.
Invariant: nothing that an agent asks for is dropped silently. How tokens are sampled is the program's: a request
may repeat it, and one that says otherwise, or has a field that is not known here, is refused.
Codes: RL0730 a request that this run does not answer as it asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rldsl.plan.payloads import Sampling
from rldsl.runtime.environments import Message
from rldsl.runtime.environments.characters import half_in
from rldsl.runtime.environments.contract import ROLES
from rldsl.runtime.environments.http_server import HttpError

OF_A_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id")
# what says nothing about the tokens
WITHOUT_EFFECT = frozenset({"model", "user", "metadata", "store", "service_tier", "safety_identifier",
                            "prompt_cache_key", "request_id", "cache_salt", "priority", "stream_options"})


class Refused(Exception):
    """An agent that does what this run does not do. what: after the agent's name."""

    def __init__(self, code: str, what: str, help: str, field: str | None = None):
        super().__init__(what)
        self.code, self.what, self.help, self.field = code, what, help, field


@dataclass(frozen=True)
class Rules:
    """What requests are held against."""

    sampling: Sampling     # of a turn
    ends: frozenset[int]   # ids that end a turn
    max_turns: int         # of a conversation
    max_tokens: int        # of each branch
    num_tokens: int        # of the tokenizer: ids are below it
    branches: int = 1      # of a conversation
    image_token: int | None = None  # the placeholder of images; None: rows have none


@dataclass(frozen=True)
class ChatRequest:
    """A conversation in messages."""

    messages: list[Message]       # in one form, however they were written
    tools: list[dict[str, Any]]   # JSON schemas
    model: str                    # the name that the agent gives it
    logprobs: bool                # whether the answer has them
    token_ids: bool               # whether the answer has the ids
    stream: bool                  # whether it is sent as events
    usage: bool                   # whether these end with the number of tokens


@dataclass(frozen=True)
class TokenRequest:
    """A conversation in tokens."""

    ids: tuple[int, ...]   # all of it
    request_id: str        # the agent's name for it
    logprobs: bool         # whether the answer has them


@dataclass(frozen=True)
class Sampled:
    """A turn of the model."""

    number: int                      # in its conversation, from 1
    prompt: Sequence[int]            # the tokens before it
    ids: Sequence[int]
    logprobs: Sequence[float]
    cut: bool                        # whether a limit ended it
    text: Callable[[int], str]       # of an id

    @property
    def usage(self) -> dict[str, int]:
        """How many tokens there are."""
        before, said = len(self.prompt), len(self.ids)
        return {"prompt_tokens": before, "completion_tokens": said, "total_tokens": before + said}


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. HttpError if it is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, "invalid_json", f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise HttpError(400, "invalid_json", "the body is no JSON object")
    return {k: v for k, v in found.items() if v is not None}  # null is what was not given


def chat_request(body: bytes, rules: Rules) -> ChatRequest:
    """A request of chat completions. RL0730."""
    asked = parsed(body)
    _check(asked, {**_sampling(rules), **_CHAT}, {"messages", "tools"})
    messages, tools = asked.get("messages"), asked.get("tools", [])
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "is no list of messages")
    if not isinstance(tools, list) or not all(isinstance(t, dict) and t.get("type") == "function" and isinstance(
            t.get("function"), dict) and isinstance(t["function"].get("name"), str) for t in tools):
        raise _wrong("tools", 'is no list of {"type": "function", "function": {"name": ..., ...}}')
    read = [_message(i, m, rules.image_token is not None) for i, m in enumerate(messages)]
    check_characters("tools", tools)
    if read[-1]["role"] == "assistant":
        raise _wrong("messages", "ends with a message of the assistant, and a turn is not continued")
    options = asked.get("stream_options")
    return ChatRequest(read, tools, str(asked.get("model", "")), bool(asked.get("logprobs")),
                       bool(asked.get("return_token_ids")), bool(asked.get("stream")),
                       isinstance(options, Mapping) and bool(options.get("include_usage")))


def token_request(body: bytes, rules: Rules) -> TokenRequest:
    """A request of tokens. RL0730."""
    asked = parsed(body)
    _check(asked, _TOKENS, {"token_ids", "sampling_params"})
    ids, sampling = asked.get("token_ids"), asked.get("sampling_params", {})
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise _wrong("token_ids", "is missing" if ids is None else "is no list of ids", _IDS)
    if not ids:
        raise _wrong("token_ids", "is empty", _IDS)
    if max(ids) >= rules.num_tokens:
        raise _wrong("token_ids", f"has {max(ids)}, and the tokenizer has {rules.num_tokens} tokens", _IDS)
    if rules.image_token in ids:
        raise _wrong("token_ids", f"has the image token {rules.image_token}, which says no image",
                     'ask with messages: {"type": "image"} is the place of an image of the row')
    if not isinstance(sampling, dict):
        raise _wrong("sampling_params", "is no object")
    sampling = {k: v for k, v in sampling.items() if v is not None}
    _check(sampling, {**_sampling(rules), **_SAMPLING_OF_TOKENS}, set())
    return TokenRequest(tuple(ids), str(asked.get("request_id", "")), "logprobs" in sampling)


def chat_answer(request: ChatRequest, message: Message, sampled: Sampled, id: str) -> tuple[bytes, str]:
    """(body, content type). message: what the model said, with the arguments of calls as text."""
    finish = "length" if sampled.cut else "tool_calls" if message.get("tool_calls") else "stop"
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
    if request.logprobs:
        texts = [sampled.text(i) for i in sampled.ids]
        choice["logprobs"] = {"content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, sampled.logprobs, strict=True)], "refusal": None}
    prompt: dict[str, Any] = {}
    if request.token_ids:
        prompt, choice["token_ids"] = {"prompt_token_ids": list(sampled.prompt)}, list(sampled.ids)
    common = {"id": id, "created": 0, "model": request.model, **prompt}  # no clock: an agent sees the same again
    if not request.stream:
        return json.dumps({**common, "object": "chat.completion", "choices": [{**choice, "message": message}],
                           "usage": sampled.usage}).encode(), "application/json"
    common["object"] = "chat.completion.chunk"
    delta = dict(message)
    if delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    events = [{**common, "choices": [{**choice, "delta": delta, "finish_reason": None}]},
              {**common, "choices": [{"index": 0, "delta": {}, "finish_reason": finish, "logprobs": None}]}]
    if request.usage:
        events.append({**common, "choices": [], "usage": sampled.usage})
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return text.encode(), "text/event-stream"


def token_answer(request: TokenRequest, sampled: Sampled, id: str) -> bytes:
    """The answer with ids."""
    content: list[dict[str, Any]] = [{"token": f"token_id:{i}", "logprob": logprob, "bytes": None, "top_logprobs": []}
               for i, logprob in zip(sampled.ids, sampled.logprobs, strict=True)]
    return json.dumps({
        "request_id": request.request_id or id, "prompt_logprobs": None, "kv_transfer_params": None,
        "usage": sampled.usage, "choices": [{
            "index": 0, "token_ids": list(sampled.ids), "finish_reason": "length" if sampled.cut else "stop",
            "logprobs": {"content": content} if request.logprobs else None}]}).encode()


def models_answer(rules: Rules) -> bytes:
    """What `/v1/models` lists: the one model of this endpoint."""
    return json.dumps({"object": "list", "data": [
        {"id": "policy", "object": "model", "created": 0, "owned_by": "rldsl", "max_model_len": rules.max_tokens}]}
    ).encode()


# checks

def check_characters(name: str, value: Any) -> None:
    """RL0730: a part of a request that no tokenizer encodes."""
    if half := half_in(value):
        raise _wrong(name, f"has half of a character ({half}), which no tokenizer encodes")


_Check = tuple[Callable[[Any], bool], str]  # of a value; and what it must be


def _equal(*values: Any) -> _Check:
    return lambda v: any(v == value and isinstance(v, bool) == isinstance(value, bool) for value in values), (
        f"{values[0]!r} here")


def _sampling(rules: Rules) -> dict[str, _Check]:
    """What a request may say of how tokens are drawn."""
    sampling = rules.sampling
    longest: _Check = (lambda v: type(v) is int and v >= sampling.max_new_tokens,
                       f"at least max_new_tokens={sampling.max_new_tokens} of the program, which limits every turn")
    return {
        "temperature": _equal(0.0) if sampling.greedy else _equal(sampling.temperature),
        "top_p": _equal(sampling.top_p), "min_p": _equal(sampling.min_p),
        "top_k": _equal(sampling.top_k, *(() if sampling.top_k else (-1,))),
        "max_tokens": longest, "max_completion_tokens": longest, "min_tokens": _equal(sampling.min_new_tokens),
        "stop": (lambda v: tuple([v] if isinstance(v, str) else v if isinstance(v, list) else "?") == sampling.stop,
                 f"{list(sampling.stop)!r} here"),
        "stop_token_ids": (lambda v: isinstance(v, list) and all(i in rules.ends for i in v),
                           f"some of {sorted(rules.ends)} here"),
        "n": _equal(1), "presence_penalty": _equal(0), "frequency_penalty": _equal(0), "repetition_penalty": _equal(1),
        "logit_bias": _equal({}), "ignore_eos": _equal(False), "top_logprobs": _equal(0)}


_BOOL: _Check = (lambda v: isinstance(v, bool), "true or false")
_CHAT: dict[str, _Check] = {
    "stream": _BOOL, "logprobs": _BOOL, "return_token_ids": _BOOL, "tool_choice": _equal("auto"),
    "parallel_tool_calls": _equal(True), "response_format": _equal({"type": "text"}),
    "chat_template_kwargs": _equal({}), "add_generation_prompt": _equal(True), "modalities": _equal(["text"])}
_TOKENS: dict[str, _Check] = {"stream": _equal(False)}
_SAMPLING_OF_TOKENS: dict[str, _Check] = {
    "logprobs": _equal(1, 0), "skip_special_tokens": _BOOL, "detokenize": _BOOL,
    "spaces_between_special_tokens": _BOOL}


def _check(asked: Mapping[str, Any], checks: Mapping[str, _Check], others: set[str]) -> None:
    for name, value in asked.items():
        if name in checks:
            allowed, must = checks[name]
            if not allowed(value):
                raise _wrong(name, f"is {_shown(value)}, and must be {must}", _PROGRAM)
        elif name not in others | WITHOUT_EFFECT:
            raise _wrong(name, "is not known to this endpoint", _PROGRAM)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + " ..."


_PROGRAM = "how tokens are sampled is said in the program, at `generate`: leave the field out of the request"
_IDS = "`token_ids` is the whole context of the turn, at least one id: the tokenizer's, whole numbers from 0"
_IMAGES = ('{"type": "image"} is the place of an image of the row, in the order of its column; an image that the agent '
           "has from elsewhere, as `image_url`, is not read")
_FORM = "messages and tools are those of OpenAI's chat completions, with text alone"


def _wrong(field: str, what: str, help: str = _FORM) -> Refused:
    return Refused("RL0730", f"asked for what this run does not do: `{field}` {what}", help, field)


def has_images(message: Message) -> bool:
    """Whether a message of a `ChatRequest` has the place of an image."""
    return not isinstance(message["content"], str)


def _message(number: int, found: Any, images: bool = False) -> Message:
    """A message in one form: its content is text, or parts if one of them is the place of an image, and the arguments
    of its calls are objects. images: whether rows have images."""
    name = f"messages[{number}]"
    if not isinstance(found, Mapping) or found.get("role") not in ROLES:
        raise _wrong(name, f"is no message with a role of {', '.join(ROLES)}")
    for key, value in found.items():
        if key not in OF_A_MESSAGE and value:
            raise _wrong(f"{name}.{key}", "is not known to this endpoint")
    content = found.get("content")
    if isinstance(content, list) and all(isinstance(b, Mapping) and b.get("type") == "text" and isinstance(
            b.get("text"), str) for b in content):
        content = "".join(b["text"] for b in content)
    if content is None and found["role"] == "assistant":
        content = ""
    if images and isinstance(content, list) and found["role"] != "assistant" and all(map(_is_part, content)):
        return {"role": found["role"], "content": [dict(b) for b in content]}
    if not isinstance(content, str):
        raise _wrong(f"{name}.content", 'is neither text nor a list of {"type": "text", "text": ...} and '
                     '{"type": "image"}', _IMAGES) if images else _wrong(
            f"{name}.content", "is neither text nor a list of blocks of text")
    message: Message = {"role": found["role"], "content": content}
    if found.get("name"):
        message["name"] = str(found["name"])
    if found["role"] == "tool":
        if not isinstance(found.get("tool_call_id"), str):
            raise _wrong(f"{name}.tool_call_id", "is missing")
        message["tool_call_id"] = found["tool_call_id"]
    if found.get("tool_calls"):
        if not isinstance(found["tool_calls"], list):
            raise _wrong(f"{name}.tool_calls", "is no list")
        message["tool_calls"] = [_call(f"{name}.tool_calls", call) for call in found["tool_calls"]]
    return message


def _is_part(block: Any) -> bool:
    return block == {"type": "image"} or isinstance(block, Mapping) and block.keys() == {"type", "text"} \
        and block["type"] == "text" and isinstance(block["text"], str)


def _call(name: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(name, "has a call without a function")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise _wrong(name, f"has arguments that are no JSON: {_shown(arguments)}") from None
    return {"id": str(call.get("id", "")), "type": "function",
            "function": {"name": function["name"], "arguments": arguments}}
