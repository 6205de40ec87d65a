"""Agents with their own loop: `run(row, base_url, api_key) -> reward`, a function or a method, `async` or not.

In: a row of the data, and where its model is asked (`endpoint.py`). Out: the reward that the agent returns.
Codes: RL0713 it does not take what an agent is given, RL0715 it returned something else than a number.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from rldsl.diag import fail
from rldsl.plan.function import Function
from rldsl.runtime.environments.contract import number
from rldsl.runtime.environments.http_server import ADDRESS

GIVEN = ("base_url", "api_key")


class AgentForm:
    """One conversation of an agent, which asks the model itself at an endpoint."""

    def __init__(self, function: Function, run: Callable[..., Any]):
        self.function, self.call = function, run

    def run(self, row: Mapping[str, Any], seed: int, base_url: str, api_key: str) -> float:
        """The reward. seed: for a parameter of this name. What it raises is its own."""
        _without_proxy()
        more = {"seed": seed} if "seed" in _parameters(self.call) else {}
        reward = self.call(dict(row), base_url=base_url, api_key=api_key, **more)
        if inspect.iscoroutine(reward):
            reward = asyncio.run(reward)
        return number(self.function, "it returned", reward)

    def close(self) -> None:
        """Nothing to release."""


def agent_function(function: Function, found: Any) -> Callable[..., Any] | None:
    """`found`, if it is a function of an agent and not one that makes an environment. RL0713."""
    if inspect.isclass(found) or not any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
                                         for p in _parameters(found).values()):
        return None
    return _checked(function, found)


def agent_method(function: Function, found: Any) -> Callable[..., Any] | None:
    """The method `run` of an object that has no other form. RL0713."""
    if not callable(getattr(found, "run", None)) or hasattr(found, "reset"):
        return None
    return _checked(function, found.run)


def _checked(function: Function, run: Callable[..., Any]) -> Callable[..., Any]:
    parameters = _parameters(run)
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if lacking := [name for name in GIVEN if name not in parameters and not rest]:
        raise fail("RL0713", f"`{function.name}` is no agent: it has no parameter `{lacking[0]}`", place=function.path,
                   help="an agent is `run(row, base_url, api_key)`, which returns the reward; what makes an "
                        "environment has no parameters")
    more = {"seed": 0} if "seed" in parameters else {}
    try:
        inspect.Signature(list(parameters.values())).bind({}, base_url="", api_key="", **more)
    except TypeError as error:
        raise fail("RL0713", f"`{function.name}` cannot be called as an agent: {error}", place=function.path,
                   help='an agent is `run(row, base_url, api_key)`, and may take a `seed`: it gets the row of the data '
                        'as one dict, `row["prompt"]`, and nothing else') from None
    return run


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some of those written in C do not tell
        return {}


def _without_proxy() -> None:
    """HTTP clients must not send requests to this machine to a proxy, as some clusters tell them to."""
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), ADDRESS)))
