"""What runs write beside the metrics that their programs name: measured in real worlds of one and two ranks."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import rldsl.run as starting
import rldsl.runtime.metrics.reporter as reporting
from rldsl.commands.plot import plot as draw
from rldsl.commands.runs import listing, metrics
from rldsl.plan.codec import decode, plan_id
from rldsl.plan.events import Realloc
from rldsl.plan.metrics_file import MEASURED
from rldsl.plan.projection import event_paths
from rldsl.runtime.metrics.builtin_metrics import Measured
from rldsl.runtime.metrics.names import computed
from rldsl.runtime.metrics.phase_times import PhaseTimes
from rldsl.runtime.metrics.reporter import ReportOptions
from rldsl.runtime.metrics.run_record import read_record
from rldsl.runtime.metrics.samples import sample_sources
from rldsl.runtime.state.logged_numbers import Arrival, LoggedNumbers
from tests.metrics.program import ALONE, REWARDS, TEXT, TWO, lines, plan, run
from tests.world import run_world

PHASES = ("generate", "infer", "train")


def test_the_usual_metrics_of_one_rank(place: Path) -> None:
    [said] = run(plan(place), place / "out")
    found = lines(place / "out/metrics.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3]
    for line in found:
        assert all(line[f"time/{p}"] >= 0 and line[f"tokens_per_second/{p}"] > 0 for p in PHASES)
        parts = sum(line[f"time/{p}"] for p in (*PHASES, "rest"))
        assert parts == pytest.approx(line["seconds"], abs=1e-3)
        assert line["memory/peak_bytes"] > 50_000_000 and "moved/bytes" not in line
        assert line["length/response"] == line["length"]
        assert line["actor/lr"] == 1e-3 and line["actor/grad_norm"] > 0
    assert said.count("\n") >= 3 and "time/" not in said and "memory/" not in said
    shown = [text for text in said.splitlines() if text.startswith("step ")]
    assert [text.split("  ")[0] for text in shown] == ["step 1/3", "step 2/3", "step 3/3"]
    assert shown[0].split("  ")[1].startswith("reward ") and "tokens/s" in shown[0]


@pytest.mark.thorough
def test_two_ranks_move_bytes_and_compute_the_same(place: Path) -> None:
    run(plan(place), place / "one")
    data = plan(place, TWO)
    said = run(data, place / "two", ReportOptions(samples=2))
    one, two = lines(place / "one/metrics.jsonl"), lines(place / "two/metrics.jsonl")
    for mine, theirs in zip(two, one, strict=True):
        names = computed(theirs)
        assert [mine[n] for n in names] == pytest.approx([theirs[n] for n in names], rel=1e-4, abs=1e-5)
    known = sum(e.bytes for e, _ in event_paths(decode(data, "p")) if isinstance(e, Realloc))
    assert known > 0 and all(line["moved/bytes"] >= known for line in two)
    assert "time/infer" not in two[0], "the rank that logs took no part in it"
    assert said[1].count("step 1/3") == 0, "one rank shows progress"
    assert len(lines(place / "two/samples/gen.jsonl")) == 6
    assert all("reward" in line for line in lines(place / "two/samples/gen.jsonl"))


def test_a_step_without_metrics_has_a_line_too(place: Path) -> None:
    text = "\n".join(line for line in TEXT.splitlines() if "metric" not in line and "actor.train" not in line
                     and "ref_lp" not in line) + "\n"
    run(plan(place, text=text.replace("train adamw(lr=1e-3)", "")), place / "out")
    assert [computed(line) for line in lines(place / "out/metrics.jsonl")] == [[]] * 3


def test_samples_are_text_with_their_values(place: Path) -> None:
    run(plan(place), place / "out", ReportOptions(samples=3))
    found = lines(place / "out/samples/gen.jsonl")
    assert [(s["step"], s["row"]) for s in found] == [(step, row) for step in (1, 2, 3) for row in range(3)]
    for sample in found:
        assert sample["prompt"].endswith("=") and "<" not in sample["completion"]
        assert sample["reward"] == sum(c.isdigit() for c in sample["completion"])
        assert sample.keys() == {"step", "row", "prompt", "completion", "gen.finished", "reward", "actor/adv"}


def test_numbers_that_are_not_finite(place: Path) -> None:
    """Lines stay JSON, and what reads them goes on."""
    odd = "  metric none = log(-1 - mean(reward))\n  metric much = 1 / (mean(reward) - mean(reward))\n  metric reward = "
    run(plan(place, text=TEXT.replace("  metric reward = ", odd), steps=1), place / "out")
    text = (place / "out/metrics.jsonl").read_text()
    [line] = [json.loads(x, parse_constant=pytest.fail) for x in text.splitlines()]
    assert line["none"] is line["much"] is None and line["reward"] >= 0
    [read] = metrics(place / "out")
    assert math.isnan(read["none"]) and math.isnan(read["much"])
    draw([str(place / "out")], str(place / "a.svg"), ["none", "reward"])
    assert "none" in (place / "a.svg").read_text() and "finished" in listing(str(place))


def test_no_samples_unless_asked(place: Path) -> None:
    run(plan(place, steps=1), place / "out")
    assert not (place / "out/samples").exists() and not (place / "out/tensorboard").exists()


def test_more_samples_than_rows(place: Path) -> None:
    run(plan(place, steps=1), place / "out", ReportOptions(samples=100))
    assert len(lines(place / "out/samples/gen.jsonl")) == 8


def test_the_writer_of_samples_has_the_reward(place: Path) -> None:
    """The same on every rank; where tokens and rewards lie under one spread."""
    made = decode(plan(place, TWO), "p")
    [source] = sample_sources(made)
    written = {b for e, _ in event_paths(made) for b in e.writes}
    assert source.frame == "gen" and f"reward@{source.spread}" in written and f"gen.tokens@{source.spread}" in written


@pytest.mark.parametrize("blocked", ["metrics.jsonl", "samples/gen.jsonl"])
def test_what_cannot_be_written_is_found_before_the_first_step(place: Path, blocked: str) -> None:
    (place / "out" / blocked).mkdir(parents=True)
    with pytest.raises(AssertionError, match="RL0708"):
        run(plan(place), place / "out", ReportOptions(samples=1))
    assert not (place / "out/run.json").exists()


def test_the_directory_tells_the_run(place: Path) -> None:
    data = plan(place)
    run(data, place / "out", ReportOptions(command=("rlc", "run", "p.rlf")))
    held = json.loads((place / "out/run.json").read_text())
    assert (place / "out/run.plan").read_bytes() == data and held["plan"] == plan_id(data)
    assert (held["state"], held["step"], held["steps"], held["world"]) == ("finished", 3, 3, 1)
    assert held["params"] == {"steps": 3} and held["seed"] == 7 and held["devices"] == ["cpu"]
    assert held["command"] == ["rlc", "run", "p.rlf"]
    assert {"python", "torch", "transformers", "rldsl"} == set(held["versions"])
    assert held["started"] <= held["ended"] and held["resumed"] == []
    copies = {s["path"]: s["copy"] for s in held["sources"]}
    assert {"p.rlf", "rewards.py", "std/grpo.rlf"} <= copies.keys()
    assert (place / "out/sources" / copies["p.rlf"]).read_text() == TEXT


def test_a_program_that_changed_is_not_copied(place: Path) -> None:
    data = plan(place, steps=1)
    (place / "p.rlf").write_text("# another program\n")
    run(data, place / "out")
    held = json.loads((place / "out/run.json").read_text())
    assert next(s["copy"] for s in held["sources"] if s["path"] == "p.rlf") == ""
    assert not any("p.rlf" in p.name for p in (place / "out/sources").iterdir())


def test_a_failed_run_says_so(place: Path) -> None:
    data = plan(place, text=TEXT.replace("adv=group_norm(reward)", "adv=log(0 * reward - 1)"))
    with pytest.raises(AssertionError, match="RL0733"):
        run(data, place / "out")
    held = json.loads((place / "out/run.json").read_text())
    assert (held["state"], held["step"]) == ("failed", 1) and held["ended"]


@pytest.mark.thorough
def test_a_run_that_goes_on_keeps_lines_samples_and_record(place: Path) -> None:
    text = TEXT.replace("metric length", "checkpoint every 2 keep=3\n  metric length")
    whole = plan(place, text=text, steps=4)
    run(whole, place / "out", ReportOptions(samples=1, tensorboard=True))
    run(whole, place / "whole", ReportOptions(samples=1))
    (place / "out/checkpoints/step-000004/checkpoint.json").unlink()
    started = json.loads((place / "out/run.json").read_text())["started"]
    with (place / "out/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # cut by a crash
    run(whole, place / "out", ReportOptions(samples=1, tensorboard=True), again=True)
    for name in ("metrics.jsonl", "samples/gen.jsonl"):
        mine, theirs = ([{k: line[k] for k in line if not k.startswith(MEASURED)} for line in lines(place / x / name)]
                        for x in ("out", "whole"))
        assert mine == theirs and [line["step"] for line in mine] == [1, 2, 3, 4]
    held = json.loads((place / "out/run.json").read_text())
    assert held["started"] == started and len(held["resumed"]) == 1 and held["state"] == "finished"


@pytest.mark.thorough
@pytest.mark.parametrize("broken", ["data/prompts.jsonl", "rewards.py"])
def test_an_earlier_run_stays_until_the_new_one_is_sound(place: Path, tiny: Path, broken: str) -> None:
    """And torchrun starts it as a new one again, since it has not begun."""
    data, out = plan(place, steps=1), place / "out"
    run(data, out)
    (out / "failed-batch-step-1").mkdir()
    before = (out / "metrics.jsonl").read_text()
    if broken == "rewards.py":
        (place / broken).write_text("x = 1\n")
    else:
        (place / "data").unlink()
    assert run_world(1, _overwriting, data, str(out)) == [("RL0772" if broken == "rewards.py" else "RL0741", False)]
    held = read_record(out)
    assert (out / "metrics.jsonl").read_text() == before and held is not None and held["state"] == "finished"
    if broken == "rewards.py":
        (place / broken).write_text(REWARDS)
    else:
        (place / "data").symlink_to(tiny / "data")
    assert run_world(1, _overwriting, data, str(out)) == [("", True)]
    assert not (out / "failed-batch-step-1").exists() and (out / "metrics.jsonl").read_text() != before


def _overwriting(rank: int, data: bytes, out: str) -> tuple[str, bool]:
    """The code, and whether the run said that it has begun."""
    from rldsl.diag import Failure
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(Path(out).parent)
    begun: list[bool] = []
    try:
        execute(PlanFile.from_bytes(data, "p.plan"), out, options=Options(overwrite=True),
                begun=lambda: begun.append(True))
    except Failure as failure:
        return failure.diagnostics[0].code, bool(begun)
    return "", bool(begun)


def test_tensorboard_has_every_number(place: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(plan(place, ALONE, steps=2), place / "out", ReportOptions(tensorboard=True))
    board = EventAccumulator(str(place / "out/tensorboard"))
    board.Reload()
    first, second = lines(place / "out/metrics.jsonl")
    assert set(board.Tags()["scalars"]) == (first.keys() | second.keys()) - {"step"}
    assert [(s.step, s.value) for s in board.Scalars("reward")] == [(1, pytest.approx(first["reward"])),
                                                                   (2, pytest.approx(second["reward"]))]


@pytest.mark.parametrize("variable, project", [("mine", "mine"), ("", "f"), (None, "f")])
def test_the_project_of_weights_and_biases(place: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None,
                                           project: str) -> None:
    """`WANDB_PROJECT`, else the flow."""
    began: list[str] = []
    monkeypatch.setattr(reporting, "Wandb", lambda out, step, mode, labels: began.append(labels.project))
    monkeypatch.setattr(sys, "argv", ["rldsl.run", "p.plan", "--wandb", "offline"])
    if variable is None:
        monkeypatch.delenv("WANDB_PROJECT", raising=False)
    else:
        monkeypatch.setenv("WANDB_PROJECT", variable)
    made = decode(plan(place), "p")
    made = replace(made, header=replace(made.header, flow="f"))
    context: Any = SimpleNamespace(plan=made, rank=0, out=place)
    reporting.Reporter(context, cast(Any, SimpleNamespace(number=0)), cast(Any, None),
                       starting._reporting(starting._arguments(None)))
    assert began == [project]


def test_a_line_is_written_once_whatever_showing_it_raises(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(reporting, "print_line", gone)
    monkeypatch.setattr(sys, "argv", ["rldsl.run", "p.plan"])
    context: Any = SimpleNamespace(plan=decode(plan(place), "p"), rank=0, out=place)
    made = reporting.Reporter(context, cast(Any, SimpleNamespace(number=0)), cast(Any, None),
                              starting._reporting(starting._arguments(None)))
    made._lines.append(reporting._Line(1, (), 0.0, 1.0, 0, Measured(PhaseTimes(), {}, {})))
    with pytest.raises(BrokenPipeError), made:
        made.write_lines()
    assert [line["step"] for line in lines(place / "metrics.jsonl")] == [1]


def test_a_step_ends_when_its_numbers_have_arrived() -> None:
    """A rank that generates ahead has nothing to do in the last step, and the others still train."""
    late = Arrival()
    times = PhaseTimes({"generate": 0.5})
    line = reporting._Line(3, (LoggedNumbers((), (), {}, late, late.wait),), 10.0, 11.0, 40, Measured(times, {}, {}))
    late.complete(lambda: None)
    late.at = 14.0
    assert line.numbers(since=10.0) == {"step": 3, "seconds": 4.0, "tokens_per_second": 10.0, "time/generate": 0.5,
                                        "time/rest": 3.5}
    assert line.numbers(since=13.9)["seconds"] == pytest.approx(1.0), "numbers of the step before came late"
