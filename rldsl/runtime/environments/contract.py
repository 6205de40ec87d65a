"""What a user's environment is, seen from the process that runs it: one object, one conversation.

In: the class or factory of a plan's Function, called without arguments. Out: a `Talk`, whatever the form of the object:
the form of TRL's `environment_factory` (here), the text form `init/step/close` (`text_form.py`), or an environment of
OpenEnv (`open_env.py`); or an agent, which has its own loop (`agent_form.py`).
Invariant: an environment in TRL's form sees the calls that TRL 1.16's GRPOTrainer makes, in the same order: the
functions of a turn first, in the order of the calls, then its coroutines together. What a tool raises is answered to
the model; what anything else raises is the environment's failure.
Codes: RL0713 the object is no environment, RL0715 it returned the wrong thing.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rldsl.diag import Failure, fail
from rldsl.plan.function import Function
from rldsl.runtime.environments import Message, ResetParameters
from rldsl.runtime.rewards import user_functions
from rldsl.runtime.rewards.hashed_modules import raise_refused
from rldsl.runtime.rewards.user_functions import LARGEST, type_name

if TYPE_CHECKING:
    from rldsl.runtime.environments.agent_form import AgentForm

Speaks = Literal["tool", "user"]
NOT_TOOLS = ("reset", "get_reward")
NO_IMAGES = ("images are those of the row alone, which every rank reads from the same files: what an environment "
             "draws is in its process only")
ROLES = ("system", "developer", "user", "assistant", "tool")  # of messages, as OpenAI's API has them


@dataclass(frozen=True)
class EnvironmentReply:
    """What an environment says to a turn of the model."""

    messages: list[Message] = field(default_factory=list)  # to the model
    done: bool = False                                     # whether it ends the conversation
    turn_reward: float | None = None                       # of the turn that it answers


class Talk(Protocol):
    """One conversation with an environment."""

    # the role of what it says: "tool" if it answers calls, and a turn without calls ends the conversation; "user" if it
    # answers text
    speaks: Speaks
    takes: ResetParameters  # the columns that its beginning takes

    def tools(self) -> list[dict[str, Any]]:
        """The JSON schemas of its tools."""

    def begin(self, messages: list[Message], columns: Mapping[str, Any], seed: int) -> list[Message]:
        """Reset it. Returns the messages of the first context."""

    def answer(self, content: str, calls: Sequence[Mapping[str, Any]]) -> EnvironmentReply:
        """What it says to a turn. content: its text; calls: {"name", "arguments"}, or {"name", "error"} of a call that
        cannot be read."""

    def reward(self) -> float | None:
        """The reward of the conversation; None if it gives none."""

    def close(self) -> None:
        """Release what it holds."""


def open_talk(function: Function) -> Talk | AgentForm:
    """A new environment. RL0713, and those of `user_functions.imported`."""
    from rldsl.runtime.environments.agent_form import AgentForm, agent_function, agent_method

    factory = user_functions.imported(function, "class", "an environment is a class, or a function that makes one")
    if (run := agent_function(function, factory)) is not None:
        return AgentForm(function, run)
    try:
        found = factory()
    except Exception as error:
        raise user_functions.raised("RL0713", f"`{function.name}()` raised", function, error,
                                    help="an environment is created without arguments; what depends on the row belongs "
                                         "in `reset`") from None
    if any(base.__module__.startswith("openenv.") for base in type(found).__mro__) and hasattr(found, "step"):
        from rldsl.runtime.environments.open_env import OpenEnv

        return OpenEnv(function, found)
    if any(base.__module__.startswith("verifiers.") for base in type(found).__mro__) and hasattr(found, "run_slot"):
        from rldsl.runtime.environments.verifiers_env import VerifiersEnv

        return AgentForm(function, VerifiersEnv(function, found).run)
    if hasattr(found, "init") and hasattr(found, "step"):
        from rldsl.runtime.environments.text_form import TextForm

        return TextForm(function, found)
    if (run := agent_method(function, found)) is not None:
        return AgentForm(function, run)
    return TrlForm(function, found)


class TrlForm:
    """TRL's `environment_factory`: `reset(**row)`, typed public methods as tools, `get_reward()`."""

    speaks: Speaks = "tool"

    def __init__(self, function: Function, environment: Any):
        self.function, self.environment = function, environment
        # of the class: `getmembers` of the object would evaluate its properties
        names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
        if "reset" not in names:
            raise fail("RL0713", f"`{function.name}` is no environment: {type_name(environment)} has no method `reset`",
                       place=function.path,
                       help="define `reset(self, **row)`, which begins a conversation, and methods that are its tools")
        self.takes = reset_parameters(environment.reset)
        self.scores = "get_reward" in names
        self.methods = [getattr(environment, n) for n in names if n not in NOT_TOOLS and not n.startswith("_")]
        self.tool_named: dict[str, Callable[..., Any]] = {method.__name__: method for method in self.methods}
        self.loop = asyncio.new_event_loop()

    def tools(self) -> list[dict[str, Any]]:
        from transformers.utils.chat_template_utils import get_json_schema

        schemas = []
        for method in self.methods:
            try:
                schemas.append(get_json_schema(method))
            except Exception as error:
                line = method.__code__.co_firstlineno if hasattr(method, "__code__") else ""
                raise fail("RL0713", f"the tool `{method.__name__}` of `{self.function.name}` has no schema: {error}",
                           place=f"{self.function.path}:{line}".rstrip(":"),
                           help="give every parameter a type, and describe it in the docstring, under `Args:`; a "
                                "method that is no tool has a name that begins with `_`") from None
        return schemas

    def begin(self, messages: list[Message], columns: Mapping[str, Any], seed: int) -> list[Message]:
        row = dict(columns)
        accepted = inspect.signature(self.environment.reset).parameters.get("seed")
        if accepted is not None and accepted.kind is not accepted.VAR_KEYWORD:
            row.setdefault("seed", seed)
        observation = self._awaited(self.environment.reset(**row))
        if observation is None:
            return messages
        if not isinstance(observation, str):
            raise wrong(self.function, f"`reset` returned {type_name(observation)}, not a string or None",
                        f"what it returns is appended to the last message of the prompt; {NO_IMAGES}")
        return with_more(messages, observation)

    def answer(self, content: str, calls: Sequence[Mapping[str, Any]]) -> EnvironmentReply:
        results: list[tuple[str, Any]] = []
        waiting: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        for call in calls:
            name = str(call["name"])
            try:
                if "error" in call:
                    raise ValueError(call["error"])
                if name not in self.tool_named:
                    raise ValueError(f"Tool {name} not found.")
                result = self.tool_named[name](**call["arguments"])
            except Exception as error:
                raise_refused()
                results.append((name, {"error": str(error)}))
                continue
            if inspect.iscoroutine(result):
                waiting.append((name, result))
            else:
                results.append((name, result))
        if waiting:
            found = self.loop.run_until_complete(_gathered([coroutine for _, coroutine in waiting]))
            results += [(name, {"error": str(r)} if isinstance(r, Exception) else r)
                        for (name, _), r in zip(waiting, found, strict=True)]
        return EnvironmentReply([{"role": "tool", "name": n, "content": _content(self.function, n, r)}
                                 for n, r in results])

    def reward(self) -> float | None:
        if not self.scores:
            return None
        return number(self.function, "`get_reward` returned", self._awaited(self.environment.get_reward()))

    def close(self) -> None:
        self.loop.close()

    def _awaited(self, result: Any) -> Any:
        return self.loop.run_until_complete(result) if inspect.iscoroutine(result) else result


