"""A disk that is full, or that may not be written: a message, earlier checkpoints whole, no hang."""

from __future__ import annotations

import json
import os
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import lines, run, steps
from tests.cpu import children
from tests.end_to_end.programs import compile_program
from tests.forked import start
from tests.tiny import make_all
from tests.world import run_world

SMALL = Path(__file__).parents[1] / "checkpoint/small.rlf"
PLACE = "cluster nodes=1 gpus=2\nplace actor.* on mesh(0:2) tp=2\nplace slow.* on mesh(0:2) dp=2\n"
SAVES = """
use std.sft (sft)
data sums = jsonl("{rows}", batch=4)
model actor = causal_lm("{base}") train adamw(lr=1e-4)
flow tuning(steps=3) {{
  batch = sums.next()
  actor.train(batch, loss=sft()) on mesh(0:2) tp=2
  every 1 {{ save actor to "{to}" }}
}}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


def limited(rank: int, plan: bytes, out: str, most: int, after: int) -> str:
    """A run in which files of more than `most` bytes cannot be written from step `after` on."""
    from rldsl.diag import Failure
    from rldsl.runtime.interpreter import interpreter, metric_log
    from rldsl.runtime.plan_file import PlanFile

    ordinary = metric_log.end_step

    def end_step(step, reporter):  # the last thing of a step
        ordinary(step, reporter)
        if step.number >= after:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    interpreter.end_step = end_step
    if after == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        interpreter.execute(PlanFile.from_bytes(plan, "test.plan"), out)
    except Failure as failure:
        return " ".join(f"{d.code} {d.title}" for d in failure.diagnostics) or "another rank"
    return ""


@pytest.mark.thorough
def test_a_full_disk_under_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    data = compile_program(SMALL, sets, PLACE, tmp_path)
    said = run_world(2, limited, data, str(tmp_path), 100_000, 2)
    assert any("RL0706" in text and "large" in text.lower() for text in said), said
    whole = steps(tmp_path)
    assert whole and all(name.startswith("step-") for name in whole if not name.startswith("."))
    assert set(run(data, tmp_path, resume=tmp_path)) == {""}  # with space again it goes on from a whole one
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


def saving(tiny: Path, folder: Path, to: Path) -> bytes:
    program = folder / "p.rlf"
    program.write_text(SAVES.format(rows=tiny / "data/answers.jsonl", base=tiny / "models/sft", to=to))
    return compile_program(program, {}, None, folder)


def test_a_full_disk_under_a_save(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    to = Path("saved")
    said = run_world(2, limited, saving(tiny, tmp_path, to), str(tmp_path / "out"), 30_000, 1)
    assert any("RL0706" in text for text in said), said
    assert json.loads((tmp_path / to / "config.json").read_text())["model_type"]  # of step 1, whole
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / to)


@pytest.mark.parametrize("what", ["checkpoints", "out"])
def test_a_place_that_cannot_be_written(tiny: Path, tmp_path: Path, what: str) -> None:
    """A file stands where a directory must be: refused like a read-only directory, also to the superuser."""
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    data = compile_program(SMALL, sets, PLACE, tmp_path)
    out = tmp_path / "out"
    (tmp_path if what == "out" else out).mkdir(exist_ok=True)
    (out if what == "out" else out / "checkpoints").write_text("a file")
    codes = set(run(data, out))
    assert codes & {"RL0705", "RL0706"} and codes <= {"RL0705", "RL0706", "another rank"}


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_read_only_directory(tiny: Path, tmp_path: Path) -> None:
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    data = compile_program(SMALL, sets, PLACE, tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o500)
    codes = set(run(data, tmp_path / "out"))
    assert codes <= {"RL0705", "RL0706", "RL0708", "another rank"} and codes != {"another rank"}


CHECKPOINTS = """
use std.sft (sft)
cluster nodes=1 gpus=2
data sums = jsonl("data/answers.jsonl", batch=4)
model actor = causal_lm("models/sft") train adamw(lr=1e-4)
flow tuning(steps=20, seed=1) {
  batch = sums.next()
  actor.train(batch, loss=sft())
  checkpoint every 1 keep=2
}
"""


def rlc_run(folder: Path, said: str, *more: str) -> Any:
    """`rlc run`, just begun: a process that is forked, as its ranks are. said: file of what they all say."""
    file = str(folder / said)
    return start("rldsl.cli", "run", "p.rlf", "--out", "out", *more, files=(os.devnull, file, file))


@pytest.mark.thorough
def test_the_command_on_a_disk_that_fills_during_the_run(tiny: Path, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a checkpoint is written, the ranks can write only small files: `rlc run` says so, and resumes later."""
    monkeypatch.chdir(tmp_path)
    for name in ("models", "data"):
        (tmp_path / name).symlink_to(tiny / name)
    (tmp_path / "p.rlf").write_text(CHECKPOINTS)
    out = tmp_path / "out"
    process = rlc_run(tmp_path, "first")
    while process.is_alive() and not list(out.glob("checkpoints/step-*/checkpoint.json")):
        time.sleep(0.01)
    for rank in descendants(process.pid):
        with suppress(ProcessLookupError):
            resource.prlimit(rank, resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    process.join(120)
    text = (tmp_path / "first").read_text()
    assert process.exitcode == 1 and "error[RL0706]: the checkpoint cannot be written" in text, text
    assert "Traceback" not in text and "earlier checkpoints are intact" in text
    made = len(lines(out))
    assert 1 <= made < 20
    again = rlc_run(tmp_path, "second", "--resume")
    again.join(120)
    text = (tmp_path / "second").read_text()
    assert again.exitcode == 0 and "Traceback" not in text, text
    assert [line["step"] for line in lines(out)] == list(range(1, 21))


@pytest.mark.thorough
def test_the_command_in_a_directory_that_can_no_longer_be_written(tiny: Path, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """One message, which does not send the user to dumps that could not be written either; what was written stays. A
    file takes the place of the directory: it is refused like a read-only one, also to the superuser."""
    monkeypatch.chdir(tmp_path)
    for name in ("models", "data"):
        (tmp_path / name).symlink_to(tiny / name)
    (tmp_path / "p.rlf").write_text(CHECKPOINTS)
    out, aside = tmp_path / "out", tmp_path / "aside"
    process = rlc_run(tmp_path, "said")
    while process.is_alive() and not (out / "metrics.jsonl").exists():
        time.sleep(0.01)
    out.rename(aside)
    out.write_text("")
    process.join(120)
    text = (tmp_path / "said").read_text()
    assert process.exitcode == 1 and text.count("error[") == 1 and "Traceback" not in text, text
    assert ("error[RL0708]" in text or "error[RL0706]" in text) and "all ranks stopped" in text
    assert "postmortem" not in text, text
    made = [line["step"] for line in lines(aside)]
    assert made == [*range(1, len(made) + 1)] and made


def descendants(process: int) -> list[int]:
    own = children(process)
    return [*own, *(d for child in own for d in descendants(child))]
