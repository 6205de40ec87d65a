"""Agents with loops of their own, for tests: they ask the endpoint with the standard library alone."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import urllib.error
import urllib.request
from typing import Any

CALCULATOR = [{"type": "function", "function": {
    "name": "add", "description": "Adds two numbers.", "parameters": {
        "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}}}]


def ask(url: str, key: str, body: Any, method: str = "POST", timeout: float | None = None) -> Any:
    """The JSON of an answer, an error's included; text where it is none."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
                                     method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.loads(error.read())}
    try:
        return json.loads(text)
    except ValueError:
        return text


def chat(base_url: str, key: str, conversation: list[Any], **options: Any) -> Any:
    return ask(f"{base_url}/chat/completions", key, {"model": "policy", "messages": conversation} | options)


def said(answer: Any) -> Any:
    """The message of an answer. What an agent does not expect stops it."""
    if "choices" not in answer:
        raise RuntimeError(answer["error"]["message"])
    return answer["choices"][0]["message"]


async def scripted(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Does what the row says: a list of [what, argument], and returns its `reward`. What it hears is printed."""
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    tokens: list[int] = []
    for what, argument in row["script"]:
        answer: Any = None
        if what == "ask":
            answer = chat(base_url, api_key, messages, **argument)
            messages += [said(answer)] if "choices" in answer else []
        elif what == "must ask":
            messages.append(said(chat(base_url, api_key, messages, **argument)))
        elif what == "say":
            messages.append({"role": "user", "content": argument})
        elif what == "call":
            for number, call in enumerate(messages[-1]["tool_calls"]):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": argument[number]})
        elif what == "edit":
            messages[argument[0]] = argument[1]
        elif what == "forget":
            del messages[argument:]
        elif what == "raw":
            answer = ask(base_url.removesuffix("/v1") + argument["path"], argument.get("key", api_key),
                         argument.get("text", "").encode() or argument.get("body"), argument.get("method", "POST"))
        elif what == "tokens":
            tokens += argument["ids"]
            answer = ask(base_url.removesuffix("/v1") + "/inference/v1/generate", api_key, {
                "token_ids": tokens, "sampling_params": argument.get("sampling", {"logprobs": 1})})
            if "choices" in answer:
                tokens += answer["choices"][0]["token_ids"]
        elif what == "gather":
            loop = asyncio.get_running_loop()
            answer = await asyncio.gather(*(
                loop.run_in_executor(None, chat, base_url, api_key, messages) for _ in range(argument)))
        elif what == "leave":
            threading.Thread(target=chat, args=(base_url, api_key, messages), daemon=True).start()
            await asyncio.sleep(argument)
        elif what == "impatient":
            try:
                ask(f"{base_url}/chat/completions", api_key, {"messages": messages}, timeout=argument)
            except TimeoutError:
                answer = "timeout"
        elif what == "sleep":
            time.sleep(argument)
        elif what == "raise":
            raise RuntimeError(argument)
        elif what == "exit":
            os._exit(argument)
        elif what == "print":
            print("x" * argument)
        if answer is not None:
            print(json.dumps([what, answer]), flush=True)
    reward: float = row.get("reward", 1.0)
    return reward


def plain(row: dict[str, Any], base_url: str, api_key: str, seed: int = 0) -> float:
    """A function that is no coroutine."""
    said(chat(base_url, api_key, row["prompt"] if isinstance(row["prompt"], list) else [
        {"role": "user", "content": row["prompt"]}]))
    return float(seed)


class WithMethod:
    """As AReaL has agents."""

    async def run(self, data: dict[str, Any], **more: Any) -> float:
        return plain(data, more["base_url"], more["api_key"])


def no_key(row: dict[str, Any], base_url: str) -> float:
    return 0.0


def takes_columns(prompt: str, base_url: str, api_key: str, answer: str) -> float:
    return 0.0


def takes_no_row(*, base_url: str, api_key: str) -> float:
    return 0.0


class RunsOtherwise:
    def run(self, task: str) -> float:
        return 0.0


async def asks_twice(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """What `Steps` of envs_steps.py is, the other way round."""
    messages = [{"role": "user", "content": row["prompt"]}]
    messages.append(said(chat(base_url, api_key, messages)))
    messages.append({"role": "user", "content": "1?"})
    answer = chat(base_url, api_key, messages, logprobs=True)
    assert all(token["logprob"] <= 0 for token in answer["choices"][0]["logprobs"]["content"])
    return 3.0


SCHEMA = [{"type": "function", "function": {  # as transformers makes it of `Adder.add`
    "name": "add", "description": "Adds two numbers.", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer", "description": "The first number."},
                                         "b": {"type": "integer", "description": "The second number."}},
        "required": ["a", "b"]}, "return": {"type": "integer"}}}]


def adds(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """What `Adder` is, the other way round."""
    environment = Adder()
    environment.reset()
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    while True:
        messages.append(said(chat(base_url, api_key, messages, tools=SCHEMA)))
        if "tool_calls" not in messages[-1]:
            return environment.get_reward()
        for call in messages[-1]["tool_calls"]:
            result = environment.add(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})


class Adder:
    """TRL's form."""

    def reset(self, **row: Any) -> None:
        self.sum = 0.0

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.sum += a + b
        return a + b

    def get_reward(self) -> float:
        return self.sum


def branches_off(row: dict[str, Any], base_url: str, api_key: str, seed: int = 0) -> float:
    """Leads up to four sequences, by the row's number: a dialogue, one of a helper, a second sample of the dialogue's
    beginning, and another continuation of its first turn. Between them it continues the dialogue."""
    first = [{"role": "user", "content": row["prompt"]}]
    main = [*first, said(chat(base_url, api_key, first))]
    kind = row["number"] % 4
    if kind >= 1:
        helper: list[Any] = [{"role": "user", "content": "Help!"}]
        helper.append(said(chat(base_url, api_key, helper)))
        helper.append({"role": "user", "content": "More."})
        said(chat(base_url, api_key, helper))
    if kind >= 2:
        said(chat(base_url, api_key, first))
    if kind >= 3:
        said(chat(base_url, api_key, [*main, {"role": "user", "content": "else"}]))
    main.append({"role": "user", "content": "1?"})
    said(chat(base_url, api_key, main))
    return float(kind)


def fills_up(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Asks until its context has no room, and then in a fresh one. Returns how many turns the first one had."""
    messages, turns = [{"role": "user", "content": row["prompt"]}], 0
    while "choices" in (answer := chat(base_url, api_key, messages)):
        messages += [said(answer), {"role": "user", "content": "1?"}]
        turns += 1
    assert answer["error"]["code"] == "context_length_exceeded", answer
    said(chat(base_url, api_key, [{"role": "user", "content": "Sum."}]))
    return float(turns)
