"""Trackers through `accelerate.tracking`: its own classes, with stand-ins for the packages of the trackers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate.tracking  # noqa: F401 (before the stand-ins: it asks for the spec of each tracker)
import pytest

from rldsl import run as starting
from rldsl.diag import Failure
from rldsl.plan.arrays import Histogram
from rldsl.plan.metrics_file import TRACKERS
from rldsl.runtime.metrics import trackers
from rldsl.runtime.metrics.trackers import Accelerate
from rldsl.runtime.metrics.writers import RunLabels

LABELS = RunLabels("tldr", "one", ("a", "b"), {"lr": 1e-3})
SAMPLES = {"samples/gen": [{"step": 3, "row": 0, "completion": "x", "reward": 0.5}]}


class Calls:
    """Keeps its calls, and those of its attributes, by name."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Any]] = []
        self.refuses: set[str] = set()

    def record(self, name: str, result: Any = None) -> Any:
        def called(*args: Any, **named: Any) -> Any:
            self.made.append((name, args if args and not named else named if not args else (*args, named)))
            if name in self.refuses:
                raise ConnectionError(f"{name}: no\nnetwork")
            return result
        return called

    def of(self, name: str) -> list[Any]:
        return [given for called, given in self.made if called == name]


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(members)
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Packages with what accelerate's classes ask of them."""
    made = Calls()
    call = made.record
    active = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    mlflow = module("mlflow", search_experiments=lambda **_: [], create_experiment=call("create_experiment", "e1"),
                    start_run=call("start_run", active), log_params=call("log_params"),
                    log_metrics=call("log_metrics"), log_text=call("log_text"), log_dict=call("log_dict"), end_run=call("end_run"),
                    utils=SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)))
    trackio_run = SimpleNamespace(log=call("log"), finish=call("finish"))
    trackio = module("trackio", init=call("init", trackio_run), config=SimpleNamespace(update=call("config")),
                     Table=lambda dataframe: dataframe.to_dict("records"),
                     Histogram=lambda np_histogram: ("histogram", *np_histogram))
    experiment = SimpleNamespace(set_step=call("set_step"), log_metric=call("log_metric"), end=call("end"),
                                 log_parameters=call("log_parameters"), set_name=call("set_name"), add_tags=call("add_tags"),
                                 log_table=call("log_table"), log_asset_data=call("log_asset_data"))
    comet = module("comet_ml", start=call("start", experiment), __version__="3.50.0")
    for name, found in (("mlflow", mlflow), ("trackio", trackio), ("comet_ml", comet)):
        monkeypatch.setitem(sys.modules, name, found)
    return made


def used(name: str, out: Path, step: int = 3) -> None:
    writer = Accelerate(name, out, step, LABELS)
    writer.write_tables(step, SAMPLES)
    writer.write(step, {"reward": 0.5})
    writer.write_histograms(step, {"gap": Histogram(-1.0, 1.0, 2, 0, 1, (3, 1))})
    writer.close(ok=True)


def test_mlflow(calls: Calls, tmp_path: Path) -> None:
    used("mlflow", tmp_path, 1)
    assert calls.of("create_experiment")[0]["name"] == "tldr"
    (run,) = calls.of("start_run")
    assert (run["run_name"], run["tags"], run["run_id"]) == ("one", {"a": "true", "b": "true"}, None)
    assert calls.of("log_params") == [({"lr": 1e-3},)]
    assert calls.of("log_metrics") == [({"reward": 0.5}, {"step": 1})]
    ((text, file),) = calls.of("log_text")
    assert json.loads(text)["completion"] == "x" and file == "samples/gen/step-000001.jsonl"
    assert calls.of("log_dict") == [({"low": -1.0, "high": 1.0, "below": 2, "above": 0, "nan": 1, "counts": (3, 1)},
                                     "histograms/gap/step-000001.json")]
    used("mlflow", tmp_path)
    assert calls.of("start_run")[1]["run_id"] == "r1", "a run that resumes"
    used("mlflow", tmp_path, 1)
    assert calls.of("start_run")[2]["run_id"] is None, "a new one in the same directory"


