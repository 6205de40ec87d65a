"""A process of a run whose parent is killed ends, and leaves the directory of the run to whoever resumes it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rldsl.runtime.metrics.run_record import last_checkpoint, read_record
from tests.cpu import children
from tests.end_to_end.programs import compile_program
from tests.forked import command
from tests.tiny import make_model, make_sums, write_jsonl
from tests.torchrun import begun

PROGRAM = """
use std.sft (sft)
data sums = jsonl("sums.jsonl", batch=4, answer="answer")
model actor = causal_lm("model") train adamw(lr=1e-4)
flow tuning(steps=STEPS, seed=1) {
  checkpoint every EVERY
  batch = sums.next()
  actor.train(batch, loss=sft()) on mesh(0:2) dp=2
}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", num_hidden_layers=2)
    write_jsonl(tmp_path / "sums.jsonl", make_sums(16))
    return tmp_path


def compiled(steps: int, every: int = 1_000_000) -> str:
    Path("p.rlf").write_text(PROGRAM.replace("STEPS", str(steps)).replace("EVERY", str(every)))
    Path("p.plan").write_bytes(compile_program(Path("p.rlf"), {}, None, Path.cwd()))
    return "p.plan"


@contextmanager
def started(*line: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command, executed, with what it prints in the file `said`. Whatever it started ends with the block."""
    with Path("said").open("wb") as said:
        process = subprocess.Popen([sys.executable, "-m", *line], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
        try:
            yield process
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def until(true: Callable[[], bool], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, Path("said").read_text()
        time.sleep(0.05)


def gone(*pids: int) -> bool:
    return not any(Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
                   .split()[0] != "Z" for pid in pids)


def steps() -> int:
    """The last one in the metrics."""
    try:
        return int(json.loads(Path("out/metrics.jsonl").read_text().splitlines()[-1])["step"])
    except (FileNotFoundError, IndexError):
        return 0


def newest() -> int:
    """The step of the newest checkpoint."""
    return last_checkpoint(Path("out")) or 0


def resumed(plan: str) -> str:
    """What a start right after the end of another prints."""
    done = command("rldsl.cli", "run", plan, "--out", "out", "--resume")
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.thorough
def test_rlc_run_is_killed(place: Path) -> None:
    """torchrun and the store live on, so the run stops as SIGTERM stops it: with a checkpoint."""
    with started("rldsl.cli", "run", compiled(100000), "--out", "out") as rlc:
        until(lambda: steps() > 0)
        [agent] = children(rlc.pid)
        ranks = children(agent)
        assert len(ranks) == 2
        rlc.kill()
        until(lambda: gone(agent, *ranks), 30)
    assert f"stopped after step {steps()} as requested" in Path("said").read_text()
    held = read_record(Path("out"))
    assert held is not None and held["state"] == "stopped"
    assert not Path("out/run.lock").exists()
    last = steps()
    assert newest() == last
    assert f"after step {last}" in resumed(compiled(last + 2))
    assert steps() == last + 2


@pytest.mark.thorough
def test_the_agent_is_killed(place: Path) -> None:
    """The store is gone with it, so no checkpoint can be completed, and the ranks stop at once."""
    with begun(place, "--nproc-per-node", "2", "-m", "rldsl.run", compiled(100000, every=1), "--out", "out",
               "--device", "cpu") as agent:
        until(lambda: newest() > 1)
        ranks = agent.ranks()
        assert len(ranks) == 2
        agent.process.kill()
        until(lambda: gone(*ranks), 30)
    text = Path("said").read_text()
    assert text.count("error[RL0709]: torchrun was killed") == 1 and text.count("error[") == 1, text
    assert "Traceback" not in text, text
    held = read_record(Path("out"))
    assert held is not None and held["state"] == "failed"
    assert not Path("out/run.lock").exists()
    dumps = [json.loads(file.read_text()) for file in Path("out/postmortem").glob("rank-*.json")]
    assert len(dumps) == 2 and {dump["code"] for dump in dumps} == {"RL0709"}
    last = newest()
    assert f"after step {last}" in resumed(compiled(last + 2, every=1))
    assert steps() == last + 2


def test_sigterm_before_there_are_ranks(place: Path) -> None:
    with started("rldsl.cli", "run", compiled(100000), "--out", "out") as rlc:
        until(lambda: bool(children(rlc.pid)))
        os.kill(children(rlc.pid)[0], signal.SIGTERM)  # as `rlc run` does with its own
        assert rlc.wait(60) == 143
    assert Path("said").read_text() == "terminated before the first step; to start again, repeat the command\n"
    assert not Path("out/run.lock").exists()


@pytest.mark.thorough
def test_sigterm_while_ranks_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in them has taken over SIGTERM yet, so it ends them, which is no failure."""
    monkeypatch.chdir(tmp_path)
    Path("rank.py").write_text("import pathlib, time\npathlib.Path('up').touch()\ntime.sleep(600)\n")
    with started("rldsl.runtime.launch", "--standalone", "--nproc-per-node", "1", "rank.py") as agent:
        until(Path("up").exists)
        agent.terminate()
        assert agent.wait(60) == 143
    assert Path("said").read_text() == ""


@pytest.mark.thorough
@pytest.mark.parametrize("number, ranks, who", [("SIGTERM", 1, "rank 0 was"), ("SIGKILL", 2, "ranks 0, 1 were")])
def test_ranks_that_are_all_killed(number: str, ranks: int, who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                   ) -> None:
    """None is left to report it."""
    monkeypatch.chdir(tmp_path)
    Path("rank.py").write_text("import os, pathlib, time\npathlib.Path('up' + os.environ['RANK']).touch()\n"
                               "time.sleep(600)\n")
    with started("rldsl.runtime.launch", "--standalone", "--nproc-per-node", str(ranks), "rank.py") as agent:
        until(lambda: all(Path(f"up{rank}").exists() for rank in range(ranks)))
        held = children(agent.pid)
        os.kill(agent.pid, signal.SIGSTOP)  # so that it sees all of them at once
        for rank in held:
            os.kill(rank, getattr(signal, number))
        os.kill(agent.pid, signal.SIGCONT)
        assert agent.wait(60) == 1
    text = Path("said").read_text()
    assert text.startswith(f"error[RL0709]: {who} killed ({number})\n") and "--resume" in text, text


@pytest.mark.thorough
@pytest.mark.parametrize("reports", [True, False])
def test_one_rank_of_several_that_is_killed(reports: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends the others with SIGTERM. They report it, unless they are still importing."""
    monkeypatch.chdir(tmp_path)
    Path("rank.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "def told(*_):\n    print('rank 1 is gone', flush=True)\n    sys.exit(1)\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not pathlib.Path('up').exists(): time.sleep(0.1)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"if {reports}: signal.signal(signal.SIGTERM, told)\npathlib.Path('up').touch()\ntime.sleep(600)\n")
    with started("rldsl.runtime.launch", "--standalone", "--nproc-per-node", "2", "rank.py") as agent:
        assert agent.wait(60) == 1
    said = Path("said").read_text()
    assert said == "rank 1 is gone\n" if reports else said.startswith("error[RL0709]: rank 1 was killed (SIGKILL)\n")
