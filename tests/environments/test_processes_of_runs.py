"""A run whose environments live in processes of their own, with a chat template."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.programs import compile_program
from tests.environments.programs import folder, source
from tests.environments.test_runs import numbers
from tests.forked import command
from tests.tiny import EOS
from tests.world import run_world

TEMPLATE = ("{% for m in messages %}{% if m.role == 'assistant' %}={{ m.content }}" + EOS +
            "{% else %}*{{ m.content }}*{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}")
BODY = """
  prompt = prompts.next()
  gen = actor.generate(prompt, env=Steps, n=2, max_turns=3, max_new_tokens=4, max_tokens=64)
  actor.train(gen, loss=pg(adv=discount(gen.turn_reward, 0.5)))
  metric turns   = mean(gen.turns)
  metric reward  = mean(gen.reward)
  metric stopped = mean(gen.stopped)
  metric gap     = max(abs(gen.logprobs - actor.logprobs(gen)))
"""


def logged(here: Path, body: str, steps: int, classes: str, placement: str) -> list[dict[str, Any]]:
    """The metrics of a run on two ranks with environments of envs_steps.py, in a folder that is ready."""
    prepare(here, body, steps, classes)
    before = os.getcwd()
    os.chdir(here)
    try:
        data = compile_program(here / "program.rlf", {}, placement, here)
        run_world(2, _rank, data, str(here / "out"), str(here), timeout=120.0)
    finally:
        os.chdir(before)
    return [json.loads(line) for line in (here / "out" / "metrics.jsonl").read_text().splitlines()]


def prepare(here: Path, body: str, steps: int, classes: str) -> None:
    """Write the program, with environments of envs_steps.py, and the chat template."""
    config = here / "model" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    text = source(body, steps=steps).replace("envs_scripted.py", "envs_steps.py").replace("Guess: env", classes)
    (here / "program.rlf").write_text(text)


def test_a_conversation_of_two_turns(tmp_path: Path) -> None:
    folder(tmp_path)
    lines = logged(tmp_path, BODY, 1, "Steps: env", "place *.* on mesh(0:2) dp=2")
    (found,) = numbers(lines, ("turns", "reward", "stopped"))
    assert found == {"turns": 2.0, "reward": 3.0, "stopped": 0.0}
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples" / "gen.jsonl").read_text().splitlines()]
    assert [sample["row"] for sample in samples] == [0, 1, 2]
    for sample in samples:
        talk = sample["conversation"]
        assert talk["stopped"] == "done" and sample["gen.turns"] == 2 and sample["gen.reward"] == 3
        one, answer, two = talk["turns"]
        assert [t["role"] for t in talk["turns"]] == ["assistant", "environment", "assistant"]
        assert (one["reward"], two["reward"]) == (1, 2) and "1?" in answer["content"] and "calls" not in one
        assert sample["completion"] == one["content"] + answer["content"] + two["content"]


SEVERAL = """
  prompt = prompts.next()
  gen = actor.generate(prompt, env=[Steps, Once], n=2, max_turns=3, max_new_tokens=4, max_tokens=64)
  actor.train(gen, loss=pg(adv=per_token(gen.reward, gen.logprobs)))
  metric turns  = sum(gen.turns)
  metric reward = sum(gen.reward)
  metric once   = max(gen.reward)
"""


def test_each_row_names_its_environment(tmp_path: Path) -> None:
    """Steps: two turns and a reward of 3; Once: one and 10."""
    folder(tmp_path)
    rows = [{"prompt": f"{i} + {i}", "env": "Once" if i in (1, 4, 6) else "Steps"} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    lines = logged(tmp_path, SEVERAL, 2, "Steps: env, Once: env",
                   "place actor.generate on mesh(0:2) tp=2\nplace actor.train on mesh(0:1)")
    assert numbers(lines, ("turns", "reward", "once")) == [{"turns": 14.0, "reward": 38.0, "once": 10.0},
                                                           {"turns": 12.0, "reward": 52.0, "once": 10.0}]


def _rank(rank: int, data: bytes, out: str, cwd: str) -> None:
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.metrics.reporter import ReportOptions
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(cwd)
    execute(PlanFile.from_bytes(data, "test.plan"), out, options=Options(reporting=ReportOptions(samples=3)))


FAILING = """
  prompt = prompts.next()
  gen = actor.generate(prompt, env=Fails, n=2, max_turns=3, max_new_tokens=4, max_tokens=64, on_error=end)
  kept = gen where gen.stopped < 4
  actor.train(kept, loss=pg(adv=per_token(kept.reward, kept.logprobs)))
  metric reward  = mean(gen.reward)
  metric stopped = mean(gen.stopped)
  metric kept    = count(kept.reward)
"""


def test_conversations_that_fail_are_counted_and_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                 ) -> None:
    """Each has earned 1 in its first turn, and fails in its second."""
    folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path, FAILING, 1, "Fails: env")
    (tmp_path / "p.plan").write_bytes(compile_program(tmp_path / "program.rlf", {}, "place *.* on mesh(0:2) dp=2",
                                                      tmp_path))
    done = command("rldsl.runtime.launch", "--nproc-per-node", "2", "-m", "rldsl.run", "p.plan", "--out", "out",
                   "--device", "cpu")
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    (found,) = numbers([json.loads(line)], ("reward", "stopped", "kept"))
    assert found == {"reward": 1.0, "stopped": 5.0, "kept": 0.0}
    warned = re.findall(r"warning: step 1: all (\d+) conversations of actor.generate on rank", done.stderr)
    count = sum(map(int, warned))
    assert re.search(r"its conversation of the call at \S*program.rlf:12:3 ends", done.stderr), done.stderr
    assert count > 0 and f"{count} conversations ended by an error of their environment" in done.stderr, done.stderr
