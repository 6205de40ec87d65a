"""Environments of verifiers run unchanged against the endpoint. RLDSL_VERIFIERS_PYTHON names a Python with verifiers and
uv next to it, unless this one has them; the whole conversation runs there."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rldsl.diag import Failure
from rldsl.plan.function import Function
from rldsl.runtime.environments.verifiers_env import VerifiersEnv

HERE = Path(__file__).parent
PYTHON = os.environ.get("RLDSL_VERIFIERS_PYTHON", sys.executable)
CALL = '<tool_call>\n{"name": "calculator_add", "arguments": {"a": 20, "b": 1}}\n</tool_call>'


needs_verifiers = pytest.mark.skipif(
    PYTHON == sys.executable and importlib.util.find_spec("verifiers") is None,
    reason="verifiers is not installed, and RLDSL_VERIFIERS_PYTHON does not name a Python that has it")


def played(file: Path, name: str, conversations: list[Any]) -> list[Any]:
    """What came of conversations, each a row and the turns of the model."""
    paths = [str(HERE.parents[1]), str(HERE / "verifiers_package")]  # as if the taskset was installed
    done = subprocess.run(
        [PYTHON, "-m", "tests.environments.verifiers_loop", str(file), name, json.dumps(conversations)],
        cwd=HERE.parents[1], text=True, capture_output=True, timeout=500,
        env={**os.environ, "PYTHONPATH": ":".join(paths), "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.split("RESULT")[1])
    return found


@needs_verifiers
def test_the_agent_of_the_documentation(tmp_path: Path) -> None:
    """With OpenAI's own client, which verifiers brings."""
    page = (HERE.parents[1] / "docs/environments.md").read_text()
    (tmp_path / "agent.py").write_text(page.split("## An agent with its own loop")[1].split("```")[1].split("\n", 1)[1])
    row = {"prompt": "20 + 1 = ", "answer": "21"}
    right, wrong = played(tmp_path / "agent.py", "solve", [[row, ["It is 4.", "It is 21."]], [row, ["4", "5", "6"]]])
    assert (len(right["contexts"]), right["stopped"], right["reward"]) == (2, "done", 1.0)
    assert right["contexts"][1] == "\n<|im_start|>user\nNo. Try again.<|im_end|>\n<|im_start|>assistant\n"
    assert (len(wrong["contexts"]), wrong["stopped"], wrong["reward"]) == (3, "done", 0.0)


@needs_verifiers
def test_a_taskset_with_a_tool() -> None:
    """The library's own harness asks, with its own tool server, rewards and limits."""
    conversations = [[{"prompt": "20 + 1 = ", "answer": 21, "level": 3}, [CALL, "It is 21."]],
                     [{"prompt": "1 + 2 = ", "answer": 3}, ["It is 4."]],
                     [{"prompt": "1 + 2 = ", "answer": 3}, [CALL]],
                     [{"prompt": "1 + 2 = ", "answer": -1}, ["It is 4."]]]
    tool, single, limited, failing = played(HERE / "envs_verifiers.py", "sums", conversations)
    assert '"name": "calculator_add"' in tool["contexts"][0] and "20 + 1 = <|im_end|>" in tool["contexts"][0]
    assert "<tool_response>\n21\n</tool_response>" in tool["contexts"][1] and len(tool["contexts"]) == 2
    assert (tool["stopped"], tool["reward"]) == ("done", 1.0)
    assert (len(single["contexts"]), single["stopped"], single["reward"]) == (1, "done", 0.0)
    assert (len(limited["contexts"]), limited["stopped"], limited["reward"]) == (2, "max_turns", None)
    assert failing["code"] == "RL0714" and "no such answer" in failing["title"]


class Data:
    @classmethod
    def model_validate(cls, row: dict[str, Any]) -> Any:
        return row


class Duck:
    """What the adapter asks of an `Env`, and nothing else."""

    def __init__(self, episode: Any):
        self.episode = episode
        self.config = SimpleNamespace(taskset=SimpleNamespace(task="config"))
        self.taskset = self

    @classmethod
    def task_type(cls) -> Any:
        return type("Task", (SimpleNamespace,), {
            "__init__": lambda self, data, config: SimpleNamespace.__init__(self, data=data, config=config),
            "data_type": classmethod(lambda cls: Data)})

    async def __aenter__(self) -> None:
        self.serves = True

    async def __aexit__(self, *_: object) -> None:
        self.serves = False

    def serving(self) -> Duck:
        return self

    def slots(self, task: Any) -> list[Any]:
        return [task]

    async def run_slot(self, task: Any, context: Any) -> Any:
        assert self.serves and (task.data, task.config) == ({"prompt": "a"}, "config")
        assert (context.model, context.client.base_url, os.environ[context.client.api_key_var]) == ("policy", "u", "k")
        return self.episode


def trace(reward: float, trainable: bool = True, error: Any = None) -> Any:
    return SimpleNamespace(reward=reward, agent=SimpleNamespace(trainable=trainable), last_error=error)


@pytest.mark.parametrize("traces, ok, found", [
    ([trace(0.5), trace(9.0, trainable=False)], True, 0.5),
    ([trace(0.5), trace(0.25)], True, "RL0715"), ([], True, "RL0715"),
    ([trace(0.0, error=SimpleNamespace(type="ProviderError", message="upstream 400"))], False,
     "ProviderError: upstream 400"),
    ([trace(0.0)], False, "the episode failed"),
])
def test_what_an_episode_gives(monkeypatch: pytest.MonkeyPatch, traces: list[Any], ok: bool, found: Any) -> None:
    clients = ModuleType("verifiers.v1.clients")
    clients.EvalClientConfig = clients.ModelContext = SimpleNamespace  # type: ignore[attr-defined]
    for name, module in (("verifiers", ModuleType("verifiers")), ("verifiers.v1", ModuleType("verifiers.v1")),
                         ("verifiers.v1.clients", clients)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("RLDSL_API_KEY", "")
    env = VerifiersEnv(Function("f", "envs.py", "sums", "0", "env"),
                       Duck(SimpleNamespace(ok=ok, errors=[], traces=traces)))
    played = env.run({"prompt": "a"}, base_url="u", api_key="k")
    if isinstance(found, float):
        assert asyncio.run(played) == found
        return
    with pytest.raises((Failure, RuntimeError)) as raised:
        asyncio.run(played)
    error = raised.value
    assert (error.diagnostics[0].code if isinstance(error, Failure) else str(error)) == found
