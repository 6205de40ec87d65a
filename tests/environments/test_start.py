"""What is wrong with an environment or a chat template ends the run before it begins."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.codec import encode
from rldsl.plan.function import Function
from rldsl.plan.model import Data
from rldsl.plan.payloads import Conversation, Sampling
from rldsl.runtime.data import Source, open_source
from rldsl.runtime.data.tokens import Tokens
from rldsl.runtime.environments import ResetParameters
from rldsl.runtime.environments.contract import reset_parameters
from rldsl.runtime.environments.text_form import TextForm
from rldsl.runtime.interpreter.conversations import Environments, check_columns
from tests.environments.programs import folder, source
from tests.environments.test_processes_of_runs import TEMPLATE
from tests.forked import command
from tests.tiny import EOS

HERE = Path(__file__).parent
CALLS = TEMPLATE.replace("{{ m.content }}" + EOS, "{{ m.content }}<tool_call>{{ m.tool_calls }}</tool_call>" + EOS)
REWRITES = "{% for m in messages[-1:] %}{{ m.content }}{% endfor %}"
BODY = """
  prompt = prompts.next()
  gen = actor.generate(prompt, env=Guess, max_turns=2, max_new_tokens=4, max_tokens=64)
  actor.train(gen, loss=pg(adv=per_token(gen.reward, gen.logprobs)))
"""
GUESS = '''
class Guess:
    def reset(self, {takes}):
        return None

    def {tool} -> int:
        """Tells.

        Args:
            a: What.
        """
        return a
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("start"))


def line_of_generate(text: str) -> int:
    return text[: text.index(".generate(")].count("\n") + 1


@pytest.mark.thorough
@pytest.mark.parametrize("takes, tool, template, code, place", [
    ("target, **row", "hint(self, a: int)", CALLS, "RL0720", "prompts.jsonl:1"),
    ("number, **row", "hint(self, a)", CALLS, "RL0713", "envs.py"),
    ("number, **row", "_hint(self, a: int)", REWRITES, "RL0718", "model"),
    ("number, **row", "hint(self, a: int)", TEMPLATE, "RL0719", "model"),
])
def test_refused_with_one_message_before_anything_is_written(
        base: Path, takes: str, tool: str, template: str, code: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    config = base / "model" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    (base / "envs.py").write_text(GUESS.format(takes=takes, tool=tool))
    text = source(BODY)
    path = text.partition('use py "')[2].partition('"')[0]
    (base / "p.rlf").write_text(text.replace(path, "envs.py"))
    (base / "rules.rlf").write_text("place *.* on mesh(0:2) dp=2")
    (base / "p.plan").write_bytes(encode(api.compile("p.rlf", {}, "rules.rlf")))
    done = command("rldsl.runtime.launch", "--nproc-per-node", "2", "-m", "rldsl.run", "p.plan", "--out", code,
                   "--device", "cpu")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("error[") == 1 and f"error[{code}]" in done.stderr and place in done.stderr, done.stderr
    assert f"in the conversations of the call at p.rlf:{line_of_generate(text)}:" in done.stderr, done.stderr
    assert not (base / code / "metrics.jsonl").exists()


FAILS = """
class Guess:
    def init(self, prompt):
        return prompt, {}

    def step(self, text):
        raise RuntimeError("lost")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("degree", ["tp", "pp"])
def test_an_environment_that_fails_ends_all_ranks_of_the_shard(base: Path, degree: str, monkeypatch: pytest.MonkeyPatch
                                                               ) -> None:
    """Those that wait for what it says, too."""
    monkeypatch.chdir(base)
    config = base / "model" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    (base / "envs.py").write_text(FAILS)
    text = source(BODY)
    (base / "p.rlf").write_text(text.replace(text.partition('use py "')[2].partition('"')[0], "envs.py"))
    (base / "rules.rlf").write_text(f"place *.* on mesh(0:2) {degree}=2")
    (base / "p.plan").write_bytes(encode(api.compile("p.rlf", {}, "rules.rlf")))
    done = command("rldsl.runtime.launch", "--nproc-per-node", "2", "-m", "rldsl.run", "p.plan", "--out", degree,
                   "--device", "cpu")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("error[") == 1 and "error[RL0714]" in done.stderr and "envs.py:7" in done.stderr, done.stderr
    assert f"in the conversations of the call at p.rlf:{line_of_generate(text)}:" in done.stderr, done.stderr


TWO = {"A": ResetParameters(("x",)), "B": ResetParameters()}


def opened(tmp_path: Path, *rows: dict[str, object]) -> Source:
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return open_source(Data("d", "jsonl", str(tmp_path / "d.jsonl"), "prompts", 1, (), str(tmp_path / "model")), 1)


