"""Ranks are killed at any moment, and runs are asked to stop; what comes out in the end is the undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from tests.checkpoint.runs import attempt, held, lines, newest, run, steps
from tests.end_to_end.programs import compile_program
from tests.tiny import make_all
from tests.torchrun import Agent, begun, until

HERE = Path(__file__).parent
KILLS, STEPS = 4, 16
PLACE = """cluster nodes=1 gpus=2
place actor.* on mesh(0:2) tp=2
place slow.* on mesh(0:2) dp=2
place critic.* on mesh(1:2)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


def plan(tiny: Path, folder: Path, **sets: object) -> bytes:
    given = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")} | sets
    return compile_program(HERE / "small.rlf", given, PLACE, folder)


@pytest.mark.thorough
def test_ranks_killed_at_any_moment(tiny: Path, tmp_path: Path) -> None:
    """Of the start, of a step, of the writing of a checkpoint. Thirty times in a run of the demo:
    `test_demo_killed.py`."""
    data = plan(tiny, tmp_path, steps=STEPS)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert set(run(data, whole)) == {""}
    draw = random.Random(5)
    for _ in range(KILLS):
        assert attempt(data, out, draw.choice([0, 1, 1]), draw.uniform(0, 0.5), draw.randrange(2))
    assert 0 < newest(out) < STEPS, "the run neither stood still nor was it over"
    assert set(run(data, out, again=True)) == {""}
    assert lines(out) == lines(whole)
    name = f"checkpoints/step-{STEPS:06d}"
    mine, theirs = held(out / name), held(whole / name)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in theirs)


def launched(data: bytes, folder: Path, *more: str) -> AbstractContextManager[Agent]:
    (folder / "p.plan").write_bytes(data)
    return begun(folder, "--nproc-per-node", "2", *more, "-m", "rldsl.run", str(folder / "p.plan"), "--out",
                 str(folder / "out"), "--device", "cpu")


def test_sigterm_saves_and_ends_well(tiny: Path, tmp_path: Path) -> None:
    data = plan(tiny, tmp_path, steps=5000, every_k=1000_000)
    with launched(data, tmp_path) as agent:
        until((tmp_path / "out/metrics.jsonl").exists, agent)
        os.kill(agent.process.pid, signal.SIGTERM)
        code, text = agent.wait(60), agent.said()
    assert code == 0, text
    assert "Traceback" not in text and "error" not in text, text
    last = lines(tmp_path / "out")[-1]["step"]
    assert 1 <= last < 5000 and f"stopped after step {last} as requested" in text
    assert steps(tmp_path / "out") == [f"step-{last:06d}"]


@pytest.mark.thorough
@pytest.mark.parametrize("option", ["", "--overwrite", "--resume"])
def test_a_second_start_beside_a_live_run_is_refused(tiny: Path, tmp_path: Path, option: str) -> None:
    data = plan(tiny, tmp_path, steps=5000, every_k=1)
    with launched(data, tmp_path) as agent:
        until(lambda: newest(tmp_path / "out") >= 1, agent)
        with begun(tmp_path, "--nproc-per-node", "2", "-m", "rldsl.run", str(tmp_path / "p.plan"), "--out",
                   str(tmp_path / "out"), "--device", "cpu", *([option] if option else [])) as second:
            code, text = second.wait(120), second.said()
        assert code != 0 and "RL0780" in text and f"process {agent.ranks()[0]} on " in text, text
        os.kill(agent.process.pid, signal.SIGTERM)
        assert agent.wait(60) == 0
    found = lines(tmp_path / "out")
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    assert not (tmp_path / "out/run.lock").exists()


@pytest.mark.thorough
def test_torchrun_restarts_by_itself(tiny: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    data = plan(tiny, tmp_path, steps=20)
    assert set(run(data, whole)) == {""}
    with launched(data, tmp_path, "--max-restarts", "2") as agent:
        until(lambda: newest(tmp_path / "out") >= 3, agent)
        os.kill(agent.ranks()[1], signal.SIGKILL)
        assert agent.wait(120) == 0, agent.said()
    assert lines(tmp_path / "out") == lines(whole)
    assert json.loads((tmp_path / "out/summary.json").read_text())["steps"] == 20
    assert len(json.loads((tmp_path / "out/run.json").read_text())["resumed"]) == 1
