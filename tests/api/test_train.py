"""`rldsl.train`: a program is trained from Python, with functions and callbacks of the caller."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rldsl
from rldsl.python import start
from rldsl.python.redirect import Redirection
from rldsl.python.train import _Follower
from tests.forked import command
from tests.tiny import make_model, make_sums, write_jsonl

PROGRAM = '''use std.dapo (dapo)
use std.grpo (group_norm)
use py "rewards.py" (length: gen -> seq)
param steps = 12
data prompts = jsonl("prompts.jsonl", batch=4, max_prompt_tokens=8)
model actor = causal_lm("model")  train adamw(lr=1e-3)
flow small(steps=steps, seed=3) {
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=4)
  reward = length(gen)
  actor.train(gen, loss=dapo(old=gen.logprobs, adv=group_norm(reward)))
  metric reward = mean(reward)
  every 2 { save actor }
  checkpoint every 1
}
'''
# what a user writes: trains, stops after the second step, looks at the run, resumes; then lets a function fail
SCRIPT = '''
import json, math, os, sys, time
sys.path.insert(0, ".")
import rldsl

SCALE = 0.5

def scaled(x):
    return SCALE * math.fabs(x)

def steps(file):
    return len(open(file).readlines()) if os.path.exists(file) else 0

def length(rows):
    while os.path.exists("waits") and steps("run/metrics.jsonl") >= 2:  # until the callback has heard of the second one
        time.sleep(0.01)
    return [scaled(len(r["completion"])) for r in rows]

seen = []

def stop(line):
    seen.append(line["step"])
    line["reward"] = 1e9  # a copy: nothing changes
    if line["step"] == 2:
        os.remove("waits")
    return line["step"] == 2

def report(run):
    return {"state": run.state, "step": run.step, "steps": [m["step"] for m in run.lines],
            "rewards": run.metrics["reward"].tolist()}

found = {"version": rldsl.__version__}
whole = rldsl.train("small.rlf", rewards={"length": length}, out="whole", log_samples=2, quiet=True)
found["whole"] = report(whole)
found["samples"] = whole.samples.to_dict("records")
found["saved"] = str(whole.saved("actor"))
found["parameters"] = whole.model("actor").num_parameters()
open("waits", "w").close()  # the run cannot end before it is stopped
first = rldsl.train("small.rlf", rewards={"length": length}, out="run", callbacks=[stop])
found["first"] = report(first) | {"seen": list(seen)}
found["refused"] = []
for arguments in ({}, {"resume": True, "overwrite": True}):
    try:
        first.plan.run(out="run", quiet=True, **arguments)
    except rldsl.DiagnosticError as error:
        found["refused"].append(str(error))
seen.clear()
rest = first.plan.run(out="run", resume=True, callbacks=[lambda line: seen.append(line["step"])], quiet=True)
found["rest"] = report(rest) | {"seen": seen}
found["runs"] = [str(run.folder) for run in rldsl.runs(".")]

def length(rows):
    raise ValueError("no length today")

try:
    rldsl.train("small.rlf", rewards={"length": length}, out="failed", quiet=True)
except rldsl.RunError as error:
    found["failed"] = [str(error), error.run.state]

def angry(line):
    raise KeyError("callback")

del length
from rewards import length
try:
    rldsl.train("small.rlf", {"steps": 50}, rewards={"length": length}, out="angry", callbacks=[angry], quiet=True)
except KeyError as error:
    found["angry"] = [str(error), rldsl.Run(rldsl.runs("angry")[0].folder).step]
open("found.json", "w").write(json.dumps(found))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    make_model(folder / "model", num_hidden_layers=1)
    write_jsonl(folder / "prompts.jsonl", make_sums(16))
    (folder / "small.rlf").write_text(PROGRAM)
    (folder / "rewards.py").write_text('def length(rows):\n    return [1.0 * len(r["completion"]) for r in rows]\n')
    (folder / "script.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RLDSL_CACHE", str(folder / "cache"))
        done = command("script.py", env={"PYTHONPATH": str(folder)})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text()) | {"stdout": done.stdout, "stderr": done.stderr}


@pytest.mark.thorough
def test_a_run_from_python(found: dict[str, dict], folder: Path) -> None:
    whole = found["whole"]
    assert whole["state"] == "finished" and whole["steps"] == list(range(1, 13))
    assert all(0 < r <= 2 for r in whole["rewards"])  # half of at most 4 characters: the passed function ran
    assert {s["batch"] for s in found["samples"]} == {"gen"} and len(found["samples"]) == 24
    assert all(s["reward"] == len(s["completion"]) / 2 for s in found["samples"])
    assert found["saved"].endswith("step-12/actor") and found["parameters"] > 1000
    assert found["version"] == rldsl.__version__


def test_a_callback_stops_a_run_which_then_resumes(found: dict[str, dict]) -> None:
    first, rest, whole = found["first"], found["rest"], found["whole"]
    assert first["state"] == "stopped" and 2 <= first["step"] < 12
    assert first["seen"] == first["steps"] and rest["seen"] == list(range(first["step"] + 1, 13))
    assert rest["state"] == "finished" and rest["rewards"] == whole["rewards"]  # bit for bit
    assert re.findall(r"(?m)^step +(\d+)/12 ", found["stdout"])[:2] == ["1", "2"]  # of the run that was not quiet
    assert sorted(found["runs"]) == ["run", "whole"]


def test_a_stopped_run_is_not_replaced(found: dict[str, list]) -> None:
    kept, both = found["refused"]
    assert "error[RL0781]" in kept and "`resume=True`" in kept and "`overwrite=True`" in kept and "`--" not in kept
    assert "error[RL0099]" in both and "pass one of them" in both


def test_a_failing_run_says_why(found: dict[str, list]) -> None:
    text, state = found["failed"]
    assert "no length today" in text and "error[RL" in text and "Traceback" not in text and state == "failed"


def test_an_error_of_a_callback_ends_the_run_and_reaches_the_caller(found: dict[str, list]) -> None:
    text, step = found["angry"]
    assert text == "'callback'" and 1 <= step < 50


# ------------------------------------------------------------------------------------------------ mistakes


def reward(rows: list[dict[str, str]]) -> list[float]:
    return [1.0 for _ in rows]


def test_a_function_that_the_program_does_not_declare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RLDSL_CACHE", str(folder / "cache"))
    with pytest.raises(rldsl.DiagnosticError, match="declares no Python function `reward`") as caught:
        rldsl.train("small.rlf", rewards={"reward": reward})
    assert [d.code for d in caught.value.diagnostics] == ["RL0793"]
    assert "`length`" in str(caught.value)


@pytest.mark.parametrize("arguments, said", [
    (dict(callbacks=reward), "callbacks=[reward]"), (dict(callbacks=["x"]), "`callbacks` cannot be 'x'"),
    (dict(rewards=reward), 'rewards={"reward": reward}'), (dict(rewards=[reward]), "`rewards` cannot be a `list`"),
    (dict(options="--tensorboard"), "options=['--tensorboard']"), (dict(options=["--seed", 3]), "a list of texts"),
    (dict(log_samples=-1), "`log_samples` cannot be -1"), (dict(log_samples="all"), "0 or more"),
    (dict(log_samples=True), "`log_samples` cannot be True"), (dict(out=3), "the directory of the run"),
    (dict(resume=3), "`resume` cannot be 3"), (dict(nproc="2"), "`nproc` cannot be '2'"),
    (dict(on=3), "`on` cannot be 3"), (dict(on=[3]), "a rule or a list of rules"), (dict(place=2), "`place` cannot be 2")])
def test_arguments_of_another_kind(folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object],
                                   said: str) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(rldsl.DiagnosticError) as caught:
        rldsl.train("small.rlf", **arguments)  # type: ignore[arg-type]
    [found] = caught.value.diagnostics
    assert found.code == "RL0099" and found.place == next(iter(arguments)) and said in str(caught.value)
    assert not (folder / "runs").exists()


def test_params_that_are_no_dict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for arguments, name in (((3,), "program"), (("small.rlf", 3), "params")):
        with pytest.raises(rldsl.DiagnosticError, match=f"`{name}` cannot be 3"):
            rldsl.compile(*arguments)  # type: ignore[arg-type]


class Ends:
    """Follows a process that prints its id, and raises `error` when it has."""

    def __init__(self, error: BaseException):
        self.error, self.process = error, 0

    def line(self, text: str) -> None:
        self.process = int(text)

    def tick(self) -> bool:
        if self.process:
            raise self.error
        return False


@pytest.mark.parametrize("error", [SystemExit(3), TypeError("x")])
def test_ranks_end_with_a_callback_that_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              error: BaseException) -> None:
    """The kernel of a notebook lives on after `exit()` in a callback: its ranks must not."""
    waits = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    monkeypatch.setattr(start, "interpreter", lambda: [sys.executable, "-c", waits])
    follower = Ends(error)
    with pytest.raises(type(error)) as caught:
        start.launch("x.plan", 1, str(tmp_path / "out"), [], follower=follower)
    assert caught.value.__context__ is None  # not "during handling of" a time limit of ours
    with pytest.raises(ProcessLookupError):
        os.kill(follower.process, 0)


def test_another_number_of_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(rldsl.DiagnosticError, match="the plan is for 1 rank, not 4"):
        rldsl.train("small.rlf", nproc=4)
    with pytest.raises(rldsl.DiagnosticError, match="resume=True needs"):
        rldsl.train("small.rlf", resume=True)


@pytest.mark.parametrize("given", [dict(out="new", resume=True), dict(resume="new")])
def test_nothing_to_resume(folder: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object]) -> None:
    """It is said before a rank starts."""
    monkeypatch.chdir(folder)
    with pytest.raises(rldsl.DiagnosticError, match="RL0760.*no such directory(.|\n)*without `resume=True`"):
        rldsl.train("small.rlf", **given)
    assert not Path("new").exists()


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    run = rldsl.Run(tmp_path)
    for look in (lambda: run.state, lambda: run.plan, lambda: run.saved("actor")):
        with pytest.raises(rldsl.DiagnosticError):
            look()
    assert run.lines == [] and run.metrics.empty and run.samples.empty and rldsl.runs(tmp_path) == []
    with pytest.raises(rldsl.DiagnosticError, match="no such directory"):
        rldsl.runs(tmp_path / "none")


def test_a_model_that_was_not_saved(found: dict[str, dict], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.plan").write_bytes((folder / "whole/run.plan").read_bytes())
    with pytest.raises(rldsl.DiagnosticError, match="has not saved `actor`(?s:.*)it ended before the step of its first"):
        rldsl.Run(tmp_path).saved("actor")
    with pytest.raises(rldsl.DiagnosticError, match="has not saved `critic`"):
        rldsl.Run(folder / "whole").saved("critic")


def test_the_message_of_a_run_in_colors(tmp_path: Path) -> None:
    """Kernels of notebooks ask for colors (CLICOLOR_FORCE), which are no part of the text of a RunError."""
    follower = _Follower(tmp_path, [], True, 0, Redirection())
    for text in ("reads   model", "\x1b[1m\x1b[31merror[RL0775]\x1b[0m\x1b[1m: it raised\x1b[0m", " --> r.py:5"):
        follower.line(text)
    assert follower.errors() == "error[RL0775]: it raised\n --> r.py:5"


def test_a_follower_reads_each_line_once(tmp_path: Path) -> None:
    steps: list[float] = []
    follower = _Follower(tmp_path, [lambda line: steps.append(line["step"])], True, 1, Redirection())
    file = tmp_path / "metrics.jsonl"
    for text in ("", '{"step": 1}\n', '{"step": 1}\n{"step": 2}\n{"st', '{"step": 1}\n{"step": 2}\n{"step": 3}\n', "x\n"):
        file.write_text(text)
        assert not follower.tick() and not follower.tick()
    assert steps == [2, 3]


@pytest.mark.parametrize("answer, stops", [
    (True, True), (np.bool_(True), True), (np.mean([1.0, 2.0]) > 1, True), (np.array(True), True),
    (torch.tensor(2.0) > 1, True), (False, False), (np.bool_(False), False), (torch.tensor(0.0) > 1, False),
    (None, False), (1, False), (17.5, False), ("stop", False), (np.float64(1.0), False), (np.array([True]), False),
    (np.array([True, False]), False), ({"dtype": "bool"}, False)], ids=repr)
def test_what_a_callback_stops_a_run_with(tmp_path: Path, answer: object, stops: bool) -> None:
    """Comparisons of numpy and torch give their own kind of True; a function that logs may return anything."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert _Follower(tmp_path, [lambda line: answer], True, 0, Redirection()).tick() is stops
