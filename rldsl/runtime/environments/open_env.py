"""Environments of OpenEnv (openenv-core), in the conversation's process: `reset()` and `step(action)`.

An MCP environment gives its own tools. Any other has one tool, `step`, whose parameters are the fields of its action.
What an observation says beyond `done`, `reward` and `metadata` is the answer. The reward is the sum of the steps'.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from rldsl.diag import fail
from rldsl.plan.function import Function
from rldsl.runtime.environments import Message, ResetParameters
from rldsl.runtime.environments.contract import (
    EnvironmentReply,
    Speaks,
    number,
    reset_parameters,
    tool_schema,
    with_more,
    wrong,
)
from rldsl.runtime.rewards.user_functions import type_name


class OpenEnv:
    """A conversation with an `Environment` of OpenEnv. Nothing of OpenEnv is imported that its file has not."""

    speaks: Speaks = "tool"

    def __init__(self, function: Function, environment: Any):
        self.function, self.environment = function, environment
        self.total: float | None = None
        self.accepted = (parameters := reset_parameters(environment.reset)).accepted
        self.takes = ResetParameters(parameters.required)  # it is given no others
        self.serves_tools = any(base.__name__ == "MCPEnvironment" for base in type(environment).__mro__)
        self.action = None if self.serves_tools else self._action()

    def tools(self) -> list[dict[str, Any]]:
        if self.action is not None:
            schema = self.action.model_json_schema()
            schema["properties"] = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
            return [tool_schema("step", inspect.cleandoc(self.action.__doc__ or "Acts."), schema)]
        from openenv.core.env_server.mcp_types import ListToolsAction  # type: ignore[import-not-found]  # an extra
        served = self.environment.step(ListToolsAction()).tools
        return [tool_schema(t.name, t.description, t.input_schema) for t in served]

    def begin(self, messages: list[Message], columns: Mapping[str, Any], seed: int) -> list[Message]:
        given = {k: v for k, v in {"seed": seed, **columns}.items() if self.accepted is None or k in self.accepted}
        said = self._text("reset", self.environment.reset(**given))
        if not said:
            return messages
        if not isinstance(messages[-1]["content"], str):
            return with_more(messages, f"\n\n{said}")
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\n{said}".strip()}]

    def answer(self, content: str, calls: Sequence[Mapping[str, Any]]) -> EnvironmentReply:
        messages, reward, done = [], None, False
        for call in calls:
            try:
                action = self._acted(call)
            except (ValueError, TypeError) as error:  # pydantic's are ValueErrors
                messages.append({"role": "tool", "name": call["name"], "content": str({"error": str(error)})})
                continue
            observation = self.environment.step(action)
            messages.append({"role": "tool", "name": call["name"], "content": self._text("step", observation)})
            if observation.reward is not None:
                reward = (reward or 0.0) + number(self.function, "the reward of a step is", observation.reward)
            if done := bool(observation.done):
                break
        if reward is not None:
            self.total = (self.total or 0.0) + reward
        return EnvironmentReply([] if done else messages, done, reward)

    def reward(self) -> float | None:
        return self.total

    def close(self) -> None:
        self.environment.close()

    def _acted(self, call: Mapping[str, Any]) -> Any:
        if "error" in call:
            raise ValueError(call["error"])
        name, arguments = str(call["name"]), call["arguments"]
        if self.action is None:
            from openenv.core.env_server.mcp_types import CallToolAction
            return CallToolAction(tool_name=name, arguments=dict(arguments))
        if name != "step":
            raise ValueError(f"Tool {name} not found.")
        return self.action(**arguments)

    def _action(self) -> Any:  # a parameter of `Environment[...]`, or the annotation of `step`
        found = [a for base in type(self.environment).__mro__ for b in getattr(base, "__orig_bases__", ())
                 for a in get_args(b)[:1]] + [get_type_hints(self.environment.step).get("action")]
        if (actions := [a for a in found if hasattr(a, "model_json_schema")]):
            return actions[0]
        raise fail("RL0713", f"`{self.function.name}` does not say which actions it takes", place=self.function.path,
                   help="derive it from `Environment[MyAction, MyObservation, MyState]`, or annotate `step`")

    def _text(self, method: str, observation: Any) -> str:
        if not all(hasattr(observation, name) for name in ("model_dump", "done", "reward")):
            raise wrong(self.function, f"`{method}` returned {type_name(observation)}, not an Observation",
                        "return an Observation of OpenEnv, with `done` and `reward`")
        said = observation.model_dump(mode="json", exclude={"done", "reward", "metadata"}, exclude_none=True)
        if isinstance(said.get("result"), dict) and "data" in said["result"]:  # of a tool of an MCP server
            said = {"result": said["result"]["data"]}
        one = next(iter(said.values())) if len(said) == 1 else said
        return one if isinstance(one, str) else json.dumps(one) if said else ""
