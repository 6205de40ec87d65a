"""Environments of OpenEnv run unchanged. RLDSL_OPENENV_PYTHON names a Python with openenv-core, unless this one has it;
the whole conversation runs there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rldsl.diag import Failure
from rldsl.plan.function import Function
from rldsl.runtime.environments.open_env import OpenEnv

HERE = Path(__file__).parent
PYTHON = os.environ.get("RLDSL_OPENENV_PYTHON", sys.executable)
TALK = """
import json, sys
from hashlib import sha256
from pathlib import Path
from dataclasses import asdict
from rldsl.plan.function import Function
from rldsl.runtime.environments.contract import open_talk
path = sys.argv[1]
talk = open_talk(Function("f", path, sys.argv[2], sha256(Path(path).read_bytes()).hexdigest(), "env"))
out = [type(talk).__name__, talk.speaks, talk.tools()]
out.append(talk.begin([{"role": "user", "content": "Go."}], {"target": 3, "prompt": "Go."}, 7))
for calls in json.loads(sys.argv[3]):
    out.append(asdict(talk.answer("", calls)))
out.append(talk.reward())
talk.close()
print("RESULT" + json.dumps(out))
"""

pytestmark = pytest.mark.skipif(
    PYTHON == sys.executable and importlib.util.find_spec("openenv") is None,
    reason="openenv-core is not installed, and RLDSL_OPENENV_PYTHON does not name a Python that has it")


def talk(name: str, *turns: list[dict[str, Any]]) -> list[Any]:
    done = subprocess.run([PYTHON, "-c", TALK, str(HERE / "envs_openenv.py"), name, json.dumps(turns)], text=True,
                          env={**os.environ, "PYTHONPATH": str(HERE.parents[1])}, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.split("RESULT")[1])
    return found


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"name": tool, "arguments": arguments}


def test_actions() -> None:
    form, speaks, tools, first, wrong, lower, right, reward = talk(
        "Guessing", [call("step", guess="x"), call("other"), {"name": "step", "error": "Malformed"}],
        [call("step", guess=1), call("step", guess=2)], [call("step", guess=3), call("step", guess=4)])
    assert (form, speaks, reward) == ("OpenEnv", "tool", 0.5)
    (tool,) = tools
    assert tool["function"]["name"] == "step" and tool["function"]["description"] == "Guesses a number."
    assert list(tool["function"]["parameters"]["properties"]) == ["guess"]
    assert first == [{"role": "user", "content": "Go.\n\nseed 7"}]
    assert "valid integer" in wrong["messages"][0]["content"] and wrong["turn_reward"] is None
    assert "Tool other not found." in wrong["messages"][1]["content"]
    assert wrong["messages"][2]["content"] == "{'error': 'Malformed'}"
    assert [m["content"] for m in lower["messages"]] == ["higher", "higher"] and lower["turn_reward"] == -0.5
    assert right == {"messages": [], "done": True, "turn_reward": 1.0}


def test_tools_of_a_server() -> None:
    form, _, tools, first, sums, unknown, reward = talk("Serving", [call("add", a=1, b=2)], [call("none")])
    assert (form, reward, first) == ("OpenEnv", None, [{"role": "user", "content": "Go."}])
    assert [t["function"]["name"] for t in tools] == ["add"]
    assert sums["messages"] == [{"role": "tool", "name": "add", "content": "3"}] and not sums["done"]
    assert "none" in unknown["messages"][0]["content"]


class Duck:
    """What OpenEnv asks of an action and of an environment, and nothing that it says."""

    @classmethod
    def model_json_schema(cls) -> dict[str, object]:
        return {"properties": {}}

    def reset(self) -> str:
        return "hello"

    def step(self, action: Duck) -> str:
        return "well"


def test_what_is_no_observation_is_refused() -> None:
    talk = OpenEnv(Function("f", "envs.py", "Duck", "0", "env"), Duck())
    for call in (lambda: talk.begin([{"role": "user", "content": "go"}], {}, 1),
                 lambda: talk.answer("", [{"name": "step", "arguments": {}}])):
        with pytest.raises(Failure) as refused:
            call()
        (found,) = refused.value.diagnostics
        assert found.code == "RL0715" and "returned a str, not an Observation" in found.title and found.place == "envs.py"
