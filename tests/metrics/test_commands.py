"""`rlc plot`, `rlc runs`, and when `rlc run` refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from rldsl.cli import main
from rldsl.commands import plot as drawing
from rldsl.commands import run as running
from rldsl.diag import Failure
from rldsl.run import main as start
from rldsl.runtime.metrics.run_record import (
    CONTRADICTION,
    OutputClaim,
    COMMAND_LINE,
    PYTHON,
    RunOptions,
    claim_output,
    read_record,
    refuse_existing_run,
    remove_earlier_run,
)

LINES = [{"step": i, "reward": i / 10, "actor/loss": 1 / i, "kl": 0.1, "length": 5.0, "seconds": 1.0, "time/rest": 1.0}
         for i in (1, 2, 3)]


def made(folder: Path, state: str = "finished", lines: list[dict[str, Any]] | None = None, **more: Any) -> Path:
    """A directory as a run leaves it."""
    folder.mkdir(parents=True)
    held = {"program": "p.rlf", "state": state, "step": 3, "steps": 5, "started": "2026-01-02T03:04:05+00:00",
            "host": socket.gethostname(), "pid": os.getpid()}
    (folder / "run.json").write_text(json.dumps(held | more))
    if lines is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def checkpoint(out: Path, step: int) -> None:
    folder = out / f"checkpoints/step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text("{}")


def rlc(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    assert "Traceback" not in done.output and "internal error" not in done.output, done.output
    return done.exit_code, done.output


def refused(code: str, *arguments: object) -> str:
    status, text = rlc(*arguments)
    assert status == 1 and text.count("error[") == 1 and code in text, text
    return text


# --------------------------------------------------------------------------------------------------------- plot


def test_svg(tmp_path: Path) -> None:
    status, text = rlc("plot", made(tmp_path / "a", lines=LINES))
    assert status == 0 and "reward, kl, actor/loss, length" in text
    drawn = (tmp_path / "a/metrics.svg").read_text()
    assert xml.fromstring(drawn).tag.endswith("svg") and all(f">{n}<" in drawn for n in ("reward", "actor/loss", "kl"))
    assert "seconds" not in drawn


def test_png_of_two_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        made(tmp_path / name, lines=LINES)
    status, _ = rlc("plot", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "x.png")
    assert status == 0 and (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_runs_lie_over_each_other_and_have_names(tmp_path: Path) -> None:
    for name in ("x/a", "y/a", "b"):
        made(tmp_path / name, lines=LINES)
    rlc("plot", *(tmp_path / n for n in ("x/a", "y/a", "b", "b")), "-o", tmp_path / "x.svg", "--metric", "reward")
    drawn = (tmp_path / "x.svg").read_text()
    assert f">{tmp_path}/x/a<" in drawn and f">{tmp_path}/y/a<" in drawn and drawn.count(">b<") == 1


def test_choice() -> None:
    found = {"a": LINES, "b": [{"step": 1, "actor/entropy": 1.0}]}
    assert drawing.choose(found, ()) == ("reward", "kl", "actor/loss", "length")
    assert drawing.choose(found, ("actor/*", "seconds", "actor/loss")) == ("actor/loss", "actor/entropy", "seconds")
    assert drawing.choose({"a": [{"step": 1, "solved": 1.0, "seconds": 2.0}]}, ()) == ("solved",)
    assert drawing.choose({"a": [{"step": 1, "seconds": 2.0}]}, ()) == ("seconds",)


def test_a_run_under_way(tmp_path: Path) -> None:
    """Its last line may be half there; numbers may be no numbers."""
    out = made(tmp_path / "a", "running", [*LINES, {"step": 4, "reward": float("nan"), "new": 1.0}])
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    assert rlc("plot", out, "--metric", "reward", "--metric", "new")[0] == 0


@pytest.mark.parametrize("pattern, help", [("rewrd", "did you mean reward?"), ("zzz*", "metrics of the runs: reward"),
                                           ("Actor/*", "actor/loss"), ("step", "")])
def test_unknown_metrics(tmp_path: Path, pattern: str, help: str) -> None:
    assert help in refused("RL0785", "plot", made(tmp_path / "a", lines=LINES), "--metric", pattern)


def test_no_such_run(tmp_path: Path) -> None:
    made(tmp_path / "grpo", lines=LINES)
    assert f"did you mean {tmp_path / 'grpo'}?" in refused("RL0783", "plot", tmp_path / "gpro")
    assert "rlc runs" in refused("RL0783", "plot", tmp_path / "nothing/there")
    assert f"runs in this directory: {tmp_path / 'grpo'}" in refused("RL0783", "plot", tmp_path)


@pytest.mark.parametrize("text, place", [
    ("", "metrics.jsonl"), ('{"step": 1', "metrics.jsonl"), ("nonsense\n", "metrics.jsonl:1"),
    ('{"step": 1}\n[1]\n', "metrics.jsonl:2"), ('{"reward": 1}\n', "metrics.jsonl:1"),
    ('{"step": 1, "r": "x"}\n', "metrics.jsonl:1"), ('{"step": 1, "r": true}\n', "metrics.jsonl:1")])
def test_metrics_that_cannot_be_read(tmp_path: Path, text: str, place: str) -> None:
    (made(tmp_path / "a") / "metrics.jsonl").write_text(text)
    assert place in refused("RL0784", "plot", tmp_path / "a")


def test_metrics_that_are_not_text(tmp_path: Path) -> None:
    (made(tmp_path / "a") / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    refused("RL0784", "plot", tmp_path / "a")


@pytest.mark.parametrize("name", ["x.gif", "x", "svg"])
def test_other_formats(tmp_path: Path, name: str) -> None:
    refused("RL0786", "plot", made(tmp_path / "a", lines=LINES), "-o", tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    refused("RL0094", "plot", made(tmp_path / "a", lines=LINES), "-o", tmp_path / "no/x.svg")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "rldsl[plot]" in refused("RL0782", "plot", made(tmp_path / "a", lines=LINES))
    assert not (tmp_path / "a/metrics.svg").exists()


# --------------------------------------------------------------------------------------------------------- runs


def test_the_list_of_runs(tmp_path: Path) -> None:
    made(tmp_path / "old", lines=LINES, started="2025-01-02T03:04:05+00:00")
    made(tmp_path / "deep/new", "running", lines=LINES[:2])
    made(tmp_path / "gone", "running", started="2024-01-01T00:00:00+00:00", pid=2 ** 22 + 1)
    (tmp_path / "other").mkdir()
    head, new, old, gone = (line.split() for line in rlc("runs", tmp_path)[1].splitlines())
    assert head == ["name", "program", "state", "step", "last", "started"]
    assert new == ["deep/new", "p.rlf", "running", "2/5", "reward", "0.2", "2026-01-02", "03:04"]
    assert old[:5] == ["old", "p.rlf", "finished", "3/5", "reward"]
    assert gone == ["gone", "p.rlf", "failed", "3/5", "2024-01-01", "00:00"]


def test_no_runs(tmp_path: Path) -> None:
    assert rlc("runs", tmp_path) == (0, f"no runs below {tmp_path}\n")
    refused("RL0783", "runs", tmp_path / "nothing")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"state"', '{"state": []}', "[" * 100_000, "\x00"])
def test_a_damaged_record_is_named_and_kept(tmp_path: Path, text: str) -> None:
    (made(tmp_path / "a") / "run.json").write_text(text)
    assert read_record(tmp_path / "a") == {"state": "damaged"}
    assert rlc("runs", tmp_path)[1].splitlines()[1].split() == ["a", "damaged", "0/?"]
    with pytest.raises(Failure, match=r"RL0781 .*run.json is damaged"):
        refuse_existing_run(tmp_path / "a")
    assert claim_output(tmp_path / "a", None, overwrite=True) == OutputClaim(None, False)


@pytest.mark.parametrize("name", ["program", "state", "step", "steps", "started", "host", "pid"])
@pytest.mark.parametrize("value", [None, [1], {"a": 1}, 2.5, "\x1b[2J"])
def test_a_record_with_wrong_types_is_damaged(tmp_path: Path, name: str, value: Any) -> None:
    out = made(tmp_path / "a", "running", LINES)
    (out / "run.json").write_text(json.dumps(json.loads((out / "run.json").read_text()) | {name: value}))
    found, listed = read_record(out), rlc("runs", tmp_path)
    assert found is not None and listed[0] == 0 and "\x1b" not in listed[1]
    assert found["state"] == "damaged" or isinstance(value, str) and name in ("program", "started", "host")


def test_damaged_metrics_do_not_hide_a_run(tmp_path: Path) -> None:
    (made(tmp_path / "a") / "metrics.jsonl").write_text("nonsense\n")
    assert "finished" in rlc("runs", tmp_path)[1]


# ---------------------------------------------------------------------------------------------------- overwriting


@pytest.mark.parametrize("state, said", [("finished", "a finished run"), ("running", "an active run")])
def test_a_run_is_not_overwritten(tmp_path: Path, state: str, said: str) -> None:
    (tmp_path / "p.rlf").write_text("flow f(steps=1, seed=1) {}\n")
    out = made(tmp_path / "a", state, LINES)
    text = refused("RL0781", "run", tmp_path / "p.rlf", "--out", out)
    assert said in text and "--overwrite" in text and "p.rlf, started 2026" in text
    assert (out / "metrics.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize("state, lines", [("failed", LINES), ("failed", ()), ("stopped", ())])
def test_a_run_that_came_to_nothing_may_be_begun_again(tmp_path: Path, state: str, lines: Any) -> None:
    refuse_existing_run(made(tmp_path / "a", state, lines))
    refuse_existing_run(tmp_path / "nothing")


@pytest.mark.parametrize("options, words", [
    (COMMAND_LINE, "use `--out` to choose another directory; use `--overwrite` to delete it"),
    (PYTHON, "use `out=` to choose another directory; use `overwrite=True` to delete it")])
def test_the_metrics_of_a_stopped_run_are_not_overwritten(tmp_path: Path, options: RunOptions, words: str) -> None:
    """A callback may have stopped it because it was good enough."""
    out = made(tmp_path / "a", "stopped", LINES)
    with pytest.raises(Failure, match="RL0781 this directory contains a run that was stopped") as error:
        claim_output(out, None, options=options)
    assert error.value.diagnostics[0].help == words
    assert claim_output(out, None, overwrite=True, options=options) == OutputClaim(None, False)
    checkpoint(out, 2)
    with pytest.raises(Failure) as error:
        claim_output(out, None, options=options)
    assert options.resume in error.value.diagnostics[0].help
    assert claim_output(out, out, options=options) == OutputClaim(out, True)


def test_checkpoints_are_not_overwritten(tmp_path: Path) -> None:
    out = made(tmp_path / "a", "failed")
    (out / "checkpoints/step-000001").mkdir(parents=True)
    refuse_existing_run(out)  # not whole
    checkpoint(out, 2)
    checkpoint(out, 10)
    with pytest.raises(Failure) as error:
        refuse_existing_run(out)
    assert str(error.value) == "RL0763 this directory contains checkpoints (p.rlf, step 10)"
    (out / "run.json").unlink()
    with pytest.raises(Failure, match=r"\(of an unknown program, step 10\)"):
        refuse_existing_run(out)


def test_who_may_write_in_a_directory(tmp_path: Path) -> None:
    out = made(tmp_path / "a", lines=LINES)
    for resume in (out, out / "checkpoints", out / "checkpoints/step-000001"):
        assert claim_output(out, resume) == OutputClaim(resume, True)
    for resume in (None, tmp_path / "b", out / "nested", out / "nested/checkpoints/step-000001"):
        with pytest.raises(Failure, match="RL0781"):
            claim_output(out, resume)
        assert claim_output(out, resume, overwrite=True) == OutputClaim(resume, False)
    assert (out / "run.json").exists()  # until the new run is sound
    going_on = made(tmp_path / "c", "running", LINES)
    with pytest.raises(Failure, match="RL0781"):
        claim_output(going_on, going_on)


def test_a_run_that_torchrun_starts_again_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    """Also one that began with those of another run."""
    out, other = made(tmp_path / "a"), tmp_path / "other"
    assert claim_output(out, None, again=True, overwrite=True) == OutputClaim(None, True)
    assert claim_output(out, other, again=True) == OutputClaim(other, True)
    checkpoint(out, 2)
    assert claim_output(out, None, again=True) == claim_output(out, other, again=True) == OutputClaim(out, True)


def test_overwriting_removes_a_run_and_nothing_else(tmp_path: Path) -> None:
    out = made(tmp_path / "a", lines=LINES)
    (out / "step-3/actor").mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/kept").write_text("")
    (out / "checkpoints").symlink_to(tmp_path / "elsewhere")
    checkpoint(out, 7)
    (out / "checkpoints/.step-000008.0123.partial").mkdir()
    (out / "failed-batch-step-4").mkdir()
    (out / "failed-batch-step-4/rank-00000.safetensors").write_text("")
    (out / "log").mkdir()
    for name in ("rank-0.log", "rank-1.log", "rank-2.log", "rank-11.log", "rank-x.log", "mine.log"):
        (out / "log" / name).write_text("")
    remove_earlier_run(out, world=2)
    assert sorted(p.name for p in out.iterdir()) == ["checkpoints", "log", "notes.txt", "step-3"]
    assert [p.name for p in (tmp_path / "elsewhere").iterdir()] == ["kept"]
    assert sorted(p.name for p in (out / "log").iterdir()) == ["mine.log", "rank-0.log", "rank-1.log", "rank-x.log"]


def test_overwriting_where_no_run_was_removes_nothing(tmp_path: Path) -> None:
    """`--out .` in a project."""
    for name in ("sources", "samples", "checkpoints/best", "log"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    remove_earlier_run(tmp_path, world=1)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("options", [("--resume", "--overwrite"), ("--wandb", "sometimes"), ("--log-samples", "-1"),
                                     ("--log-samples", "many")])
def test_options_that_make_no_sense(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "p.rlf").write_text("flow f(steps=1, seed=1) {}\n")
    assert rlc("run", tmp_path / "p.rlf", "--out", tmp_path / "o", *options)[0] == 2
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("resume", ["", "o", "o/checkpoints/step-000001"])
def test_to_go_on_and_to_remove_is_a_contradiction(tmp_path: Path, resume: str,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """For both commands, where the checkpoint lies in the directory that would be cleared."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.rlf").write_text("flow f(steps=1, seed=1) {}\n")
    option = f"--resume={resume}" if resume else "--resume"
    status, text = rlc("run", "p.rlf", "--out", "o", option, "--overwrite")
    assert status == 2 and CONTRADICTION in text
    monkeypatch.setattr(sys, "argv", ["rldsl.run", "p.plan", "--out", "o", option, "--overwrite"])
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 2 and CONTRADICTION in said.getvalue() and not (tmp_path / "o").exists()


