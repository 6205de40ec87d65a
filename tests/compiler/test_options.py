"""Options of `rlc` that all commands share, that are refused where they would be ignored, and `rlc run` before it
starts anything."""

from __future__ import annotations

import ast
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner, Result

from rldsl import api
from rldsl.cli import main
from rldsl.cli.usage import GROUPS, KNOWN_AS
from rldsl.commands import run as running
from rldsl.output_format import json_requested
from rldsl.plan.codec import encode
from rldsl.plan.events import Loop
from rldsl.report import colored
from tests.plan.sample import grpo
from tests.report.runs import make_run
from tests.tiny import make_model

PROGRAM = """param steps = 2
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=8)
model actor = causal_lm("models/sft")
flow generate(steps=steps, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=4)
  metric logprob = mean(gen.logprobs)
}
"""

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.rlf").write_text(PROGRAM)
    (tmp_path / "a.plan").write_bytes(encode(grpo()))
    return tmp_path


def rlc(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def usage(*arguments: str) -> str:
    found = rlc(*arguments)
    assert found.exit_code == 2 and "Traceback" not in found.output, found.output
    return found.output


ASKED = {"check": ["no.rlf"], "compile": ["no.rlf"], "graph": ["no.rlf"], "run": ["no.rlf"], "show": ["no.plan"],
         "verify": ["no.plan"], "diff": ["no.plan", "no.plan"], "diff-runs": ["no", "no"],
         "emit": ["no.plan", "--rank", "0"], "report": ["no.plan"],
         "runs": ["nothing"], "plot": ["nothing"], "postmortem": ["nothing"], "push": ["nothing", "me/x"], "fmt": ["no.rlf"],
         "sim": ["no.plan", "--cluster", "h100x8"], "profile": ["no.rlf"],
         "search": ["no.rlf", "--cluster", "h100x8"], "explain-placement": ["no.rlf", "--cluster", "h100x8"]}


# commands that find nothing wrong in anything but their command line
WITHOUT_INPUT = {"lsp", "doctor", "completion", "new", "explain"}


def test_no_command_is_missing_here() -> None:
    """Who adds a command adds it to `ASKED` and to `RESULTS`."""
    assert set(main.commands) == ASKED.keys() | WITHOUT_INPUT == RESULTS.keys() | ELSEWHERE.keys() | {"lsp"}
    assert not ASKED.keys() & WITHOUT_INPUT and not RESULTS.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("name", main.commands)
def test_each_command_takes_the_option(name: str) -> None:
    """Of help and of a wrong command line, all commands print the same two shapes, each an object and no more."""
    for given in (["--json", name], [name, "--json"], [name, "--output-format", "json"]):
        [error] = json.loads(rlc(*given, "--no-such-option").stdout)["diagnostics"]
        assert error.keys() == {"code", "severity", "title", "place", "label", "span", "labels", "notes", "help", "fix"}
        assert error["code"] == "RL0099" and error["place"] == f"rlc {name}"
        assert json.loads(rlc(*given, "--help").stdout).keys() == {"format", "help"}


@pytest.mark.parametrize("name", ASKED)
def test_each_command_says_its_errors_as_json(name: str) -> None:
    for given in (["--json", name, *ASKED[name]], [name, *ASKED[name], "--json"],
                  ["--output-format", "json", name, *ASKED[name]], [name, "--output-format=json", *ASKED[name]],
                  ["--output", "json", name, *ASKED[name]]):  # the earlier name
        found = rlc(*given)
        assert found.exit_code in (1, 2), found.output
        (first, *_) = json.loads(found.stdout)["diagnostics"]
        assert first["code"].startswith("RL0")


RESULTS: dict[str, tuple[list[str], set[str]]] = {
    "check": (["p.rlf"], {"diagnostics"}), "graph": (["p.rlf"], {"form", "picture"}),
    "show": (["a.plan"], {"plan"}), "verify": (["a.plan"], {"plan", "id", "events", "checks"}),
    "diff": (["a.plan", "a.plan"], {"same"}), "emit": (["a.plan", "--rank", "0"], {"program"}),
    "report": (["a.plan", "-o", "a.html"], {"wrote"}), "runs": (["."], {"runs"}),
    "fmt": (["p.rlf", "--check"], {"files"}), "sim": (["a.plan", "--cluster", "h100x8"], {"seconds"}),
    "new": ([], {"starters"}), "explain": (["RL0304"], {"code", "title", "text"}),
    "compile": (["p.rlf", "--emit", "graph"], {"stage", "text"}), "completion": (["fish"], {"shell", "script"}),
    "diff-runs": (["one", "two"], {"same", "numbers"}), "plot": (["one", "-o", "a.svg"], {"wrote", "metrics"})}
# commands whose results are tested where what they need is made. `lsp` has none: it speaks the protocol of editors
ELSEWHERE = {
    "run": ("tests/runtime/test_failure.py", "test_a_run_for_programs_prints_one_object"),
    "push": ("tests/hub/test_push.py", "test_what_arrives"),
    "postmortem": ("tests/postmortem/test_command.py", "test_for_programs"),
    "doctor": ("tests/compiler/test_doctor.py", "test_versions_are_those_installed"),
    "profile": ("tests/simulate/test_profile.py", "test_the_result_as_json"),
    "search": ("tests/compiler/test_options.py", "test_a_search_prints_its_result_as_json"),
    "explain-placement": ("tests/compiler/test_options.py", "test_a_search_prints_its_result_as_json")}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_results_of_other_commands_are_tested(name: str) -> None:
    file, function = ELSEWHERE[name]
    [found] = [node for node in ast.parse((ROOT / file).read_text()).body
               if isinstance(node, ast.FunctionDef) and node.name == function]
    assert "--json" in ast.unparse(found)


@pytest.mark.parametrize("name", RESULTS)
def test_each_command_prints_its_result_as_json(name: str) -> None:
    """One object, and nothing else, on standard output."""
    arguments, keys = RESULTS[name]
    for run in {"one", "two"} & {*arguments}:
        make_run(Path(run))
    for given in ([name, *arguments, "--json"], ["--json", name, *arguments]):
        found = rlc(*given)
        assert found.exit_code in (0, 1), found.output
        held = json.loads(found.stdout)
        assert held["format"] >= 1 and keys <= held.keys(), held.keys()


@pytest.mark.parametrize("name", ["search", "explain-placement"])
def test_a_search_prints_its_result_as_json(name: str, work: Path) -> None:
    make_model(work / "models/sft")
    found = rlc(name, "p.rlf", "--cluster", "h100x8", "--json", *(["-o", "p.place.rlf"] if name == "search" else []))
    assert found.exit_code == 0, found.output
    assert {"seconds", "bound"} & json.loads(found.stdout).keys()


def test_numbers_that_json_does_not_have_are_null(work: Path) -> None:
    (work / "runs/a").mkdir(parents=True)
    record = {"state": "finished", "program": "p.rlf", "step": 2, "steps": 2, "params": {"x": math.inf, "y": [math.nan]}}
    (work / "runs/a/run.json").write_text(json.dumps(record))

    def refused(number: str) -> NoReturn:
        raise AssertionError(f"{number} is not JSON")

    [run] = json.loads(rlc("runs", "--json").stdout, parse_constant=refused)["runs"]
    assert run["params"] == {"x": None, "y": [None]} and run["state"] == "finished"


def test_an_internal_error_is_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> NoReturn:
        raise KeyError("gone")

    monkeypatch.setattr("rldsl.commands.show.show", broken)
    found = rlc("show", "a.plan", "--json")
    [error] = json.loads(found.stdout)["diagnostics"]
    assert found.exit_code == 3 and error["code"] == "RL0699" and "KeyError" in error["title"]
    assert "Traceback" not in found.output
    assert "Traceback" in rlc("-v", "show", "a.plan", "--json").stderr


@pytest.mark.parametrize("arguments", [["show"], ["show", "a.plan", "--event"], ["explain", "RL9999"], ["nonsense"],
                                       ["compile", "p.rlf", "--emit", "graph", "-o", "x"]])
def test_a_wrong_command_line_is_one_object_too(arguments: list[str]) -> None:
    assert not rlc(*arguments).stdout  # as text, it is on standard error
    for given in (["--json", *arguments], [*arguments, "--output-format=json"]):
        found = rlc(*given)
        [error] = json.loads(found.stdout)["diagnostics"]
        assert found.exit_code == 2 and not found.stderr, found.output
        assert error["code"] == "RL0099" and error["title"] and error["place"].startswith("rlc"), error


@pytest.mark.parametrize("arguments, place, title", [
    ([], "rlc", "Missing command"), (["run", "--jsn"], "rlc run", "No such option '--jsn'"),
    (["run", "p.rlf", "--nproc", "0"], "rlc run", "'--nproc'"), (["runs", "p.rlf"], "rlc runs", "is a file"),
    (["check", "p.rlf", "--set", "x"], "rlc check", "NAME=VALUE"), (["explain", "\udcff\x1b"], "rlc explain", "no such"),
])
def test_the_object_names_command_and_cause(arguments: list[str], place: str, title: str) -> None:
    [error] = json.loads(rlc("--json", *arguments).stdout)["diagnostics"]
    assert error["place"] == place and title in error["title"] and f"{place} --help" in error["help"], error


def test_help_and_version_are_objects_too() -> None:
    assert "Usage: rlc run" in json.loads(rlc("run", "--help", "--json").stdout)["help"]
    assert "Write a program:" in json.loads(rlc("--json", "--help").stdout)["help"]
    assert json.loads(rlc("--version", "--json").stdout)["version"] in rlc("--version").stdout


@pytest.mark.parametrize("arguments, wanted", [
    (["--json", "x"], True), (["x", "--output-format", "json"], True), (["x", "--output=json"], True), (["x"], False),
    (["--json", "x", "--output-format", "text"], False), (["x", "--", "--json"], False), (["--output"], False),
    (["--output-format", "text", "x", "--json"], True), (["x", "json"], False), (["--out=json"], False)])
def test_json_is_recognised_before_parsing(arguments: list[str], wanted: bool) -> None:
    assert json_requested(arguments) is wanted


def test_the_paths_of_a_plan_are_an_object_too() -> None:
    found = json.loads(rlc("show", "a.plan", "--paths", "--json").stdout)
    assert {"path": "t.jsonl", "what": "data tasks"} in found["reads"], found
    assert {"python", "writes", "id"} <= found.keys()


def test_verbose_before_and_after_the_name() -> None:
    for given in (["-v", "check", "p.rlf"], ["check", "-v", "p.rlf"]):
        assert "s of CPU" in rlc(*given).stderr
    assert "s of CPU" not in rlc("check", "p.rlf").stderr


@pytest.mark.parametrize("variables, colored", [
    ({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "0"}, False), ({"FORCE_COLOR": ""}, False),
    ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({"NO_COLOR": "1"}, False), ({"CLICOLOR_FORCE": "1"}, True),
    ({"CLICOLOR_FORCE": "0"}, False), ({"CLICOLOR_FORCE": "1", "NO_COLOR": "1"}, False), ({"CLICOLOR": "1"}, False),
    ({"CLICOLOR_FORCE": "1", "FORCE_COLOR": "0"}, False)])
def test_colors_in_a_pipe(variables: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Path("bad.rlf").write_text(PROGRAM.replace("steps=steps", "steps=step"))
    found = CliRunner().invoke(main, ["check", "bad.rlf"], color=True)
    assert ("\x1b[" in found.stderr) is colored, found.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("variables, wanted", [
    ({}, True), ({"CLICOLOR": "0"}, False), ({"CLICOLOR": "0", "CLICOLOR_FORCE": "1"}, True), ({"TERM": "dumb"}, False),
    ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"FORCE_COLOR": "0"}, False)])
