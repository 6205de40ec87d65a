"""A game in the text form, played in a process of its own."""

from __future__ import annotations

from typing import Any


class Once:
    """Ends at once."""

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        return prompt, {}

    def step(self, text: str) -> dict[str, Any]:
        return {"observations": [], "reward": 10.0, "done": True}


class Steps:
    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        self.heard = 0
        return prompt, {}

    def step(self, text: str) -> dict[str, Any]:
        self.heard += 1
        return {"observations": [{"role": "user", "content": f"{self.heard}?"}], "reward": float(self.heard),
                "done": self.heard == 2}


class Fails(Steps):
    """The second turn of every conversation fails, after a reward."""

    def step(self, text: str) -> dict[str, Any]:
        if self.heard:
            raise RuntimeError("broken")
        return super().step(text)
