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


class RunsOtherwise:
    def run(self, task: str) -> float:
        return 0.0
