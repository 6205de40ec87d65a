"""Mistakes at the command line: an exit status, one message with its code and place, and no traceback.

The wrong number of processes, a plan edited by hand, a bad line of data, a checkpoint that cannot be written and a
killed rank are in tests/runtime/test_failure.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rldsl import api
from rldsl.plan.codec import encode
from tests.forked import command
from tests.tiny import make_model, make_sums, write_jsonl

PROGRAM = """use py "rewards.py" (good: g -> seq)
use std.ppo (kl_rewards)
cluster nodes=1 gpus=1
data prompts = jsonl("sums.jsonl", batch=4)
model actor = causal_lm("model")
flow f(steps=1, seed=1) {
  p = prompts.next()
  g = actor.generate(p, max_new_tokens=3) on mesh(0:1)
  r = good(g)
  metric r = mean(r)
}
"""
CALL = "actor.generate(p, max_new_tokens=3) on mesh(0:1)"
REWARD = "def good(rows):\n    return [1.0 for _ in rows]\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bad") / "model")


@pytest.fixture
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    for file in model.iterdir():
        Path("model", file.name).symlink_to(file)
    write_jsonl(Path("sums.jsonl"), make_sums(8))
    Path("rewards.py").write_text(REWARD)
    Path("p.rlf").write_text(PROGRAM)
    return tmp_path


def message(module: str, *arguments: str, code: int = 1) -> str:
    """What a command that must fail says on stderr."""
    done = command(module, *arguments)
    text = done.stderr + done.stdout
    assert done.returncode == code, text
    assert "Traceback" not in text, text
    assert text.count("error[") == 1 and "internal error" not in text, text
    return text


def says(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, f"{part!r} is not in\n{text}"


# replaced text, its replacement, then code, place and a part of the message
PROGRAMS = {
    "syntax": ("r = mean(r)", "r = mean(r", "RL0005", "p.rlf:10:18", "unclosed"),
    "unknown_name": ("mean(r)", "mean(rr)", "RL0101", "p.rlf:10:19", "did you mean `r`?"),
    "unknown_call": ("actor.generate", "actor.generat", "RL0112", "p.rlf:8:13", "`generate`"),
    "wrong_level": ("mean(r)", "mean(next(r))", "RL0201", "p.rlf:10:", "at_end"),
    "built_in_name": ("cluster nodes", "param clip = 1\ncluster nodes", "RL0111", "p.rlf:3:7", "built in"),
    "degrees": (CALL, CALL + " dp=2 tp=2", "RL0304", "p.rlf:8:", "do not fill"),
    "beyond": (CALL, CALL.replace("0:1", "0:16") + " dp=16", "RL0305", "p.rlf:8:", "beyond the cluster"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_rlc_check(place: Path, name: str) -> None:
    old, new, *parts = PROGRAMS[name]
    assert PROGRAM.count(old) == 1
    Path("p.rlf").write_text(PROGRAM.replace(old, new))
    says(message("rldsl.cli", "check", "p.rlf"), *parts)


def test_a_missing_program(place: Path) -> None:
    says(message("rldsl.cli", "check", "q.rlf"), "RL0091", "q.rlf")


def test_tp_that_does_not_divide_the_heads(place: Path) -> None:
    Path("p.rlf").write_text(PROGRAM.replace("gpus=1", "gpus=8").replace(CALL, CALL.replace("0:1", "0:8") + " tp=8"))
    says(message("rldsl.cli", "compile", "p.rlf"), "RL0307", "p.rlf:8:", "tp does not divide the attention heads")
    assert not Path("p.plan").exists()


def test_a_missing_model(place: Path) -> None:
    Path("p.rlf").write_text(PROGRAM.replace('causal_lm("model")', 'causal_lm("mode")'))
    says(message("rldsl.cli", "compile", "p.rlf"), "RL03", "p.rlf:5:", "mode")


def _no_tokenizer() -> None:
    for file in Path("model").iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()


def _columns() -> None:
    write_jsonl(Path("sums.jsonl"), [{"promt": "1+1="} if i == 2 else {"prompt": "1+1="} for i in range(8)])


RUNS = {
    "no_tokenizer": (_no_tokenizer, "RL0751", "--> model", "no tokenizer"),
    "no_data": (lambda: Path("sums.jsonl").unlink(), "RL0741", "--> sums.jsonl", "no such data file"),
    "no_column": (_columns, "RL0746", "--> sums.jsonl:3", "did you mean `promt`?"),
    "no_rows": (lambda: Path("sums.jsonl").write_text(""), "RL0742", "--> sums.jsonl", "empty"),
    "metrics": (lambda: Path("out/metrics.jsonl").mkdir(parents=True), "RL0708", "--> out/metrics.jsonl", "directory"),
    "reward_changed": (lambda: Path("rewards.py").write_text(REWARD + "\n"), "RL0772", "--> rewards.py", "compile"),
}


@pytest.mark.parametrize("name", RUNS)
def test_one_rank_of_a_plan(place: Path, name: str) -> None:
    """Compiled when all was well; found before the first step."""
    Path("p.plan").write_bytes(encode(api.compile("p.rlf")))
    spoil, *parts = RUNS[name]
    spoil()
    says(message("rldsl.run", "p.plan", "--out", "out", "--device", "cpu"), *parts)
    assert not Path("out/metrics.jsonl").is_file()


def test_a_plan_that_is_not_there(place: Path) -> None:
    says(message("rldsl.run", "q.plan"), "RL0700", "q.plan")


def test_a_timeline_that_cannot_be_written(place: Path) -> None:
    Path("blocked").write_text("a file, not a directory")
    says(message("rldsl.cli", "run", "p.rlf", "--trace", "blocked/trace.json"), "RL0708", "--> blocked/trace.json")


def test_a_reward_that_raises(place: Path) -> None:
    Path("rewards.py").write_text("def good(rows):\n    return [1 / 0 for _ in rows]\n")
    says(message("rldsl.cli", "run", "p.rlf"), "RL0775", "--> rewards.py:2", "ZeroDivisionError")


def test_a_reward_with_too_few_values(place: Path) -> None:
    Path("rewards.py").write_text("def good(rows):\n    return [1.0]\n")
    says(message("rldsl.cli", "run", "p.rlf"), "RL0776", "--> rewards.py", "returned 1 values for 2 rows")


def test_the_wrong_number_of_processes(place: Path) -> None:
    says(message("rldsl.cli", "run", "p.rlf", "--nproc", "2"), "RL0096", "p.rlf", "the plan is for 1 rank, not 2")


def test_no_gpu(place: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    Path("p.plan").write_bytes(encode(api.compile("p.rlf")))
    says(message("rldsl.run", "p.plan", "--device", "cuda"), "RL0703", "--> --device cuda", "none")


def test_a_trace_and_a_summary_of_a_run(place: Path) -> None:
    """The page around the mistakes is right; an earlier run's metrics do not stay."""
    Path("out").mkdir()
    Path("out/metrics.jsonl").write_text("of an earlier run\n")
    done = command("rldsl.cli", "run", "p.rlf", "--out", "out", "--trace", "t/t.json")
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("out/metrics.jsonl").read_text())["r"] == 1.0
    assert any(s["name"] == "actor.generate" for s in json.loads(Path("t/t.json").read_text())["traceEvents"])


def test_resume_before_the_plan_names_no_directory(place: Path) -> None:
    """`--resume p.plan` goes on with this plan; there is nothing yet to go on from."""
    Path("p.plan").write_bytes(encode(api.compile("p.rlf")))
    before, after = (message("rldsl.run", *line) for line in (("--resume", "p.plan"), ("p.plan", "--resume")))
    assert before == after and "no checkpoint" in before
    done = command("rldsl.run", "--resume")
    assert done.returncode == 2 and "pass the plan to run" in done.stderr
