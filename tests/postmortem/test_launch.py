"""Under torchrun: a stopped rank ends the run in time, with a status, and no process stays behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.programs import compile_program
from tests.tiny import make_model, make_sums, write_jsonl
from tests.torchrun import Agent, begun, until

PROGRAM = """
use std.sft (sft)
data sums = jsonl("sums.jsonl", batch=4, answer="answer")
model actor = causal_lm("model") train adamw(lr=1e-4)
flow tuning(steps=100000, seed=1) {
  batch = sums.next()
  actor.train(batch, loss=sft()) on mesh(0:2) dp=2
}
"""
LIMIT, LAST = 6, 3  # seconds that a rank waits for another; that the launcher gives one to end (30 by itself)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", num_hidden_layers=2)
    write_jsonl(tmp_path / "sums.jsonl", make_sums(16))
    Path("p.rlf").write_text(PROGRAM)
    Path("p.plan").write_bytes(compile_program(Path("p.rlf"), {}, None, tmp_path))
    with begun(tmp_path, "--nproc-per-node", "2", "-m", "rldsl.run", "p.plan", "--out", "out", "--device", "cpu",
               "--timeout", str(LIMIT), patience=LAST) as agent:
        until(Path("out/metrics.jsonl").exists, agent)
        yield agent


@pytest.mark.thorough
def test_a_stopped_rank_is_named_and_gone(running: Agent) -> None:
    pid = running.ranks()[1]
    os.kill(pid, signal.SIGSTOP)
    assert running.wait(LIMIT + LAST + 30) == 1
    text = running.said()
    assert "error[RL0709]: rank 1 is suspended" in text and text.count("error[") == 1 and "p.rlf:" in text, text
    assert "rank 0 waits for rank 1" in text and "Traceback" not in text, text
    assert not Path(f"/proc/{pid}").exists()
    assert {p.name for p in Path("out/postmortem").iterdir()} == {"rank-0.json", "signs.json"}
