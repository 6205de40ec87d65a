"""The text form of environments, as in SkyRL-gym: `init(prompt) -> (messages, info)`, `step(text) -> {"observations",
"reward", "done", ...}`, `close()`. The reward of a conversation is the sum of its steps' rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rldsl.plan.function import Function
from rldsl.runtime.environments import Message, ResetParameters
from rldsl.runtime.environments.contract import ROLES, EnvironmentReply, Speaks, checked_messages, number, wrong
from rldsl.runtime.rewards.user_functions import type_name


class TextForm:
    """A conversation with an environment that reads what the model writes and answers as the user."""

    speaks: Speaks = "user"
    takes = ResetParameters()  # `init` gets the prompt

    def __init__(self, function: Function, environment: Any):
        self.function, self.environment = function, environment
        self.total = 0.0

    def tools(self) -> list[dict[str, Any]]:
        return []

    def begin(self, messages: list[Message], columns: Mapping[str, Any], seed: int) -> list[Message]:
        for name, value in columns.items():  # what SkyRL gives to the constructor as `extras`
            if hasattr(self.environment, "extras") and isinstance(self.environment.extras, dict):
                self.environment.extras[name] = value
        found = self.environment.init(messages)
        first = found[0] if isinstance(found, tuple) and found else found
        images = any(not isinstance(m["content"], str) for m in messages)
        return checked_messages(self.function, "`init` returned", first, images)

    def answer(self, content: str, calls: Sequence[Mapping[str, Any]]) -> EnvironmentReply:
        step = self.environment.step(content)
        if not isinstance(step, Mapping) or "done" not in step:
            raise wrong(self.function, f"`step` returned {type_name(step)}, not a dict with `done`",
                        'return {"observations": [...], "reward": ..., "done": ...}')
        reward = number(self.function, "`step` returned as reward", step.get("reward", 0.0))
        self.total += reward
        messages = checked_messages(self.function, "`step` returned as observations", step.get("observations") or [])
        for i, message in enumerate(messages):
            if message["role"] not in ROLES:
                raise wrong(self.function, f"`step` returned an observation, observations[{i}], with the role "
                            f"{message['role']!r}", f"a role is one of {', '.join(ROLES)}: what the environment says "
                            "to the model is most often said by the user")
        if not step["done"] and not messages:
            raise wrong(self.function, "`step` said nothing, and did not end the conversation",
                        'return "observations", or "done": True')
        return EnvironmentReply([] if step["done"] else messages, bool(step["done"]), reward)

    def reward(self) -> float | None:
        return self.total

    def close(self) -> None:
        if hasattr(self.environment, "close"):
            self.environment.close()
