"""`--profile`: torch's profiler over some steps, with one range per event, and the same numbers as without it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rldsl import run as starting
from rldsl.plan.codec import decode
from rldsl.plan.naming import Labels, describe_event
from rldsl.plan.projection import schedule
from tests.metrics.program import TWO, plan
from tests.tiny import make_all
from tests.world import run_world


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("profile"), num_hidden_layers=2)


def _rank(rank: int, data: bytes, out: str, steps: int, cwd: str) -> None:
    import os

    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.metrics.reporter import ReportOptions
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(cwd)
    execute(PlanFile.from_bytes(data, "p.plan"), out,
            options=Options(profile=steps, reporting=ReportOptions(plain=True)))


def lines(out: Path) -> list[dict[str, float]]:
    made = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in ("step", "reward", "actor/loss", "actor/grad_norm")} for line in made]


@pytest.mark.thorough
@pytest.mark.parametrize(("steps", "recorded"), [(1, 1), (9, 3)])
def test_the_ranges_are_the_events_of_the_steps(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                steps: int, recorded: int) -> None:
    """recorded: of 4 steps, the first warms up, and the run may end before the profile."""
    monkeypatch.chdir(place)
    data = plan(place, TWO, steps=4)
    run_world(2, _rank, data, str(tmp_path / "out"), steps, str(place))
    made = decode(data, "p.plan")
    labels = Labels.of(made.values, made.frames)
    for rank in (0, 1):
        trace = json.loads((tmp_path / f"out/profile/rank-{rank}.json").read_text())["traceEvents"]
        ranges = Counter(e["name"] for e in trace if e.get("cat") == "user_annotation")
        body = next(item for item in schedule(made.body, made.meshes, rank) if hasattr(item, "body")).body
        expected = Counter(f"{describe_event(labels.event(e)).title} {e.at}".strip() for e, _ in _events(body))
        assert {name: ranges[name] for name in expected} == {name: n * recorded for name, n in expected.items()}
        assert any(e.get("cat") == "cpu_op" for e in trace), "operators inside the ranges"
    run_world(2, _rank, data, str(tmp_path / "without"), 0, str(place))
    assert not (tmp_path / "without/profile").exists()
    assert lines(tmp_path / "out") == lines(tmp_path / "without"), "the same numbers"
    assert not list((tmp_path / "out/profile").glob(".*"))


def _events(items: Any) -> Any:
    from rldsl.plan.events import Event

    for item in items:
        if isinstance(item, Event):
            yield item, ()
        else:
            yield from _events(item.body)


def test_a_run_of_one_step_has_nothing_to_record(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    run_world(1, _rank, plan(place, steps=1), str(tmp_path / "out"), 2, str(place))
    assert not (tmp_path / "out/profile").exists()


@pytest.mark.parametrize(("given", "steps"), [([], 0), (["--profile"], 1), (["--profile", "3"], 3)])
def test_the_option(monkeypatch: pytest.MonkeyPatch, given: list[str], steps: int) -> None:
    monkeypatch.setattr(sys, "argv", ["rldsl.run", "p.plan", *given])
    assert starting._arguments(None).profile == steps


@pytest.mark.parametrize("given", ["-1", "x"])
def test_what_is_no_number_of_steps(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setattr(sys, "argv", ["rldsl.run", "p.plan", f"--profile={given}"])
    with pytest.raises(SystemExit):
        starting._arguments(None)