def test_trackio(calls: Calls, tmp_path: Path) -> None:
    for step in (1, 3, 1):
        used("trackio", tmp_path, step)
    first, resumed, anew = calls.of("init")
    assert first["project"] == "tldr" and first["name"].startswith("one-")
    assert first["name"] == resumed["name"] != anew["name"]
    assert ({"lr": 1e-3}, {"allow_val_change": True}) in calls.of("config")
    assert ({"tags": "a, b"}, {"allow_val_change": True}) in calls.of("config")
    table, numbers, histogram = calls.of("log")[:3]
    assert histogram == ({"gap": ("histogram", [3, 1], [-1.0, 0.0, 1.0])}, {"step": 1})
    assert numbers == ({"reward": 0.5}, {"step": 1})
    assert table == ({"samples/gen": [{"step": 3, "row": 0, "completion": "x", "reward": 0.5}]}, {"step": 1})


def test_comet(calls: Calls, tmp_path: Path) -> None:
    for step in (1, 3):
        used("comet_ml", tmp_path, step)
    first, resumed = calls.of("start")
    assert first["project_name"] == "tldr" and first["experiment_key"] == resumed["experiment_key"]
    assert first["experiment_key"].isalnum() and len(first["experiment_key"]) == 32
    assert calls.of("set_name")[0] == ("one",) and calls.of("add_tags")[0] == (["a", "b"],)
    assert ("reward", 0.5, {"step": 1}) in calls.of("log_metric")
    assert calls.of("log_table")[0][0] == "samples-gen-000001.csv"
    assert calls.of("log_asset_data")[0][1] == {"name": "histogram-gap-000001.json", "step": 1}


@pytest.mark.parametrize(("name", "call"), [("mlflow", "start_run"), ("trackio", "init"), ("comet_ml", "start")])
def test_a_tracker_that_refuses_to_begin(calls: Calls, tmp_path: Path, name: str, call: str) -> None:
    calls.refuses.add(call)
    with pytest.raises(Failure) as failure:
        Accelerate(name, tmp_path, 1, LABELS)
    (found,) = failure.value.diagnostics
    assert found.code == "RL0787" and f"{call}: no network" in found.title and found.place == f"--report-to {name}"


def test_a_tracker_that_fails_later_does_not_end_the_run(calls: Calls, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    writer = Accelerate("trackio", tmp_path, 1, LABELS)
    calls.refuses.add("log")
    for step in (1, 2):
        writer.write(step, {"reward": 0.5})
    writer.close(ok=True)
    warned = capsys.readouterr().err
    assert warned.count("warning") == 1 and "trackio failed and gets no more metrics: log: no network" in warned
    assert len(calls.of("log")) == 1 and not calls.of("finish")


@pytest.mark.parametrize("name", ["mlflow", "trackio", "comet_ml"])
def test_packages_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Failure) as failure:
        Accelerate(name, tmp_path, 1, LABELS)
    (found,) = failure.value.diagnostics
    assert found.code == "RL0782" and found.help == f"pip install {name}" and not list(tmp_path.iterdir())


def test_accelerate_itself_is_not_there(calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(Failure, match="RL0782") as failure:
        Accelerate("mlflow", tmp_path, 1, LABELS)
    assert "rldsl[trackers]" in failure.value.diagnostics[0].help


def test_every_tracker_has_all_functions() -> None:
    own = set(TRACKERS) - {"tensorboard", "wandb"}
    assert own == trackers.STARTS.keys() == trackers.STARTED.keys() == trackers.TABLES.keys()


@pytest.mark.parametrize(("given", "mode", "expected"), [
    (["--report-to", "wandb"], None, ("online", False, ())),
    (["--report-to", "wandb"], "offline", ("offline", False, ())),
    (["--wandb", "offline", "--report-to", "tensorboard"], "online", ("offline", True, ())),
    (["--report-to", "trackio", "--report-to", "mlflow", "--report-to", "trackio"], None, ("", False, ("trackio", "mlflow"))),
    ([], "offline", ("", False, ())),
])
def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, given: list[str], mode: str | None, expected: Any) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setattr(sys, "argv", ["rldsl.run", "p.plan", *given, "--project", "p", "--run-name", "n", "--tag", "t"])
    found = starting._reporting(starting._arguments(None))
    assert (found.wandb, found.tensorboard, found.trackers) == expected
    assert (found.project, found.run_name, found.tags) == ("p", "n", ("t",))


def test_an_unknown_tracker_is_refused() -> None:
    code = "from rldsl.rlc import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "run", "p.rlf", "--report-to", "neptune"], capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 2 and "trackio" in done.stderr and "Traceback" not in done.stderr
