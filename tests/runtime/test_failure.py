"""A rank fails, in real worlds under torchrun: the others stop within seconds, with one message and no traceback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rldsl import api
from rldsl.plan.codec import encode
from tests.cpu import children
from tests.forked import command
from tests.tiny import make_model, make_sums, write_jsonl
from tests.torchrun import begun, until

PROGRAM = """
use std.sft (sft)
param steps = 2
param path  = "{out}/model"
data sums = jsonl("sums.jsonl", batch=4, answer="answer")
model actor = causal_lm("model") train adamw(lr=1e-4)
flow tuning(steps=steps, seed=1) {
  batch = sums.next()
  actor.train(batch, loss=sft()) on mesh(0:2) dp=2
  every 1 { save actor to path }
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failure")
    make_model(folder / "model", num_hidden_layers=2)
    write_jsonl(folder / "sums.jsonl", make_sums(16))
    (folder / "p.rlf").write_text(PROGRAM)
    return folder


@pytest.fixture
def place(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compiled(**sets: object) -> Path:
    plan = Path("p.plan")
    plan.write_bytes(encode(api.compile("p.rlf", sets)))
    return plan


def failed(code: int, text: str) -> str:
    assert code == 1, text
    assert "Traceback" not in text, text
    assert text.count("error[") == 1, text
    return text


def launched(plan: Path, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """A whole run, its ranks forked, not started by torchrun."""
    return command("rldsl.runtime.launch", "--nproc-per-node", str(ranks), "-m", "rldsl.run", str(plan), "--out", "out",
                   "--device", "cpu")


def message(plan: Path, ranks: int = 2) -> str:
    """What a run that must fail says."""
    done = launched(plan, ranks)
    return failed(done.returncode, done.stderr)


def test_a_run_leaves_metrics_a_summary_and_a_checkpoint_that_transformers_reads(place: Path) -> None:
    done = launched(compiled())
    assert done.returncode == 0, done.stderr
    assert [json.loads(x)["step"] for x in Path("out/metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert json.loads(Path("out/summary.json").read_text())["saved"] == ["out/model"]
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained("out/model")
    assert sorted(p.name for p in Path("out").iterdir()) == ["log", "metrics.jsonl", "model", "run.json", "run.plan",
                                                             "sources", "summary.json"]


@pytest.mark.thorough
def test_a_killed_rank_is_named_and_the_checkpoint_is_whole(place: Path) -> None:
    with begun(place, "--nproc-per-node", "2", "-m", "rldsl.run", str(compiled(steps=2000)), "--out", "out", "--device",
               "cpu") as agent:
        until(Path("out/model").is_dir, agent)
        os.kill(agent.ranks()[1], signal.SIGKILL)
        text = failed(agent.wait(100), agent.said())
    assert "RL0709" in text and "rank 1 exited without an error message" in text and "p.rlf:" in text, text
    from transformers import AutoModelForCausalLM

    whole = Path("out/model") if Path("out/model").is_dir() else Path("out/.model.old")
    AutoModelForCausalLM.from_pretrained(whole)


@contextmanager
def under_our_launcher(plan: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher of two ranks that have written a checkpoint. What they say goes to the file `said`."""
    with Path("said").open("w") as said, subprocess.Popen(
            [sys.executable, "-m", "rldsl.runtime.launch", "--parent", str(os.getpid()), "--standalone",
             "--nproc-per-node", "2", "-m", "rldsl.run", str(plan), "--out", "out", "--device", "cpu"],
            start_new_session=True, stdout=said, stderr=said) as launcher:
        end = time.monotonic() + 90
        while not Path("out/model").is_dir():
            assert launcher.poll() is None and time.monotonic() < end, Path("said").read_text()
            time.sleep(0.02)
        yield launcher


def names_the_killed(launcher: subprocess.Popen[bytes], rank: int) -> None:
    text = failed(launcher.wait(100), Path("said").read_text())
    assert f"error[RL0709]: rank {rank} exited without an error message" in text, text
    assert "it was killed, possibly because memory ran out" in text and "frame #" not in text, text


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_under_our_launcher(place: Path, rank: int) -> None:
    """Rank 0 takes the store with it. The library of its peers adds no trace for each try to reach it."""
    with under_our_launcher(compiled(steps=20000)) as launcher:
        os.kill(sorted(children(launcher.pid))[rank], signal.SIGKILL)
        names_the_killed(launcher, rank)


@pytest.mark.thorough
def test_rank_0_is_killed_while_the_other_does_not_look(place: Path) -> None:
    """The launcher sees it first: nobody asked the run to stop."""
    with under_our_launcher(compiled(steps=20000)) as launcher:
        first, other = sorted(children(launcher.pid))
        os.kill(other, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        time.sleep(1)  # the launcher looks 50 times meanwhile
        os.kill(other, signal.SIGCONT)
        names_the_killed(launcher, 0)


def test_the_wrong_number_of_ranks(place: Path) -> None:
    text = message(compiled(), ranks=1)
    assert "the plan needs 2 ranks, but torchrun started 1" in text


def test_a_plan_edited_by_hand(place: Path) -> None:
    plan = compiled()
    plan.write_bytes(plan.read_bytes().replace(b'"seed":1', b'"seed":2', 1))
    assert "RL0602" in message(plan)


def test_bad_data_is_found_before_the_first_step(place: Path) -> None:
    plan = compiled()
    with Path("sums.jsonl").open("a") as file:
        file.write('{"prompt": "1+1="\n')
    text = message(plan)
    assert "sums.jsonl:17" in text
    assert not Path("out/metrics.jsonl").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_for_programs_prints_one_object(place: Path, fails: bool) -> None:
    """What ranks print is on standard error; their errors are in the object, too."""
    if fails:
        with Path("sums.jsonl").open("a") as file:
            file.write('{"prompt": "1+1="\n')
    compiled()
    done = command("rldsl.cli", "run", "p.plan", "--out", "out", "--json")
    assert done.returncode == int(fails) and "Traceback" not in done.stderr, done.stderr
    state, step = ("failed", 0) if fails else ("finished", 2)
    held = json.loads(done.stdout)
    diagnostics = held.pop("diagnostics")
    assert held == {"format": 1, "directory": "out", "state": state, "step": step}
    assert [(d["code"], d["place"]) for d in diagnostics] == [("RL0744", "sums.jsonl:17")] * fails, diagnostics
    assert ("error[RL" if fails else "step 2/2") in done.stderr


def test_a_checkpoint_that_cannot_be_written(place: Path) -> None:
    Path("blocked").write_text("a file, not a directory")
    text = message(compiled(path="blocked/model"))
    assert "RL0706" in text and "blocked/model" in text