def test_resume_may_have_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before FILE too: a program is none."""
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[str, str | None]] = []

    def run(file: str, *more: object, quiet: bool) -> running.EndedRun:
        seen.append((file, cast("str | None", more[6])))
        return running.EndedRun(0, "runs/p", "finished", 1)

    monkeypatch.setattr(running, "run", run)
    for given in (["p.rlf"], ["p.rlf", "--resume"], ["--resume", "p.rlf"], ["p.rlf", "--resume", "x"],
                  ["--resume", "x", "p.rlf"], ["p.rlf", "--resume", "--plain"]):
        assert rlc("run", *given)[0] == 0
    assert seen == [("p.rlf", x) for x in (None, "", "", "x", "x", "")]
    for given in ([], ["--resume"]):
        status, text = rlc("run", *given)
        assert status == 2 and "FILE is missing" in text


@pytest.mark.parametrize("command", ["check p.rlf", "runs ."])
def test_other_commands_stay_light(tmp_path: Path, command: str) -> None:
    (tmp_path / "p.rlf").write_text("flow f(steps=1, seed=1) {}\n")
    code = ("import sys\nfrom rldsl.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
            "print([m for m in ('torch', 'rich', 'matplotlib', 'wandb', 'tensorboard') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code, *command.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not say when a process began")
def test_a_process_with_the_number_of_another_is_another(tmp_path: Path) -> None:
    """In a container that starts again, the first process has the number that the first one had."""
    out = made(tmp_path / "a", state="running", born="1")
    found = read_record(out)
    assert found is not None and found["state"] == "failed"
    refuse_existing_run(out)
    born = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    with pytest.raises(Failure, match="active run"):
        refuse_existing_run(made(tmp_path / "b", state="running", born=born))