def test_colors_on_a_terminal(variables: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert colored(Terminal()) is wanted


def test_the_help_has_every_command_in_one_group() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(main.commands)
    text = rlc("--help").output
    for title, names in GROUPS.items():
        assert f"{title}:" in text
        for name in names:
            [line] = [x for x in text.splitlines() if x.startswith(f"  {name} ")]
            assert len(line) <= 80 and not line.endswith("..."), line


@pytest.mark.parametrize("word, near", [("train", "run"), ("chek", "check"), ("init", "new"), ("simulate", "sim")])
def test_a_command_of_another_name_is_named(word: str, near: str) -> None:
    found = rlc(word, "p.rlf")
    assert found.exit_code == 2 and f"Did you mean `rlc {near}`?" in found.stderr


def test_nothing_near_is_not_named() -> None:
    found = rlc("zzz")
    assert found.exit_code == 2 and "No such command 'zzz'." in found.stderr and "mean" not in found.stderr


def test_other_names_are_not_commands_and_lead_to_one() -> None:
    assert not {*KNOWN_AS} & {*main.commands} and {*KNOWN_AS.values()} <= {*main.commands}


def test_the_earlier_name_of_an_option_is_taken_with_a_notice() -> None:
    found = rlc("check", "p.rlf", "--output", "text")
    assert found.exit_code == 0 and "note: `--output` is now called `--output-format`" in found.stderr
    assert "note:" not in rlc("check", "p.rlf", "--output-format", "text").stderr


def test_rules_of_the_command_line_are_checked_and_drawn() -> None:
    right, wrong = "actor.generate on mesh(0:4) dp=2 tp=2", "actor.generate on mesh(0:4) dp=3"
    for command in ("check", "graph"):
        assert rlc(command, "p.rlf", "--on", right).exit_code == 0
    found = rlc("check", "p.rlf", "--on", wrong)
    assert found.exit_code == 1 and "RL0304" in found.output and "<command line>" in found.output
    assert "RL0313" in rlc("check", "p.rlf", "--on", "actor.train dp=4").output
    assert rlc("check", "p.rlf", "--on", "actor.generate on on").exit_code == 1


def test_rules_of_the_command_line_are_stronger_than_the_placement_file(work: Path) -> None:
    (work / "wrong").write_text("place actor.generate on mesh(0:4) dp=3\n")
    assert rlc("check", "p.rlf", "--place", "wrong").exit_code == 1
    assert rlc("check", "p.rlf", "--place", "wrong", "--on", "actor.generate on mesh(0:4) dp=4").exit_code == 0


@pytest.mark.parametrize("arguments, said", [
    (["compile", "p.rlf", "--emit", "graph", "-o", "x.plan"], "omit -o"),
    (["check", "p.rlf", "--set", "steps=1", "--set", "steps=2"], "steps is given twice"),
    (["new", "-o", "x.rlf"], "NAME is missing"), (["new", "--force"], "NAME is missing"),
    (["new", "grpo", "-o", "-", "--force"], "cannot be combined"),
    (["run", "a.plan", "--on", "actor.train dp=1"], "apply to programs"),
    (["sim", "a.plan", "--cluster", "h100x8", "--set", "a=1"], "apply to programs"),
    (["profile", "a.plan", "--place", "x"], "apply to programs"),
])
def test_what_would_be_ignored_is_refused(work: Path, arguments: list[str], said: str) -> None:
    assert said in usage(*arguments)
    assert not (work / "x.plan").exists() and not (work / "x.rlf").exists()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of ranks that were started, instead of starting them."""
    found: list[int] = []
    launch: Callable[..., int] = lambda plan, world, *_: found.append(world) or 0  # noqa: E731
    monkeypatch.setattr(running, "launch", launch)
    return found


def test_a_plan_that_cannot_run_starts_nothing(work: Path, launched: list[int]) -> None:
    plan = grpo()
    loop = next(i for i in plan.body if isinstance(i, Loop))
    broken = replace(plan, body=tuple(replace(i, body=i.body[::-1]) if i is loop else i for i in plan.body))
    (work / "b.plan").write_bytes(encode(broken))
    found = rlc("run", "b.plan")
    assert found.exit_code == 1 and "RL05" in found.output and launched == []
    assert rlc("run", "a.plan").exit_code == 0 and launched == [plan.header.world]


@pytest.mark.parametrize("cores, said", [(1, True), (2, True), (4, False), (64, False)])
def test_more_ranks_than_cores_are_told(launched: list[int], monkeypatch: pytest.MonkeyPatch, cores: int,
                                        said: bool) -> None:
    monkeypatch.setattr(running.os, "cpu_count", lambda: cores)
    found = rlc("run", "a.plan")
    world = api.read_plan("a.plan").header.world
    assert world == 4 and found.exit_code == 0 and launched == [4]
    assert (f"4 ranks share the {cores} core" in found.stderr) == said
