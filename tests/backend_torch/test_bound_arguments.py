"""Wrong options of `benchmarks/bound.py` are named before anything is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bound_arguments import parse, shapes_of
from benchmarks.bound_shapes import Shape, drawn
from tests.tiny import make_model

WRONG = {
    "--turns 0": "argument --turns: 0 is less than 1",
    "--turns x": "argument --turns: invalid whole number value: 'x'",
    "--shapes -1": "argument --shapes: -1 is less than 1",
    "--only 10": "--only: shapes are numbered 0 to 9",
    "--only -1": "argument --only: -1 is less than 0",
    "--only": "argument --only: expected at least one argument",
    "--ranks 1": "argument --ranks: 1 is less than 2",
    "--ranks 100000": "--ranks: 100000 ranks need as many cores, and this process has",
    "--peer /no/python": "--peer is for whole steps: give --step, too",
    "--step --peer /no/python": "/no/python does not run",
    "--step --peer /bin/false": "/bin/false is no Python interpreter",
    "--step --peer {python}": "has no trl",
    "--model /no/model": "'/no/model' is no model directory: it has no config.json",
    "--model {empty}": "'' is no model directory",
    "--model {model} --only 0": "--only chooses from shapes that are drawn",
    "--model {model} --prompts 0": "argument --prompts: 0 is less than 1",
    "--model {model} --n 0": "argument --n: 0 is less than 1",
    "--model {model} --tokens -3": "argument --tokens: -3 is less than 1",
    "--model {model} --prompt 100000": "--prompt and --tokens: sequences of 100064 tokens, and the model has 64 positions",
    "--model {broken}": "--model: ",
    "--model {model} --prompts 1 --prompt 8 --tokens 8 --ranks 2": "--ranks: 2 ranks divide 1 prompts, so one has none",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("m") / "m", "llama", max_position_embeddings=64))


@pytest.mark.parametrize("typed", WRONG)
def test_wrong_options_are_named(typed: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    (tmp_path / "config.json").write_text("{")
    words = {"{python}": sys.executable, "{empty}": "", "{model}": model, "{broken}": str(tmp_path)}
    with pytest.raises(SystemExit) as ended:
        parse("", [words.get(word, word) for word in typed.split()])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and WRONG[typed] in said and "Traceback" not in said, said


def test_shapes_are_those_that_were_asked_for(model: str) -> None:
    every = drawn(3, 4)
    assert shapes_of(parse("", ["--seed", "3", "--shapes", "4"])) == dict(enumerate(every))
    assert shapes_of(parse("", ["--seed", "3", "--shapes", "4", "--only", "2", "0"])) == {2: every[2], 0: every[0]}
    assert shapes_of(parse("", ["--model", model, "--tokens", "9", "--n", "2"])) == {0: Shape({}, 8, 2, 32, 9)}


COMMAND = """
import runpy, sys
sys.argv = ["bound", *sys.argv[1:]]
try:
    runpy.run_module("benchmarks.bound", run_name="__main__")
except SystemExit as stop:
    print("status", stop.code, *sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""


@pytest.mark.parametrize("typed, status, stream, says", [
    ("--help", 0, "stdout", "--ranks N: whole GRPO steps on N ranks"), ("--turns 0", 2, "stderr", "0 is less than 1"),
    ("--no-such-option", 2, "stderr", "unrecognized arguments"), ("--only 10", 2, "stderr", "numbered 0 to 9"),
    ("--model /no/model", 2, "stderr", "is no model directory")])
def test_no_library_is_imported_for_help_and_wrong_options(typed: str, status: int, stream: str, says: str) -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND, *typed.split()], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines()[-1] == f"status {status}", done.stdout
    assert says in getattr(done, stream), done
