"""A time limit that ends a conversation marks the run: the clock has decided what it computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rldsl import api
from rldsl.plan.codec import encode
from tests.environments.programs import folder
from tests.environments.test_processes_of_runs import TEMPLATE
from tests.forked import command

ENVS = """
import time


class Game:
    def init(self, prompt):
        self.late, self.broken = ("late" in prompt[-1]["content"], "broken" in prompt[-1]["content"])
        return prompt, {}

    def step(self, text):
        if self.late:
            time.sleep(600)
        if self.broken:
            raise RuntimeError("broken")
        return {"observations": [], "reward": 1.0, "done": True}
"""
PROGRAM = """
use py "envs.py" (Game: env)
data prompts = jsonl("prompts.jsonl", batch=4, max_prompt_tokens=16, shuffle=false)
model actor = causal_lm("model") train adamw(lr=0.01)
loss pg(logprobs: token; adv: token) { return -mean(adv * logprobs) }
param steps = 1
flow f(steps=steps) {
  prompt = prompts.next()
  gen = actor.generate(prompt, env=Game, max_new_tokens=4, max_tokens=64, on_error=end, turn_timeout=LIMIT)
  actor.train(gen, loss=pg(adv=per_token(gen.reward, gen.logprobs)))
  metric late   = sum(where(gen.stopped == 4, 1, 0))
  metric broken = sum(where(gen.stopped == 5, 1, 0))
  checkpoint every 1
}
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder(tmp_path)
    config = tmp_path / "model" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    (tmp_path / "envs.py").write_text(ENVS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(steps: int, prompts: list[str], *options: str, limit: float = 60) -> tuple[dict[str, object], list[dict[str, float]], str]:
    """(run.json, lines of the metrics, what it said)"""
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    Path("p.rlf").write_text(PROGRAM.replace("LIMIT", str(limit)))
    Path("rules.rlf").write_text("place *.* on mesh(0:2) dp=2")
    Path("p.plan").write_bytes(encode(api.compile("p.rlf", {"steps": steps}, "rules.rlf")))
    done = command("rldsl.runtime.launch", "--nproc-per-node", "2", "-m", "rldsl.run", "p.plan", "--out", "out", "--device",
                   "cpu", *options)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(x) for x in Path("out/metrics.jsonl").read_text().splitlines()]
    return json.loads(Path("out/run.json").read_text()), lines, done.stderr


@pytest.mark.thorough
def test_a_time_limit_marks_the_run_and_those_that_resume_it(base: Path) -> None:
    """The late conversation is another rank's than the one that writes the record."""
    prompts = ["one", "two", "three", "late", "five", "six", "seven", "eight"]
    record, lines, said = ran(1, prompts, limit=8)
    assert (lines[0]["late"], lines[0]["broken"], lines[0]["conversation/errors"]) == (1, 0, 0)
    assert record["exact"] is False and "not exact: 1 conversation ended after `turn_timeout`" in said
    record, lines, said = ran(2, prompts, "--resume", limit=8)
    assert [line["late"] for line in lines] == [1, 0]
    assert record["exact"] is False and "not exact: 1 conversation ended" in said


def test_an_error_is_the_same_in_every_run(base: Path) -> None:
    record, lines, said = ran(1, ["broken", "two", "three", "four"])
    assert (lines[0]["late"], lines[0]["broken"], lines[0]["conversation/errors"]) == (0, 1, 1)
    assert record["exact"] is True and "not exact" not in said
