"""Environments of three forms, of rows with images: the text form, tools, and an agent."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


class Text:
    """Gets the prompt with the places of its images, and answers twice."""

    def __init__(self) -> None:
        self.extras: dict[str, Any] = {}

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        self.heard = 0
        shown = sum(part["type"] == "image" for message in prompt for part in message["content"])
        assert shown == len(self.extras["images"]), (shown, self.extras)
        return [*prompt[:-1], {**prompt[-1], "content": [*prompt[-1]["content"], {"type": "text", "text": " <|image_pad|>?"}]}], {}

    def step(self, text: str) -> dict[str, Any]:
        self.heard += 1
        return {"observations": [{"role": "user", "content": f"{len(text)} {self.extras['answer']}?"}],
                "reward": len(text) / 7, "done": self.heard == 2}


class Tools:
    def reset(self, images: list[str], **row: Any) -> str:
        return f" {len(images)} pictures."

    def look(self, number: int) -> str:
        """Looks again.

        Args:
            number: Of the picture.
        """
        return f"picture {number}"

    def get_reward(self) -> float:
        return 0.25


def ask(row: dict[str, Any], base_url: str, api_key: str) -> float:
    messages, said = list(row["prompt"]), 0
    for _ in range(2):
        body = json.dumps({"model": "policy", "messages": messages, "return_token_ids": True}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", body, {
            "Authorization": f"Bearer {api_key}", "Content-Type": "application/json"})
        with urllib.request.urlopen(request) as found:
            answer = json.load(found)
        assert max(answer["prompt_token_ids"]) < 1000  # ids, without numbers of images
        message = answer["choices"][0]["message"]
        messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "again?"}]
        said += len(message["content"] or "")
    return said / 5