@pytest.mark.parametrize("takes, rows, message", [
    (ResetParameters(), [{"prompt": "a"}], ""),
    (ResetParameters(("prompt",)), [{"prompt": "a", "x": 1}], ""),
    (ResetParameters(("x",)), [{"prompt": "a", "x": 1}, {"prompt": "b", "x": None}], ""),
    (ResetParameters(("prompt", "x"), ("prompt", "x", "y")), [{"prompt": "a", "x": 1}], ""),
    (ResetParameters(("x",)), [{"prompt": "a", "x": 1}, {"prompt": "b", "xs": 1}], "d.jsonl:2"),
    (ResetParameters((), ("prompt",)), [{"prompt": "a"}, {"prompt": "b", "x": 1}], "d.jsonl:2"),
    (TWO, [{"prompt": "a", "env": "A", "x": 1}, {"prompt": "b", "env": "B"}], ""),
    (TWO, [{"prompt": "a", "env": "B"}, {"prompt": "b"}], "d.jsonl:2"),
    (TWO, [{"prompt": "a", "env": "B"}, {"prompt": "b", "env": None}], "d.jsonl:2"),
    (TWO, [{"prompt": "a", "env": "C"}], "d.jsonl:1"),
    (TWO, [{"prompt": "a", "env": "B"}, {"prompt": "b", "env": "A"}], "d.jsonl:2"),
])
def test_every_row_is_compared(tmp_path: Path, base: Path, takes: ResetParameters | dict[str, ResetParameters],
                               rows: list[dict[str, object]], message: str) -> None:
    (tmp_path / "model").symlink_to(base / "model")
    environments = [(Function(name, "envs.py", name, "", "env"), t) for name, t in (
        takes if isinstance(takes, dict) else {"Guess": takes}).items()]
    data = opened(tmp_path, *rows)
    if not message:
        return check_columns(environments, data)
    with pytest.raises(Failure) as caught:
        check_columns(environments, data)
    (found,) = caught.value.diagnostics
    assert found.code == "RL0720" and found.place.endswith(message)


def test_branches_of_an_environment_that_is_no_agent(base: Path, tmp_path: Path) -> None:
    """Refused, unless another environment of the call is one."""
    (base / "model" / "tokenizer_config.json").write_text(json.dumps(json.loads(
        (base / "model" / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}))
    tokens = Tokens(AutoTokenizer.from_pretrained(base / "model"), "model", {"prompt": "prompt"})
    steps, agent = (Function("f", os.path.relpath(path), name, sha256(path.read_bytes()).hexdigest(), "env")
                    for path, name in ((HERE / "envs_steps.py", "Steps"), (HERE / "envs_agents.py", "plain")))
    for functions, branches, refused in (([steps], 2, True), ([steps], 1, False), ([agent], 2, False),
                                         ([steps, agent], 2, False), ([steps, steps], 2, True)):
        limits = Conversation(tuple(f.id for f in functions), max_turns=2, max_tokens=64, turn_timeout=60.0,
                              branches=branches)
        environments = Environments()
        try:
            with pytest.raises(Failure) if refused else nullcontext() as caught:
                environments.open(0, functions, limits, Sampling(max_new_tokens=4), tokens, 0, None)
        finally:
            environments.close()
        if caught is not None:
            (found,) = caught.value.diagnostics
            assert found.code == "RL0713" and "`Steps` is no agent" in found.title and "branches=2" in found.title
            assert "leave `branches=` out" in found.help and str(found.place).endswith("envs_steps.py")


@pytest.mark.parametrize("role", ["robot", "User", ""])
def test_a_role_of_an_observation_that_nobody_has(role: str) -> None:
    class Odd:
        def step(self, text: str) -> dict[str, object]:
            return {"observations": [{"role": text, "content": "?"}], "done": False}

    form = TextForm(Function("f", "envs.py", "Odd", "", "env"), Odd())
    for known in ("user", "system", "assistant", "tool"):
        assert form.answer(known, ()).messages[0]["role"] == known
    with pytest.raises(Failure) as caught:
        form.answer(role, ())
    (found,) = caught.value.diagnostics
    assert found.code == "RL0715" and f"observations[0], with the role {role!r}" in found.title
    assert "system, developer, user, assistant, tool" in found.help


class Forms:
    def none(self): ...
    def row(self, **row): ...
    def seed(self, seed, **row): ...
    def some(self, a, b=1, *, c, d=2): ...


@pytest.mark.parametrize("method, expected", [
    ("none", ResetParameters((), ())), ("row", ResetParameters()), ("seed", ResetParameters()),
    ("some", ResetParameters(("a", "c"), ("a", "b", "c", "d"))),
])
def test_parameters_of_reset(method: str, expected: ResetParameters) -> None:
    assert reset_parameters(getattr(Forms(), method)) == expected
