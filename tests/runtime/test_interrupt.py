"""Ctrl-C ends a run with one line: where it was, and how to resume."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rldsl.runtime.launch import main as launch
from rldsl.runtime.metrics.run_record import (
    PYTHON_CALL,
    RunRecord,
    interruption_text,
    read_record,
    resume_command,
)
from rldsl.runtime.plan_file import PlanFile
from tests import forked
from tests.end_to_end.programs import compile_program
from tests.forked import command
from tests.tiny import make_model, make_sums, write_jsonl
from tests.torchrun import Agent, begun, until

PROGRAM = """
use std.sft (sft)
data sums = jsonl("sums.jsonl", batch=4, answer="answer")
model actor = causal_lm("model") train adamw(lr=1e-4)
flow tuning(steps=100000, seed=1) {
  checkpoint every 2
  batch = sums.next()
  actor.train(batch, loss=sft()) on mesh(0:2) dp=2
}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupt")
    make_model(folder / "model", num_hidden_layers=2)
    write_jsonl(folder / "sums.jsonl", make_sums(16))
    return folder


def plan(place: Path, text: str) -> None:
    Path("p.rlf").write_text(text)
    Path("p.plan").write_bytes(compile_program(Path("p.rlf"), {}, None, place))


def started(out: str, typed: str = "") -> tuple[str, ...]:
    return ("--nproc-per-node", "2", "-m", "rldsl.run", "p.plan", "--out", out, "--device", "cpu",
            *(("--command", typed) if typed else ()))


def lines(agent: Agent) -> list[str]:
    """What it says about its end."""
    return [x for x in agent.said().splitlines() if "interrupted" in x or "Traceback" in x or "error" in x.lower()]


