"""The page of a run: what it shows of metrics, samples and settings, and what `rlc report DIR` takes and refuses."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rldsl.cli import main
from rldsl.commands import report_run
from rldsl.pages.run import LETTERS, POINTS, RunGiven, averaged, curves, metrics, number_text, samples, shortened
from tests.plan.sample import grpo
from tests.report.pages import Outline, trace
from tests.report.runs import TURNS, line, make_run, sample, write_lines


def rlc(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs/a")
    return Path("runs/a")


def shown(run: Path, *more: str) -> Outline:
    found = rlc(str(run), *more)
    assert found.exit_code == 0, found.output
    return Outline.of((run / "report.html").read_text())


def data(page: Outline) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="run-data">(.*?)</script>', page.source, re.S)
    assert found is not None
    return json.loads(found[1])


def given(lines: list[dict[str, Any]], **more: Any) -> RunGiven:
    return RunGiven("runs/a", {"state": "finished", "steps": 5}, lines, tuple(lines[0]) if lines else (), **more)


def test_a_run_in_one_page(run: Path) -> None:
    page = shown(run)
    for text in ("runs/a", "step 5 of 5", "first 0.1; 0.1 to 0.5", "actor/loss", "10 recorded sequences", "2*3=5",
                 "rlc run grpo.rlf", "2 × cpu", "python 3.11, torch 2.13", "Dataflow", "Inserted"):
        assert text in page.text, text
    assert "data-refresh" not in page.source and "Compared" not in page.text
    assert rlc(str(run)).exit_code == 0 and (run / "report.html").read_text() == page.source


def test_metrics_of_the_program_come_first(run: Path) -> None:
    names = [x["data-metric"] for x in shown(run).all("figure", class_="metric")]
    assert names == ["reward", "actor/loss", "seconds", "tokens_per_second", "memory/peak_bytes"]


def test_the_curves_are_in_the_page(run: Path) -> None:
    (one,) = data(shown(run))["runs"]
    assert one["steps"] == [1, 2, 3, 4, 5] and one["seconds"] == [9.0, 11.0, 13.0, 15.0, 17.0]
    assert one["metrics"]["reward"] == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_numbers_that_are_none_are_gaps(run: Path) -> None:
    write_lines(run / "metrics.jsonl", [line(1, reward=None), line(2), {"step": 3}])
    page = shown(run)
    (one,) = data(page)["runs"]
    assert one["metrics"]["reward"] == [None, 0.2, None]
    write_lines(run / "metrics.jsonl", [{"step": 1, "reward": None}])
    assert "no finite number" in shown(run).source


def test_sums_beyond_the_largest_number_are_gaps() -> None:
    many = [{"step": i, "x": 1e308} for i in range(1, 2 * POINTS + 1)]
    assert set(json.loads(curves(given(many)))["runs"][0]["metrics"]["x"]) == {None}


@pytest.mark.parametrize("steps, each", [(0, 1), (1, 1), (POINTS, 1), (POINTS + 1, 2), (10 * POINTS, 10)])
def test_long_runs_are_averaged(steps: int, each: int) -> None:
    found = given([{"step": i, "x": float(i % 2)} for i in range(1, steps + 1)])
    assert averaged(found) == each
    one = json.loads(curves(found))["runs"][0]
    assert len(one["steps"]) <= POINTS and (not steps or one["steps"][-1] == steps)
    if each == 2:
        assert set(one["metrics"]["x"][:-1]) == {0.5}


def test_before_the_first_step(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    write_lines(run / "samples/gen.jsonl", [])
    page = shown(run)
    assert "The run has not finished a step yet" in page.text and "step 0 of 5" in page.text


def test_a_run_without_samples_says_how_to_get_them(run: Path) -> None:
    (run / "samples/gen.jsonl").unlink()
    assert "--log-samples N" in shown(run).text


def test_a_conversation_has_turns_with_rewards(run: Path) -> None:
    write_lines(run / "samples/gen.jsonl", [sample(1, 0, conversation={"stopped": "max_turns", "turns": TURNS})])
    page = shown(run)
    for text in ("ended: max_turns", "multiply 2 3", '[{"name": "multiply", "arguments": {"a": 2}}]', "6.0",
                 "reward 0.25", "It is 6."):
        assert text in page.text, text


@pytest.mark.parametrize("conversation", [None, 3, [], {"turns": 3}, {"turns": [3, {}]}, {"turns": [{"content": None}]}])
def test_conversations_of_another_form_do_not_end_the_page(run: Path, conversation: Any) -> None:
    write_lines(run / "samples/gen.jsonl", [sample(1, 0, conversation=conversation)])
    assert "2*3=1" in shown(run).text


def test_samples_are_those_of_few_steps_and_rows() -> None:
    lines = [sample(step, row) for step in range(1, 101) for row in range(20)]
    found = samples(given([], samples={"gen": lines}))
    steps = sorted({s.step for s in found})
    assert len(steps) == 12 and (steps[0], steps[-1]) == (1, 100) and len(found) == 12 * 8
    assert [s.step for s in found] == sorted((s.step for s in found), reverse=True)


def test_long_texts_lose_their_middle() -> None:
    text = "a" * LETTERS + "b" * LETTERS
    assert shortened("a" * LETTERS) == "a" * LETTERS
    assert len(shortened(text)) < LETTERS + 60 and "[20,000 characters left out]" in shortened(text)
    assert shortened(text).startswith("aaa") and shortened(text).endswith("bbb")


def test_another_run_next_to_it(run: Path) -> None:
    other = replace(grpo(), header=replace(grpo().header, seed=7))
    make_run(Path("runs/b"), steps=3, plan=other, params={"lr": 2e-6, "beta": 0.1}, seed=7)
    write_lines(Path("runs/b/metrics.jsonl"), [line(step, reward=0.0) for step in (1, 2, 3)])
    page = shown(run, "--against", "runs/b")
    assert [one["name"] for one in data(page)["runs"]] == ["runs/a", "runs/b"]
    for text in ("param lr 1e-06 2e-06", "param beta not set 0.1", "seed 1 7", "first difference in step 1",
                 "plan seed"):
        assert text in page.text, text


def test_the_same_run_again_differs_in_nothing(run: Path) -> None:
    make_run(Path("runs/b"))
    text = shown(run, "--against", "runs/b").text
    assert "Both ran the same plan" in text and "no differences" in text and "Differences of the plans" not in text


def test_runs_without_a_common_step_are_still_shown(run: Path) -> None:
    make_run(Path("runs/b"))
    write_lines(Path("runs/b/metrics.jsonl"), [line(9)])
    assert "the runs have no step in common" in shown(run, "--against", "runs/b").text


def test_a_recorded_timeline_next_to_the_predicted_one(run: Path) -> None:
    assert "Recorded: step" not in shown(run).text
    Path("t.json").write_text(json.dumps(trace(grpo())))
    assert "Recorded: step" in shown(run, "--trace", "t.json").text
    (run / "trace.json").write_text(json.dumps(trace(grpo())))
    assert "Recorded: step" in shown(run).text
    (run / "trace.json").write_text(json.dumps(trace(grpo(), program="other.rlf")))
    assert "Recorded: step" not in shown(run).text  # left by an earlier run: nobody asked for it


BAD = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def test_markup_in_a_run_is_text(run: Path) -> None:
    write_lines(run / "metrics.jsonl", [line(1, **{f"m/{BAD}": 1.0})])
    write_lines(run / "samples/gen.jsonl", [sample(1, 0, **{"prompt": BAD, f'"{BAD}': 1.0})])
    make_run(Path("runs/b"), command=[BAD], host=BAD, params={BAD: BAD})
    page = shown(run, "--against", "runs/b")
    assert not page.all("img") and len(page.all("script")) == 2
    assert BAD in page.text and data(page)["runs"][0]["metrics"][f"m/{BAD}"] == [1.0]


@pytest.mark.parametrize("arguments, code", [
    (("runs",), "RL0783"), (("nowhere",), "RL0091"), (("runs/a", "--against", "nowhere"), "RL0783"),
    (("runs/a", "--against", "runs"), "RL0783"), (("runs/a", "--cluster", "no"), "RL0091"),
    (("runs/a", "--trace", "no.json"), "RL0091"), (("runs/a", "-o", "no/x.html"), "RL0094")])
def test_what_it_refuses(run: Path, arguments: tuple[str, ...], code: str) -> None:
    found = rlc(*arguments)
    assert found.exit_code == 1 and code in found.output, found.output


@pytest.mark.parametrize("option", [("--watch",), ("--against", "runs/a")])
def test_a_plan_cannot_be_watched_or_compared(run: Path, option: tuple[str, ...]) -> None:
    found = rlc("runs/a/run.plan", *option)
    assert found.exit_code == 2 and f"{option[0]} needs the directory of a run as the first argument" in found.output
    assert "`runs/a/run.plan` is a file" in found.output
    found = rlc("runs/nowhere", *option)  # neither a run nor a plan
    assert found.exit_code == 1 and "RL0091" in found.output and "no such directory: runs/nowhere" in found.output
    assert "as soon as `rlc run PROGRAM --out runs/nowhere` has started" in found.output


@pytest.mark.parametrize("file, text", [("metrics.jsonl", "{}\n"), ("samples/gen.jsonl", "no\n"),
                                        ("samples/gen.jsonl", "[]\n"), ("samples/gen.jsonl", '{"step": 1}\n')])
def test_damaged_files_are_named(run: Path, file: str, text: str) -> None:
    (run / file).write_text(text)
    found = rlc(str(run))
    assert found.exit_code == 1 and "RL0784" in found.output and f"{file}:1" in found.output
    assert not (run / "report.html").exists()


def test_a_line_that_is_being_written_is_left_out(run: Path) -> None:
    for name in ("metrics.jsonl", "samples/gen.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 6, "ro')
    assert "step 5 of 5" in shown(run).text


def test_as_json(run: Path) -> None:
    found = rlc(str(run), "--json")
    assert json.loads(found.stdout) == {"format": 1, "wrote": "runs/a/report.html"}


def test_a_run_is_watched_until_it_ends(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=1, state="running")
    pages: list[str] = []
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:  # nothing new at the first time
            write_lines(folder / "metrics.jsonl", [line(1), line(2)])
        if len(waits) == 3:
            record = json.loads((folder / "run.json").read_text())
            (folder / "run.json").write_text(json.dumps(record | {"state": "finished"}))

    report_run.watch(report_run.run_page(str(folder)), 3, pages.append, sleep)
    assert waits == [3, 3, 3]
    assert ["step 1 of 5" in pages[0], "step 2 of 5" in pages[1]] == [True, True] and len(pages) == 3
    assert [' data-refresh="3"' in page for page in pages] == [True, True, False]


def test_after_ctrl_c_the_page_stands_still(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=1, state="running")
    pages: list[str] = []

    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report_run.watch(report_run.run_page(str(folder)), 3, pages.append, sleep)
    assert [' data-refresh="3"' in page for page in pages] == [True, False]


def test_a_run_that_has_ended_is_not_watched(run: Path) -> None:
    found = rlc(str(run), "--watch")
    assert (found.exit_code, found.output) == (0, "wrote runs/a/report.html\n")
    assert "data-refresh" not in (run / "report.html").read_text()


@pytest.mark.parametrize("name, x, text", [
    ("reward", 0.123456, "0.1235"), ("n", 123456.0, "123,456"), ("memory/peak_bytes", 2.0**30, "1.0 GiB"),
    ("moved/bytes", -1.0, "-1"), ("seconds", 0.5, "500 ms"), ("time/train", 0.0, "0 s"), ("x", math.inf, "not finite")])
def test_numbers_as_text(name: str, x: float, text: str) -> None:
    assert number_text(name, x) == text


def test_a_metric_that_only_the_other_run_has() -> None:
    from rldsl.pages.run import Compared

    other = Compared("b", [{"step": 1, "x": 1.0}], False, (), "", "")
    (_, (panel,)), = metrics(given([{"step": 1}], compared=other))
    assert (panel.name, panel.last) == ("x", "no number")
