"""Under torchrun: a stopped rank ends the run in time, with a status, and no process stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.programs import compile_program
from tests.tiny import make_model, make_sums, write_jsonl

PROGRAM = """
use std.sft (sft)
data sums = jsonl("sums.jsonl", batch=4, answer="answer")
model actor = causal_lm("model") train adamw(lr=1e-4)
flow tuning(steps=100000, seed=1) {
  batch = sums.next()
  actor.train(batch, loss=sft()) on mesh(0:2) dp=2
}
"""
LIMIT, LAST = 6, 30  # seconds that a rank waits for another; that torchrun gives a rank to end


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    write_jsonl(tmp_path / "sums.jsonl", make_sums(16))
    Path("p.rlf").write_text(PROGRAM)
    Path("p.plan").write_bytes(compile_program(Path("p.rlf"), {}, None, tmp_path))
    command = [sys.executable, "-m", "rldsl.runtime.launch", "--standalone", "--nproc-per-node", "2", "-m",
               "rldsl.run", "p.plan", "--out", "out", "--device", "cpu", "--timeout", str(LIMIT)]
    with Path("said").open("w") as said:
        process = subprocess.Popen(command, stderr=said, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        until(lambda: Path("out/metrics.jsonl").exists() or process.poll() is not None, 100)
        yield process
    finally:
        for pid in ranks(process):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, Path("said").read_text()
        time.sleep(0.02)


def ranks(process: subprocess.Popen[bytes]) -> list[int]:
    if process.poll() is not None:
        return []
    return [int(c) for t in Path(f"/proc/{process.pid}/task").iterdir() for c in (t / "children").read_text().split()]


def rank(process: subprocess.Popen[bytes], number: int) -> int:
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in ranks(process)}
    return next(pid for pid, environment in environments.items() if f"RANK={number}".encode() in environment)


def test_a_stopped_rank_is_named_and_gone(running: subprocess.Popen[bytes]) -> None:
    pid = rank(running, 1)
    os.kill(pid, signal.SIGSTOP)
    assert running.wait(LIMIT + LAST + 30) == 1
    text = Path("said").read_text()
    assert "error[RL0709]: rank 1 is stopped" in text and text.count("error[") == 1 and "p.rlf:" in text, text
    assert "rank 0 waits for rank 1" in text and "Traceback" not in text, text
    assert not Path(f"/proc/{pid}").exists()
    assert {p.name for p in Path("out/postmortem").iterdir()} == {"rank-0.json", "signs.json"}
