"""An agent with its own loop and an environment in another form lead the same conversation: the same tokens, log-probs
and rewards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rldsl.runtime.environments import Arrival
from tests.end_to_end.programs import compile_program
from tests.environments.programs import folder, source
from tests.environments.test_endpoint import ids, only, opened
from tests.environments.test_processes_of_runs import TEMPLATE, _rank
from tests.world import run_world

TURNS = ('Well.<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
         '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
         '<tool_call>{"name": "add", "arguments": {"a": 5, "b": 6}}</tool_call>', "It is 21.")


def test_the_tokens_of_trls_form() -> None:
    found = []
    for name in ("Adder", "adds"):
        with opened(name) as talk:
            talk.begin(0, {"prompt": "Add."}, "Add.", 1)
            arrived: list[Arrival] = [only(talk)]
            for turn in TURNS:
                tokens = ids(turn + "<|im_end|>")
                talk.said(0, tokens, False, [0.0] * len(tokens))
                arrived.append(only(talk))
            found.append([(a.tokens, a.ended, a.reward) for a in arrived])
    assert found[0] == found[1] and found[0][-1] == ((), True, 21.0)
    assert [bool(tokens) for tokens, _, _ in found[0]] == [True, True, True, False]


BODY = """
  prompt = prompts.next()
  gen = actor.generate(prompt, env=ENV, n=2, max_turns=3, max_new_tokens=4, max_tokens=64)
  metric gap     = max(abs(gen.logprobs - actor.logprobs(gen)))
  actor.train(gen, loss=pg(adv=gen.reward * uniform(gen.turns)))
  metric turns   = sum(gen.turns)
  metric reward  = mean(gen.reward)
  metric stopped = sum(gen.stopped)
  metric lp      = sum(gen.logprobs)
  metric drawn   = sum(uniform(gen.logprobs) * gen.logprobs)
  metric own     = sum(len(gen))
"""


def run(base: Path, file: str, env: str, place: str | None) -> list[dict[str, float]]:
    text = source(BODY, steps=2, options=", invariant=true").replace("envs_scripted.py", file)
    (base / "program.rlf").write_text(text.replace("Guess: env", f"{env}: env").replace("env=ENV", f"env={env}"))
    out, before = base / f"out-{env}-{len(place or '')}", os.getcwd()
    os.chdir(base)
    try:
        data = compile_program(base / "program.rlf", {}, place, base)
        run_world(1 if place is None else 2, _rank, data, str(out), str(base), timeout=120.0)
    finally:
        os.chdir(before)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("gap", "turns", "reward", "lp", "drawn", "own", "actor/loss", "actor/grad_norm", "stopped")
    return [{name: line[name] for name in names} for line in lines]


@pytest.mark.thorough
def test_a_run_is_the_same(tmp_path: Path) -> None:
    """Bit for bit on one rank, with dp and tp before anything is trained; log-probs are those of a forward pass."""
    folder(tmp_path)
    config = tmp_path / "model" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    form = run(tmp_path, "envs_steps.py", "Steps", None)
    agent = run(tmp_path, "envs_agents.py", "asks_twice", None)
    assert [{k: v for k, v in line.items() if k != "stopped"} for line in agent] == [
        {k: v for k, v in line.items() if k != "stopped"} for line in form]
    assert all(line["gap"] == 0.0 and line["turns"] == 16 and line["reward"] == 3.0 for line in agent)
    first = [name for name in agent[0] if not name.startswith("actor/")]
    for place in ("place *.* on mesh(0:2) dp=2", "place actor.generate on mesh(0:2) tp=2\nplace actor.* on mesh(0:1)"):
        divided = run(tmp_path, "envs_agents.py", "asks_twice", place)
        assert {name: divided[0][name] for name in first} == {name: agent[0][name] for name in first}
        assert divided[1] == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in agent[1].items()}
