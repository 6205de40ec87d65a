"""A class written for TRL sees here what it sees under TRL's own loop. RLDSL_TRL_PYTHON names a Python with TRL 1.16,
unless this one has it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import command

PYTHON = os.environ.get("RLDSL_TRL_PYTHON", sys.executable)


pytestmark = pytest.mark.skipif(
    PYTHON == sys.executable and importlib.util.find_spec("trl") is None,
    reason="trl is not installed, and RLDSL_TRL_PYTHON does not name a Python that has it")
PROGRAM = """
use py "{file}" (Sums: env)
data prompts = jsonl("rows.jsonl", batch=3, max_prompt_tokens=1k, shuffle=false)
model actor = causal_lm("model")
flow f(steps=1) {{
  prompt = prompts.next()
  gen = actor.generate(prompt, env=Sums, n=2, greedy=true, max_turns=8, max_new_tokens=600, max_tokens=4k)
  metric reward = mean(gen.reward)
}}
"""


def test_the_same_calls_answers_tokens_and_reward() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([PYTHON, str(Path(__file__).parent / "trl_loop.py")], text=True, capture_output=True,
                          timeout=300, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = json.loads(done.stdout.split("RESULT")[1])
    assert ours == theirs
    assert [call[0] for call in ours["calls"]] == ["reset", "add", "slowly", "slowly", "add"] and ours["reward"] == 1.0
    assert "{'error': 'broken'}" in [message["content"] for message in ours["answers"]]


def test_a_class_under_the_trainer_and_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of TRL's own GRPOTrainer, with greedy decoding, and the same rows, model and class in a run: the class
    is asked the same, in the same order, and the conversations are the same, token by token."""
    from transformers import AutoTokenizer

    root = Path(__file__).parents[2]
    done = subprocess.run([PYTHON, str(Path(__file__).parent / "trl_trainer.py"), str(tmp_path)], text=True,
                          capture_output=True, timeout=1500, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in Path("theirs.rows.jsonl").read_text().splitlines()]
    Path("rows.jsonl").write_text("".join(json.dumps(r | {"log": str(tmp_path / "ours.jsonl")}) + "\n" for r in rows))
    Path("p.rlf").write_text(PROGRAM.format(file=Path(__file__).parent / "envs_recorded.py"))
    run = command("rldsl.cli", "run", "p.rlf", "--on", "*.* on mesh(0:1)", "--out", "out", "--log-samples", "6")
    assert run.returncode == 0, run.stderr
    ours, theirs = (sorted(map(json.loads, Path(f"{whose}.jsonl").read_text().splitlines())) for whose in
                    ("ours", "theirs"))
    assert ours == theirs and len(ours) == 6
    assert {call[0] for talk in ours for call in talk[:-1]} == {"reset", "add", "halve"}
    assert {talk[-1] for talk in ours} == {0.0, 1.0} and max(map(len, ours)) > 3
    tokenizer = AutoTokenizer.from_pretrained("model")
    said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in json.loads(Path("theirs.tokens.json").read_text())]
    samples = [json.loads(line) for line in Path("out/samples/gen.jsonl").read_text().splitlines()]
    assert sorted(said) == sorted(sample["completion"] for sample in samples)
