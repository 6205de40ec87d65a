"""Links in a run's directory are not followed out of it, whatever a run would write through them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rldsl.diag import Failure
from rldsl.postmortem.dumps import FOLDER as DUMPS
from rldsl.runtime.metrics.run_record import claim_output
from tests import torchrun
from tests.metrics.program import plan
from tests.metrics.test_commands import made, refused
from tests.world import run_world

FILES = ["metrics.jsonl", "summary.json", "run.json", "run.plan", "sources/0123-p.rlf", "samples/gen.jsonl",
         "samples/.gen.jsonl.partial", "wandb/id", "log/rank-0.log", "log/rank-3.log", f"{DUMPS}/rank-0.json",
         f"{DUMPS}/.signs.json.partial", "failed-batch-step-2/rank-00000.safetensors", ".metrics.jsonl.partial"]
DIRECTORIES = ["sources", "samples", "tensorboard", "wandb", "log", DUMPS, "failed-batch-step-1"]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/precious").write_text("mine")
    return tmp_path / "elsewhere"


def linked(out: Path, name: str, target: Path) -> None:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).symlink_to(target)


def untouched(outside: Path) -> bool:
    return [p.name for p in outside.iterdir()] == ["precious"] and (outside / "precious").read_text() == "mine"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", ["precious", "not-there"])
def test_a_file_that_leads_out(tmp_path: Path, outside: Path, name: str, target: str) -> None:
    linked(tmp_path / "out", name, outside / target)
    with pytest.raises(Failure, match=rf"RL0708 .*to {re.escape(str(outside))}/{target}"):
        claim_output(tmp_path / "out", None, overwrite=True)
    assert untouched(outside)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_directory_that_leads_out(tmp_path: Path, outside: Path, name: str) -> None:
    linked(tmp_path / "out", name, outside)
    with pytest.raises(Failure, match="RL0708"):
        claim_output(tmp_path / "out", tmp_path / "out")


def test_links_that_stay_inside_and_what_no_run_writes(tmp_path: Path, outside: Path) -> None:
    out = tmp_path / "out"
    linked(out, "metrics.jsonl", Path("all.jsonl"))
    linked(out, "samples", Path("texts"))
    linked(out, "checkpoints", outside)  # what is in it is replaced, never written through
    linked(out, "notes.txt", outside / "precious")
    linked(out, "wandb/debug.log", outside / "precious")
    (tmp_path / "named").symlink_to(out)  # the directory itself may have any name
    for directory in (out, tmp_path / "named"):
        claim_output(directory, None)


def test_links_that_go_round(tmp_path: Path) -> None:
    linked(tmp_path / "out", "metrics.jsonl", tmp_path / "out/other")
    linked(tmp_path / "out", "other", tmp_path / "out/metrics.jsonl")
    try:
        claim_output(tmp_path / "out", None)
    except Failure as failure:  # a later Python says so only when it is written
        assert failure.diagnostics[0].code == "RL0708"


@pytest.mark.parametrize("name", ["metrics.jsonl", "log/rank-0.log"])
def test_rlc_run_refuses_before_any_rank_starts(tmp_path: Path, outside: Path, name: str) -> None:
    (tmp_path / "p.rlf").write_text("flow f(steps=1, seed=1) {}\n")
    out = made(tmp_path / "out", "failed")
    linked(out, name, outside / "precious")
    text = refused("RL0708", "run", tmp_path / "p.rlf", "--out", out)
    assert name in text and "remove the link" in text and untouched(outside)


@pytest.mark.parametrize("name", ["log/rank-0.log", "metrics.jsonl"])
def test_a_rank_refuses(place: Path, tmp_path: Path, outside: Path, name: str) -> None:
    (place / "p.plan").write_bytes(plan(place))
    linked(place / "out", name, outside / "precious")
    with torchrun.begun(tmp_path, "--nproc-per-node", "1", "-m", "rldsl.run", "p.plan", "--out", "out",
                        "--device", "cpu") as agent:
        assert agent.wait(90) == 1
    assert "error[RL0708]" in agent.said() and "Traceback" not in agent.said() and untouched(outside)
    assert not (place / "out/run.json").exists()


def test_a_trace_in_the_run_directory(place: Path, tmp_path: Path, outside: Path) -> None:
    (place / "p.plan").write_bytes(plan(place))
    linked(place / "out", "trace.json", outside / "precious")
    with torchrun.begun(tmp_path, "--nproc-per-node", "1", "-m", "rldsl.run", "p.plan", "--out", "out",
                        "--device", "cpu", "--trace", "out/trace.json") as agent:
        assert agent.wait(90) == 1
    assert "error[RL0708]" in agent.said() and untouched(outside)


def _executed(rank: int, data: bytes, out: str, cwd: str) -> None:
    import os

    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(cwd)
    execute(PlanFile.from_bytes(data, "test.plan"), out)


def test_without_a_command_line(place: Path, outside: Path) -> None:
    linked(place / "out", "samples", outside)
    with pytest.raises(AssertionError, match="RL0708"):
        run_world(1, _executed, plan(place), str(place / "out"), str(place))
    assert untouched(outside)
