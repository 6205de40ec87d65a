"""`import rldsl`: programs are checked and compiled, plans show themselves, mistakes are diagnostics."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from copy import copy
from pathlib import Path

import pytest
from click.testing import CliRunner

import rldsl
from rldsl import api
from rldsl.cli import main
from rldsl.clusters import preset
from rldsl.diag import Failure
from rldsl.plan.codec import encode
from tests.api.programs import BROKEN, PROGRAM, make_files


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, with models and data."""
    found = make_files(tmp_path_factory.mktemp("api"))
    with chdir(found):
        yield found


@pytest.fixture(scope="module")
def plan(folder: Path) -> rldsl.Plan:
    return rldsl.compile(PROGRAM)


def rlc(*args: str) -> str:
    done = CliRunner().invoke(main, list(args))
    assert done.exit_code == 0, done.output
    return done.output


# ------------------------------------------------------------------------------------------------- importing


def test_importing_is_light() -> None:
    code = ("import sys, rldsl; assert dir(rldsl); heavy = {'torch', 'transformers', 'networkx', 'lark', 'jinja2'}; "
            "assert not heavy & set(sys.modules); rldsl.check('x = 1\\n'); "
            "assert not {'torch', 'transformers', 'IPython'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_there() -> None:
    assert all(getattr(rldsl, name) is not None for name in rldsl.__all__) and set(rldsl.__all__) <= set(dir(rldsl))


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'compil'"):
        rldsl.compil  # noqa: B018


# -------------------------------------------------------------------------------------------------- checking


def test_a_right_program() -> None:
    found = rldsl.check(PROGRAM)
    assert found.ok and not found and str(found) == "no errors found" and found.codes == ()


@pytest.mark.parametrize("program", [Path("small.rlf"), "small.rlf"])
def test_a_file_is_checked_like_its_text(program: str | Path) -> None:
    assert rldsl.check(program, steps=3).ok


def test_mistakes_are_returned() -> None:
    found = rldsl.check(BROKEN)
    assert found.codes == ("RL0101",) and not found.ok and found.errors == found and not found.warnings
    assert "14 |   gen    = actr.generate" in str(found) and "did you mean `actor`?" in repr(found)
    assert json.loads(found.json())["diagnostics"][0]["code"] == "RL0101"


def test_warnings_are_no_errors() -> None:
    found = rldsl.check(PROGRAM.replace("metric length", "unused = mean(gen.logprobs)\n  metric length"))
    assert found and found.ok and found.warnings == found and all(c.startswith("RL09") for c in found.codes)


def test_html_of_messages_is_escaped() -> None:
    html = rldsl.check(PROGRAM + 'use "<script>"\n')._repr_html_()
    assert "<script" not in html and "&lt;script&gt;" in html and html.count("<span") == html.count("</span>")


def test_rules_may_be_a_text_or_a_file() -> None:
    rules = "place ref.logprobs on mesh(0:4) dp=3\n"
    Path("rules.rlf").write_text(rules)
    for place in (rules, Path("rules.rlf"), "rules.rlf"):
        assert rldsl.check(PROGRAM, place=place).codes == ("RL0304",)


@pytest.mark.parametrize(("params", "code", "help"), [
    ({"lrr": 1}, "RL0106", "did you mean `lr`?"), ({"lr": "fast"}, "RL0205", ""), ({"steps": True}, "RL0205", ""),
    ({"steps": 1.5}, "RL0205", ""), ({"lr": None}, "RL0205", ""),
])
def test_wrong_parameters(params: dict, code: str, help: str) -> None:
    (found,) = rldsl.check(PROGRAM, **params)
    assert found.code == code and help in found.help
    with pytest.raises(rldsl.DiagnosticError, match=code):
        rldsl.compile(PROGRAM, params)


@pytest.mark.parametrize(("path", "code"), [("smal.rlf", "RL0091"), (Path("smal.rlf"), "RL0091"), (".", "RL0092"),
                                            ("prompts.bin", "RL0093")])
def test_files_that_cannot_be_read(path: str | Path, code: str) -> None:
    Path("prompts.bin").write_bytes(b"\xff\xfe")
    for entry in (rldsl.check, rldsl.compile):
        with pytest.raises(rldsl.DiagnosticError, match=code):
            entry(path)


# ------------------------------------------------------------------------------------------------- compiling


def test_parameters_reach_the_plan() -> None:
    plan = rldsl.compile(Path("small.rlf"), {"lr": "2e-6", "steps": 5}, steps=3, base=Path("models/tiny"))
    assert plan.params == {"base": "models/tiny", "lr": 2e-6, "steps": 3} and plan.record.header.steps == 3


def test_the_command_line_makes_the_same_plan() -> None:
    rlc("compile", "small.rlf", "-o", "line.plan", "--set", "lr=3e-6", "--on", "ref.logprobs on mesh(2:4) dp=2")
    plan = rldsl.compile("small.rlf", lr=3e-6, on="ref.logprobs on mesh(2:4) dp=2")
    assert bytes(plan) == Path("line.plan").read_bytes()
    assert bytes(plan) == encode(api.compile("small.rlf", {"lr": "3e-6"}, overrides=["ref.logprobs on mesh(2:4) dp=2"]))


def test_all_mistakes_are_raised_at_once() -> None:
    with pytest.raises(rldsl.DiagnosticError) as error:
        rldsl.compile(BROKEN.replace("lr=lr", "lr=rl"))
    assert [d.code for d in error.value.diagnostics] == ["RL0101", "RL0101"] and isinstance(error.value, Failure)
    assert error.value.__suppress_context__ and str(error.value).count("\n") > 8
    assert copy(error.value).diagnostics == error.value.diagnostics  # as crossing a process boundary does


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(rldsl.DiagnosticError, match="models/gone"):
        rldsl.compile(PROGRAM, base="models/gone")


# ---------------------------------------------------------------------------------------------- the plan itself


def test_what_a_plan_says_of_itself(plan: rldsl.Plan) -> None:
    assert plan.ranks == 4 and len(plan.id) == 12 and "deadlock" not in plan.checks and plan.checks
    assert repr(plan) == f"<rldsl.Plan {plan.id}: <text>, 4 ranks, {plan.compiled.proof.events} events>"
    assert "realloc" in str(plan) and f"plan        {plan.id}" in str(plan)
    assert "<pre" in plan._repr_html_() and "&lt;text&gt;" in plan._repr_html_()


def test_saved_and_loaded(plan: rldsl.Plan, folder: Path) -> None:
    assert plan.save(folder / "small.plan") == folder / "small.plan"
    again = rldsl.load("small.plan")
    assert bytes(again) == bytes(plan) and again.record == plan.record and again.memory.peaks == plan.memory.peaks
    assert again.checks == plan.checks and again.params == plan.params


def test_a_plan_that_was_edited_is_refused(plan: rldsl.Plan) -> None:
    Path("edited.plan").write_bytes(bytes(plan).replace(b'"steps":10', b'"steps":11', 1))
    with pytest.raises(rldsl.DiagnosticError, match="RL0602"):
        rldsl.load("edited.plan")


@pytest.mark.parametrize(("path", "code"), [("gone.plan", "RL0091"), ("small.rlf", "RL0601"), (".", "RL0092")])
def test_files_that_are_no_plans(path: str, code: str) -> None:
    with pytest.raises(rldsl.DiagnosticError, match=code):
        rldsl.load(path)


def test_a_place_that_cannot_be_written(plan: rldsl.Plan) -> None:
    for save in (plan.save, plan.graph.save, plan.report().save):
        with pytest.raises(rldsl.DiagnosticError, match="RL0094"):
            save("nowhere/at.all")


def test_text_is_that_of_the_command_line(plan: rldsl.Plan) -> None:
    rlc("compile", "small.rlf", "-o", "small.plan")
    filed = rldsl.load("small.plan")
    assert filed.text() + "\n" == rlc("show", "small.plan")
    assert filed.text(rank=3) + "\n" == rlc("show", "small.plan", "--rank", "3")
    assert filed.text(event=4) + "\n" == rlc("show", "small.plan", "--event", "4")
    assert "| gen    = actor.generate" in "".join(plan.text(event=e) for e in range(8))  # a text quotes itself


@pytest.mark.parametrize("wrong", [{"rank": 4}, {"rank": -1}, {"event": 99}])
def test_ranks_and_events_that_are_not_there(plan: rldsl.Plan, wrong: dict[str, int]) -> None:
    with pytest.raises(rldsl.DiagnosticError, match="RL0608"):
        plan.text(**wrong)


# ------------------------------------------------------------------------------------------------------ views


def test_the_graph_is_a_picture(plan: rldsl.Plan, folder: Path) -> None:
    svg = plan.graph._repr_svg_()
    assert svg.startswith("<svg") and "actor.generate" in svg and svg == plan.graph.svg
    assert plan.graph.save("graph.svg").read_text() == svg and "small" in repr(rldsl.compile("small.rlf").graph)


def test_memory(plan: rldsl.Plan) -> None:
    memory = plan.memory
    assert set(memory.peaks) == {0, 1, 2, 3} and memory.bytes == max(p.bytes for p in memory.peaks.values()) > 0
    assert {c.peak_bytes for c in plan.record.classes} == {p.bytes for p in memory.peaks.values()}
    assert memory.text() == repr(memory) == str(memory) and memory.text().startswith("ranks")
    assert memory._repr_html_().count("<tr>") == len(memory.text().splitlines())


@pytest.mark.parametrize("cluster", ["h100x8", preset("h100x8")])
def test_a_simulated_step(plan: rldsl.Plan, cluster: str) -> None:
    step = plan.simulate(cluster)
    assert step.seconds > 0 and step.tokens_per_second > 0 and all(0 <= x <= 1 for x in step.idle.values())
    assert json.loads(step.json())["seconds"] == step.seconds and "critical path" in step._repr_html_()
    assert plan.simulate("h100x8", response_tokens=2, longest=4).seconds < step.seconds
    assert "traceEvents" in json.loads(step.save_trace("step.json").read_text())


def test_a_simulation_is_that_of_the_command_line() -> None:
    rlc("compile", "small.rlf", "-o", "small.plan")
    assert rldsl.load("small.plan").simulate("h100x8").text() == rlc("sim", "small.plan", "--cluster", "h100x8")


@pytest.mark.parametrize("act", [lambda p, c: p.simulate(c), lambda p, c: p.report(c), lambda p, c: p.diff(p, c)])
def test_a_cluster_that_is_not_there(plan: rldsl.Plan, act: Callable) -> None:
    with pytest.raises(rldsl.DiagnosticError, match="the number counts all devices, 8 per node"):
        act(plan, "h100x9")


def test_a_cluster_that_is_too_small(plan: rldsl.Plan) -> None:
    Path("two.yaml").write_text("preset: h100x8\ngpus: 2\n")
    with pytest.raises(rldsl.DiagnosticError, match="RL0096"):
        plan.simulate(Path("two.yaml"))


def test_a_report(plan: rldsl.Plan) -> None:
    report = plan.report("h100x8")
    assert report.save("page.html").read_text() == report.html and report.html.startswith("<!DOCTYPE html>")
    assert "srcdoc=" in report._repr_html_() and "<!DOCTYPE" not in report._repr_html_()
    assert "rldsl.Report" in repr(report)


@pytest.mark.parametrize(("content", "code"), [(None, "RL0091"), (b"\xff", "RL0098"), (b"{}", "RL0098")])
def test_a_report_with_no_timeline(plan: rldsl.Plan, content: bytes | None, code: str) -> None:
    Path("trace.json").unlink(missing_ok=True)
    if content is not None:
        Path("trace.json").write_bytes(content)
    with pytest.raises(rldsl.DiagnosticError, match=code):
        plan.report(trace="trace.json")


def test_lengths_of_a_run_that_is_not_there(plan: rldsl.Plan) -> None:
    with pytest.raises(rldsl.DiagnosticError, match="RL0091"):
        plan.simulate("h100x8", like="runs/none")


@pytest.mark.parametrize("name", ["prompt_tokens", "response_tokens", "longest"])
@pytest.mark.parametrize("value", [-5, float("nan"), float("inf"), "12"])
def test_lengths_that_are_none(plan: rldsl.Plan, name: str, value: float) -> None:
    with pytest.raises(rldsl.DiagnosticError, match=rf"RL0205.*`{name}` must be a number of tokens"):
        plan.simulate("h100x8", **{name: value})


def test_lengths_twice(plan: rldsl.Plan) -> None:
    with pytest.raises(rldsl.DiagnosticError, match=r"RL0205.*cannot be combined with `response_tokens`"):
        plan.simulate("h100x8", response_tokens=4, like="runs/none")


@pytest.mark.parametrize("save", [
    lambda p: p.save("gone/x.plan"), lambda p: p.graph.save("gone/x.svg"), lambda p: p.report("h100x8").save("gone/x"),
    lambda p: p.simulate("h100x8").save_trace("gone/x.json")])
def test_advice_is_for_python(plan: rldsl.Plan, save: Callable) -> None:
    """It has no `-o` and no `--trace`."""
    with pytest.raises(rldsl.DiagnosticError, match="RL0094") as told:
        save(plan)
    assert "choose another path" in str(told.value) and " -" not in str(told.value).split("help:")[1]


@pytest.mark.parametrize(("args", "option"), [(["compile", "small.rlf", "-o", "gone/x.plan"], "-o"), (
    ["sim", "small.rlf", "--cluster", "h100x8", "--trace", "gone/x.json"], "--trace")])
def test_advice_is_for_the_command_line(args: list[str], option: str) -> None:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 1 and "RL0094" in done.output and f"choose another path with {option}" in done.output


def test_what_changed(plan: rldsl.Plan) -> None:
    other = rldsl.compile(PROGRAM, lr=1e-5)
    assert plan.diff(plan).same and "no differences" in str(plan.diff(plan))
    found = plan.diff(other, "h100x8")
    assert not found.same and "lr" in found.text() and "predicted time" in repr(found) and found.json()["same"] is False
    assert "1e-05" in found._repr_html_()


def test_names_of_the_compiler_are_source_text_here_too(plan: rldsl.Plan) -> None:
    assert "group_norm(reward)" in plan.text() and "expr#1" not in plan.text() + str(plan.memory) + plan.graph.svg
