"""Ranks are killed at any moment, and runs are asked to stop; what comes out in the end is the undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoint.runs import _rank, held, lines, run, steps
from tests.end_to_end.programs import compile_program
from tests.tiny import make_all
from tests.world import _enter, context

HERE = Path(__file__).parent
KILLS = 30
PLACE = """cluster nodes=1 gpus=2
place actor.* on mesh(0:2) tp=2
place slow.* on mesh(0:2) dp=2
place critic.* on mesh(1:2)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True)


def plan(tiny: Path, folder: Path, **sets: object) -> bytes:
    given = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")} | sets
    return compile_program(HERE / "small.rlf", given, PLACE, folder)


def attempt(data: bytes, out: Path, seconds: float | None, victim: int) -> bool:
    """One start of two ranks, of which `victim` is killed after a while; whether it was. The other one then loses
    contact, and is ended as torchrun does."""
    ctx = context()
    with tempfile.TemporaryDirectory() as place:
        ours, theirs = ctx.Pipe(duplex=False)
        arguments = (data, str(out), None, 0, True, os.getcwd())
        ranks = [ctx.Process(target=_enter, args=(r, 2, f"{place}/store", theirs, _rank, arguments), daemon=True)
                 for r in range(2)]
        for process in ranks:
            process.start()
        ranks[victim].join(seconds)
        killed = ranks[victim].is_alive()
        if killed:
            os.kill(ranks[victim].pid, signal.SIGKILL)
            ranks[1 - victim].join(1.0)
        for process in ranks:
            if killed:
                process.kill()
            process.join(60)
        ours.close()
    return killed


def test_ranks_killed_thirty_times(tiny: Path, tmp_path: Path) -> None:
    """The moments are random; that the run also gets on shows in the steps, and that kills hit every phase in the
    directories that were left without a name."""
    data = plan(tiny, tmp_path, steps=40)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert set(run(data, whole)) == {""}
    draw = random.Random(5)
    begun = time.monotonic()
    assert not attempt(data, tmp_path / "timing", None, 0)
    alone = time.monotonic() - begun
    kills = 0
    while kills < KILLS:  # mostly early, so that the run is not over before thirty of them
        kills += attempt(data, out, draw.uniform(0.05, 0.45) * alone, draw.randrange(2))
        if (out / "checkpoints/step-000040").exists():
            break
    assert kills >= KILLS, "the run was over too soon for this test"
    assert not attempt(data, out, None, 0)
    assert lines(out) == lines(whole)
    mine, theirs = held(out / "checkpoints/step-000040"), held(whole / "checkpoints/step-000040")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in theirs)


def launched(data: bytes, folder: Path, *more: str) -> subprocess.Popen[str]:
    (folder / "p.plan").write_bytes(data)
    command = [sys.executable, "-m", "rldsl.runtime.launch", "--standalone", "--nproc-per-node", "2", *more, "-m",
               "rldsl.run", str(folder / "p.plan"), "--out", str(folder / "out"), "--device", "cpu"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def until_step(folder: Path, step: int) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if any(int(p.name[5:]) >= step for p in (folder / "out/checkpoints").glob("step-*")):
            return
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint of step {step} in 90 s")


def test_sigterm_saves_and_ends_well(tiny: Path, tmp_path: Path) -> None:
    data = plan(tiny, tmp_path, steps=5000, every_k=1000_000)
    process = launched(data, tmp_path)
    end = time.monotonic() + 90
    while not (tmp_path / "out/metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert "Traceback" not in text and "error" not in text, text
    last = lines(tmp_path / "out")[-1]["step"]
    assert 1 <= last < 5000 and f"stopped after step {last}, as asked" in text
    assert steps(tmp_path / "out") == [f"step-{last:06d}"]


def test_torchrun_restarts_by_itself(tiny: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    data = plan(tiny, tmp_path, steps=60)
    assert set(run(data, whole)) == {""}
    process = launched(data, tmp_path, "--max-restarts", "2")
    until_step(tmp_path, 3)
    ranks = [int(c) for t in Path(f"/proc/{process.pid}/task").iterdir() for c in (t / "children").read_text().split()]
    os.kill(max(ranks), signal.SIGKILL)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert lines(tmp_path / "out") == lines(whole)
    assert json.loads((tmp_path / "out/summary.json").read_text())["steps"] == 60
