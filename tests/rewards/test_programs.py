"""Programs with Python functions: shipped files, the same run for any ranks and workers, messages of whole runs."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from rldsl import api
from tests.end_to_end.programs import compile_program
from tests.forked import command
from tests.rewards.functions import gone, noted
from tests.tiny import make_model, make_sums, write_jsonl
from tests.world import run_world

PROGRAM = """use py "std/rewards.py" (math_equal: gen -> seq, exact_match: gen -> seq)
use py "own.py" (length: gen -> seq, size: prompt -> prompt)
data sums = jsonl("sums.jsonl", batch=6)
model actor = causal_lm("model")
flow f(steps=2, seed=1) {
  p = sums.next()
  g = actor.generate(p, n=4, max_new_tokens=5, temperature=2.0)
  a = math_equal(g) + 2 * exact_match(g)
  b = length(g)
  metric right = mean(a)
  metric size  = mean(size(p))
  metric long  = mean(b)
  metric most  = mean(b * b)
}
"""
OWN = """import os
open(f"{os.path.dirname(os.path.abspath(__file__))}/pids/{os.getpid()}", "w").close()

def length(rows):
    return [len(r["completion"]) + int(r["answer"]) for r in rows]

def size(rows):
    return [len(r["prompt"]) for r in rows]
"""
PLACES = {1: "cluster nodes=1 gpus=1\nplace actor.* on mesh(0:1)\n",
          2: "cluster nodes=1 gpus=2\nplace actor.* on mesh(0:2) dp=2\n",
          4: "cluster nodes=1 gpus=4\nplace actor.* on mesh(0:4) dp=4\n"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("rewards") / "model", num_hidden_layers=2)


@pytest.fixture
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(model)
    Path("pids").mkdir()
    write_jsonl(Path("sums.jsonl"), make_sums(12))
    Path("own.py").write_text(OWN)
    Path("p.rlf").write_text(PROGRAM)
    return tmp_path


def _rank(rank: int, plan: bytes, out: str, workers: int, cwd: str) -> None:
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(cwd)
    execute(PlanFile.from_bytes(plan, "test.plan"), out, options=Options(reward_workers=workers))


@pytest.mark.thorough
def test_the_same_run_for_any_ranks_and_workers(place: Path) -> None:
    found = {}
    for ranks, rules in PLACES.items():
        plan = compile_program(Path("p.rlf"), {}, rules, place)
        for workers in (0, 1, 3):
            run_world(ranks, _rank, plan, str(place / f"{ranks}-{workers}"), workers, str(place))
            lines = (place / f"{ranks}-{workers}/metrics.jsonl").read_text().splitlines()
            found[ranks, workers] = [[json.loads(x)[k] for k in ("right", "size", "long", "most")] for x in lines]
    assert len(found[1, 0]) == 2 and all(f == found[1, 0] for f in found.values())
    assert gone(noted(place / "pids"))


def rlc(*arguments: str, code: int = 0) -> str:
    done = command("rldsl.cli", *arguments)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def test_the_command_line(place: Path) -> None:
    Path("own.py").write_text(OWN + "\nprint('here')\n")
    said = rlc("run", "p.rlf", "--reward-workers", "2", "--reward-timeout", "20", "--out", "out")
    assert "rank 0 worker 0 | here" in said and "rank 0 worker 1 | here" in said
    assert len(noted(place / "pids")) == 2 and gone(noted(place / "pids"))


@pytest.mark.thorough
@pytest.mark.parametrize("body, parts", [
    ("length = lambda rows: [1] * len(rows)\n"
     "def length(rows):\n    return [1 / int(r['prompt'] != first) for r in rows]\n",
     ("RL0775", "--> own.py:11", "ZeroDivisionError", "(sums.jsonl:")),
    ("def length(rows):\n    os._exit(1)\n", ("RL0778", "--> own.py", "exit status 1", "(sums.jsonl:")),
    ("1 / 0\n", ("RL0773", "--> own.py:9", "ZeroDivisionError")),
], ids=["raises", "leaves", "import"])
def test_one_message_and_nothing_left(place: Path, body: str, parts: tuple[str, ...]) -> None:
    first = json.loads(Path("sums.jsonl").read_text().splitlines()[0])["prompt"]
    Path("own.py").write_text(OWN + body.replace("first", repr(first)))
    said = rlc("run", "p.rlf", "--reward-timeout", "0.5", "--reward-workers", "2", code=1)
    assert said.count("error[") == 1 and all(part in said for part in parts), said
    assert gone(noted(place / "pids"))


@pytest.mark.parametrize("arguments", [("--reward-workers", "-1"), ("--reward-workers", "x"), ("--reward-timeout", "0"),
                                       ("--reward-timeout", "x")])
@pytest.mark.parametrize("line", ["rldsl.cli run p.rlf", "rldsl.run p.plan"])
def test_options_that_make_no_sense(place: Path, line: str, arguments: tuple[str, str]) -> None:
    done = command(*line.split(), *arguments)
    assert done.returncode == 2 and arguments[0] in done.stderr and "Traceback" not in done.stderr


# the compiler

SHORT = 'use py "{}" ({}: g -> seq)\ndata d = jsonl("sums.jsonl", batch=2)\nmodel a = causal_lm("model")\n' \
        'flow f(steps=1) {{\n  p = d.next()\n  g = a.generate(p)\n  metric m = mean({}(g))\n}}\n'


def functions(path: str, name: str) -> list:
    return list(api.build_graph(api.decode("p.rlf", SHORT.format(path, name, name).encode())).functions)


def test_a_shipped_file_is_recorded_with_its_hash(place: Path) -> None:
    from rldsl.runtime.rewards.user_functions import call, function_path

    (found,) = functions("std/rewards.py", "exact_match")
    assert found.path == "std/rewards.py"
    assert found.sha256 == hashlib.sha256(function_path(found.path).read_bytes()).hexdigest()
    assert call(found, [{"completion": "a", "answer": "a"}]) == [1.0]


def test_a_directory_named_std_is_the_users_own(place: Path) -> None:
    from rldsl.runtime.rewards.user_functions import call

    Path("std").mkdir()
    Path("std/rewards.py").write_text("def mine(rows):\n    return [7] * len(rows)\n")
    (found,) = functions("./std/rewards.py", "mine")
    assert found.path == "./std/rewards.py" and call(found, [{}]) == [7]


@pytest.mark.parametrize("path, name, words", [
    ("std/reward.py", "exact_match", "did you mean `std/rewards.py`?"), ("std/rewards.py", "exact_mach", "exact_match"),
    ("std/formulas.py", "read", "std/rewards.py"), ("std/../std/rewards.py", "exact_match", "std/rewards.py"),
    ("std/", "exact_match", "std/rewards.py"),
])
def test_no_such_shipped_function(place: Path, path: str, name: str, words: str) -> None:
    (found,) = api.check(SHORT.format(path, name, name), "p.rlf")
    assert found.code == "RL0110" and words in found.help