def with_more(messages: Sequence[Message], text: str) -> list[Message]:
    """Messages, with a text at the end of the last one."""
    *before, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*before, {**last, "content": content + text}]
    *parts, end = content or [{"type": "text", "text": ""}]
    end = [{**end, "text": end["text"] + text}] if end["type"] == "text" else [end, {"type": "text", "text": text}]
    return [*before, {**last, "content": [*parts, *end]}]


def reset_parameters(reset: Callable[..., Any]) -> ResetParameters:
    """What a bound `reset` takes by name."""
    parameters = inspect.signature(reset).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = tuple(p.name for p in parameters if p.default is p.empty and p.name != "seed"
                     and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return ResetParameters(required, None if everything else tuple(p.name for p in named))


async def _gathered(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*coroutines, return_exceptions=True)


def _content(function: Function, tool: str, result: Any) -> str:
    """What a tool returned, as text: blocks of text are joined, and all else becomes what `str` makes of it."""
    if isinstance(result, list) and result and all(isinstance(b, Mapping) and "type" in b for b in result):
        if all(b["type"] == "text" and isinstance(b.get("text"), str) for b in result):
            return "".join(b["text"] for b in result)
        raise wrong(function, f"the tool `{tool}` returned a block that is not text", f"return text; {NO_IMAGES}")
    return str(result)


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat templates want it. parameters: a JSON schema."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": dict(parameters)}}


def number(function: Function, what: str, value: Any) -> float:
    """A reward, checked. RL0715."""
    try:
        found = None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None:
        raise wrong(function, f"{what} {type_name(value)}, not a number", "a reward is a float, an int or a bool")
    if not math.isfinite(found) or abs(found) > LARGEST:
        raise wrong(function, f"{what} {found}", "a reward is a finite float32")
    return found


def checked_messages(function: Function, what: str, value: Any, images: bool = False) -> list[Message]:
    """Messages that an environment wrote. images: contents may be lists of parts, as those of prompts with images are.
    RL0715."""
    form = "a message is {'role': ..., 'content': ...}, both strings"
    contents = [m.get("content") if isinstance(m, Mapping) else None for m in value] if isinstance(value, list) else [0]
    if all(isinstance(c, str) or images and _is_parts(c) for c in contents) and all(
            isinstance(m.get("role"), str) for m in value):
        return [dict(m) for m in value]
    if any(isinstance(c, list) for c in contents):
        raise wrong(function, f"{what} a message whose content is a list", f"{form}; " + (
            "in a prompt with images, a content may be a list of {'type': 'text', 'text': ...} and {'type': 'image'}"
            if images else NO_IMAGES))
    raise wrong(function, f"{what} {type_name(value)}, not a list of messages", form)


def _is_parts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(p, Mapping) and (
        p == {"type": "image"} or p.get("type") == "text" and isinstance(p.get("text"), str)) for p in content)


def wrong(function: Function, what: str, help: str) -> Failure:
    """RL0715: an environment returned the wrong thing."""
    return fail("RL0715", f"`{function.name}`: {what}", place=function.path, help=help)