@pytest.mark.thorough
def test_a_run_with_checkpoints(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches every process of a terminal."""
    monkeypatch.chdir(place)
    plan(place, PROGRAM)
    with begun(tmp_path, *started("kept", "rlc run p.rlf --overwrite --out kept")) as agent:
        until(lambda: any(Path("kept/checkpoints").glob("step-*/checkpoint.json")), agent)
        for pid in (agent.process.pid, *agent.ranks()):
            os.kill(pid, signal.SIGINT)
        assert agent.wait(60) == 130, agent.said()
        [line] = lines(agent)
    last = json.loads(Path("kept/metrics.jsonl").read_text().splitlines()[-1])["step"]
    words = line.split()
    assert words[:3] == ["interrupted", "in", "step"] and int(words[3]) in (last, last + 1)
    assert line.endswith(": rlc run p.rlf --out kept --resume"), line
    saved = int(line.split("to resume after step ")[1].split(":")[0])
    complete = {int(p.parent.name[5:]) for p in Path("kept/checkpoints").glob("step-*/checkpoint.json")}
    assert saved in complete and saved == max(complete)
    held = read_record(Path("kept"))
    assert held is not None and held["state"] == "stopped" and held["step"] == int(words[3])


@pytest.mark.thorough
def test_a_signal_to_the_launcher_alone(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run without checkpoints."""
    monkeypatch.chdir(place)
    plan(place, PROGRAM.replace("  checkpoint every 2\n", ""))
    with begun(tmp_path, *started("lost")) as agent:
        until(Path("lost/metrics.jsonl").exists, agent)
        os.kill(agent.process.pid, signal.SIGINT)
        assert agent.wait(60) == 130, agent.said()
        [line] = lines(agent)
    assert "there is no checkpoint to resume from" in line and "--overwrite" in line


@pytest.mark.thorough
def test_sigterm_ends_a_run_without_checkpoints_within_the_step(place: Path, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """As a batch system sends it: to the launcher. Nothing could be saved, so no step more is run."""
    monkeypatch.chdir(place)
    plan(place, PROGRAM.replace("  checkpoint every 2\n", ""))
    with begun(tmp_path, *started("ended")) as agent:
        until(Path("ended/metrics.jsonl").exists, agent)
        os.kill(agent.process.pid, signal.SIGTERM)
        before = len(Path("ended/metrics.jsonl").read_text().splitlines())
        assert agent.wait(60) == 143, agent.said()
        text = agent.said()
    [line] = [x for x in text.splitlines() if "terminated" in x]
    assert "error" not in text and "Traceback" not in text, text
    after = len(Path("ended/metrics.jsonl").read_text().splitlines())
    assert after <= before + 2, "the step that was under way, and one whose line was not written yet"
    assert line.startswith(f"terminated in step {after + 1} of 100000; no checkpoint was saved, because the flow has no")
    held = read_record(Path("ended"))
    assert held is not None and (held["state"], held["step"]) == ("stopped", after + 1)


def test_a_rank_that_waits_in_a_collective(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread runs no Python, so no handler either; the watchdog ends it."""
    monkeypatch.chdir(place)
    plan(place, PROGRAM)
    with begun(tmp_path, *started("waits")) as agent:
        until(Path("waits/metrics.jsonl").exists, agent)
        first, second = agent.ranks()
        os.kill(second, signal.SIGSTOP)  # rank 0 waits for it
        for pid in (first, second, agent.process.pid):
            os.kill(pid, signal.SIGINT)
        until(lambda: "interrupted" in agent.said(), agent, 30)
        os.kill(second, signal.SIGCONT)
        assert agent.wait(60) == 130, agent.said()
        assert len(lines(agent)) == 1, agent.said()


def test_what_ranks_see_of_a_stopped_run_is_no_failure(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog says that the run was stopped; the main thread then finds that another rank is gone."""
    monkeypatch.chdir(place)
    plan(place, PROGRAM)
    file = PlanFile.read("p.plan")
    for states in (("stopped", "failed"), ("failed", "stopped"), ("failed", "failed")):
        record = RunRecord(tmp_path, file, file.plan, ("cpu",), (), continues=False)
        for step, state in enumerate(states, 3):
            record.end(state, step)
        held = read_record(tmp_path)
        assert held is not None and held["state"] == ("stopped" if "stopped" in states else "failed")
        assert held["step"] == (3 if states[0] == "stopped" else 4)


# --------------------------------------------------------------------------------- a rank that is on its way out

RANK = """
import signal, time
import torch.distributed as dist
from rldsl.runtime.health.watchdog import Watchdog

class Late:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def interruption(what):
    signal.raise_signal(signal.SIGINT)
    return f"{what} in step 3"

watchdog = Watchdog(dist.HashStore(), 0, 1)
watchdog.interruption = interruption
try:
    BODY
except KeyboardInterrupt as error:
    signal.raise_signal(signal.SIGINT)
    watchdog.fail(error)
except Exception as error:
    watchdog.fail(error)
watchdog.close()
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def rank(folder: Path, body: str, before: str = "") -> tuple[int, str, str]:
    """Exit status, output and messages of a rank that does this."""
    (folder / "rank.py").write_text(before + RANK.replace("BODY", body))
    done = command(str(folder / "rank.py"))
    return done.returncode, done.stdout, done.stderr


def test_a_second_signal_does_not_cut_short_what_the_first_began(tmp_path: Path) -> None:
    """A terminal sends one to every process, and torchrun another to each rank."""
    assert rank(tmp_path, "signal.raise_signal(signal.SIGINT)") == (130, "", "interrupted in step 3\n")


def test_a_signal_whose_exception_is_swallowed_ends_the_rank(tmp_path: Path) -> None:
    """As in a `__del__`, or in a callback of the garbage collector."""
    code, said, message = rank(tmp_path, "Late(); time.sleep(60)")
    assert (code, said) == (130, "") and message.endswith("\ninterrupted in step 3\n"), message
    assert message.count("interrupted") == 1


def test_without_a_signal_the_next_one_does_what_it_did_before(tmp_path: Path) -> None:
    assert rank(tmp_path, "pass") == (0, "True\n", "")


def test_a_rank_started_with_ctrl_c_ignored_ignores_it(tmp_path: Path) -> None:
    ignored = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    assert rank(tmp_path, "signal.raise_signal(signal.SIGINT)", ignored) == (0, "False\n", "")


def test_a_signal_while_an_error_is_reported_changes_no_message(tmp_path: Path) -> None:
    failed = """from rldsl.diag import fail
    report = watchdog.heartbeats.report_failure
    watchdog.heartbeats.report_failure = lambda event: (signal.raise_signal(signal.SIGINT), report(event))[1]
    raise fail("RL0701", "the plan needs 4 ranks")"""
    code, _, message = rank(tmp_path, failed)
    assert code == 1 and message.startswith("error[RL0701]: the plan needs 4 ranks"), message


@pytest.mark.parametrize(("typed", "again"), [
    ("rlc run p.rlf", "rlc run p.rlf --out o --resume"),
    ("rlc run p.rlf --out=a --set lr=1 --overwrite", "rlc run p.rlf --set lr=1 --out o --resume"),
    ("rlc run --resume p.rlf --out a", "rlc run p.rlf --out o --resume"),
    ("rlc run p.rlf --resume other/run --plain", "rlc run p.rlf --plain --out o --resume"),
    ("rlc run p.rlf --resume=other --on 'a.b on mesh(2)'", "rlc run p.rlf --on 'a.b on mesh(2)' --out o --resume"),
])
def test_the_command_that_resumes(typed: str, again: str) -> None:
    assert resume_command(typed, Path("o")) == again


def test_under_torchrun_the_command_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-4").mkdir(parents=True)
    (tmp_path / "checkpoints/step-4/checkpoint.json").write_text("{}")
    line = interruption_text(tmp_path, 5, 9, ["run.py", "p.plan"])
    assert line == "interrupted in step 5 of 9; to resume after step 4: the same command with --resume"


@pytest.mark.parametrize("command, begin, resume", [
    (["rlc run p.rlf"], "start again with --overwrite", "rlc run p.rlf --out {out} --resume"),
    ([PYTHON_CALL], "start again with overwrite=True", 'the same call with out="{out}", resume=True')])
def test_the_words_of_whoever_started_the_run(tmp_path: Path, command: list[str], begin: str, resume: str) -> None:
    assert interruption_text(tmp_path, 1, 9, command).endswith(": start again")  # nothing is there yet
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert interruption_text(tmp_path, 2, 9, command).endswith(f": {begin}")
    assert interruption_text(tmp_path, 2, 9, command, "terminated").endswith(f", and {begin}")
    (tmp_path / "checkpoints/step-4").mkdir(parents=True)
    (tmp_path / "checkpoints/step-4/checkpoint.json").write_text("{}")
    line = interruption_text(tmp_path, 5, 9, command)
    assert line == "interrupted in step 5 of 9; to resume after step 4: " + resume.format(out=tmp_path)


# ----------------------------------------------------------------------------------------- launchers that do not meet


def test_a_port_in_use(capfd: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        status = launch(["--nnodes", "1", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port),
                         "-m", "rldsl.run", "p.plan"])
    text = capfd.readouterr().err
    assert status == 1 and text.count("error[RL0704]") == 1 and "port of the rendezvous is in use" in text, text
    assert str(port) in text and "Traceback" not in text


@pytest.mark.thorough
def test_a_missing_machine(capfd: pytest.CaptureFixture[str]) -> None:
    status = launch(["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                     "127.0.0.1:0", "--rdzv-id", "x", "--rdzv-conf", "join_timeout=1,timeout=1", "-m", "rldsl.run", "p.plan"])
    text = capfd.readouterr().err
    assert status == 1 and text.count("error[RL0704]") == 1 and "2 machines did not meet" in text, text
    assert "join_timeout" in text and "Traceback" not in text


def test_sigterm_while_a_machine_is_missing(tmp_path: Path) -> None:
    """There is no rank yet to hand it to, and the launcher must not wait on for the other machine."""
    said = str(tmp_path / "said")
    process = forked.start("tests.torchrun", "30", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
                           "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "x", "-m", "rldsl.run", "p.plan",
                           files=(os.devnull, said, said))
    try:
        end = time.monotonic() + 60
        while not _catches(process.pid, signal.SIGTERM):
            assert process.is_alive() and time.monotonic() < end, Path(said).read_text()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        assert process.exitcode == 128 + signal.SIGTERM and "Traceback" not in Path(said).read_text()
    finally:
        process.kill()
        process.join()


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return bool(int(next(x for x in lines if x.startswith("SigCgt")).split()[1], 16) >> number - 1 & 1)


def test_torchrun_ends_with_our_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own report, which nothing can prevent, repeats the message of the rank."""
    from rldsl.runtime.health.failure_messages import tell_torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    tell_torchrun("error[RL0701]: the plan needs 4 ranks")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert "error[RL0701]: the plan needs 4 ranks" in str(ChildFailedError("rldsl.run", {0: failure}))
