"""TensorBoard and Weights & Biases: what they are told, and what a user is told when they are not there. No network."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rldsl.diag import Failure
from rldsl.plan.arrays import Histogram
from rldsl.runtime.metrics.json_lines import truncate
from rldsl.runtime.metrics.writers import RunLabels, TensorBoard, Wandb, table

LABELS = RunLabels("grpo", "one", ("a", "b"), {"lr": 1e-3})


class Recorded(ModuleType):
    """In the place of the package wandb: keeps its calls."""

    def __init__(self, refuses: str = ""):
        super().__init__("wandb")
        self.began: list[dict[str, Any]] = []
        self.told: list[Any] = []
        self.refuses = refuses
        self.Table = lambda columns, data: (columns, data)
        self.Settings = lambda **given: SimpleNamespace(**given)

    def init(self, **given: Any) -> Any:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.began.append(given)
        return SimpleNamespace(log=lambda numbers, step: self.told.append((step, numbers)),
                               finish=lambda exit_code: self.told.append(exit_code))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def test_wandb_is_told_every_step(fake: Recorded, tmp_path: Path) -> None:
    writer = Wandb(tmp_path, 1, "offline", LABELS)
    writer.write(1, {"reward": 0.5})
    writer.close(ok=True)
    [began] = fake.began
    assert (began["project"], began["mode"], began["config"]) == ("grpo", "offline", {"lr": 1e-3})
    assert (began["dir"], began["name"], began["tags"]) == (str(tmp_path), "one", ["a", "b"])
    assert fake.told == [(1, {"reward": 0.5}), 0]


SAMPLES = {"samples/gen": [{"step": 1, "row": 0, "completion": "a|b\nc", "reward": 0.5}, {"step": 1, "row": 1, "talk": {"n": 1}}]}


def test_samples_are_a_table(fake: Recorded, tmp_path: Path) -> None:
    writer = Wandb(tmp_path, 1, "offline", LABELS)
    writer.write_tables(1, SAMPLES)
    columns, rows = ["step", "row", "completion", "reward", "talk"], [[1, 0, "a|b\nc", 0.5, None], [1, 1, None, None, '{"n": 1}']]
    assert fake.told == [(1, {"samples/gen": (columns, rows)})] and table([]) == ([], [])


def test_samples_are_a_text_of_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(tmp_path, 1)
    writer.write_tables(1, SAMPLES)
    writer.write(1, {"reward": 0.5})
    writer.close(ok=True)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (text,) = board.Tensors("samples/gen/text_summary")
    assert "| 1 | 0 | a\\|b<br>c | 0.5 |  |" in text.tensor_proto.string_val[0].decode()


SPREAD = {"gap": Histogram(-1.0, 1.0, 2, 0, 1, (3, 1))}


def test_histograms_are_those_of_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(tmp_path, 1)
    writer.write_histograms(4, SPREAD)
    writer.close(ok=True)
    (found,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Histograms("gap")
    value = found.histogram_value
    assert found.step == 4 and list(value.bucket_limit) == [0.0, 1.0] and list(value.bucket) == [3.0, 1.0]
    assert (value.min, value.max, value.num, value.sum) == (-1.0, 1.0, 4.0, -1.0)


@pytest.mark.thorough
def test_histograms_are_those_of_wandb(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    writer = Wandb(tmp_path, 1, "offline", LABELS)
    told = []
    writer._run = SimpleNamespace(log=lambda values, step: told.append((values, step)))  # type: ignore[assignment]
    writer.write_histograms(4, SPREAD)
    ((values, step),) = told
    found = values["gap"]
    assert isinstance(found, wandb.Histogram) and step == 4
    assert (list(found.histogram), list(found.bins)) == ([3, 1], [-1.0, 0.0, 1.0])
    wandb.finish()


def test_wandb_hears_of_a_failure(fake: Recorded, tmp_path: Path) -> None:
    Wandb(tmp_path, 1, "online", LABELS).close(ok=False)
    assert fake.told == [1]


def test_a_run_that_goes_on_is_the_same_run_of_wandb(fake: Recorded, tmp_path: Path) -> None:
    for step in (1, 7, 1):
        Wandb(tmp_path, step, "offline", LABELS)
    first, again, anew = (began["id"] for began in fake.began)
    assert first == again != anew


def test_wandb_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Recorded("api_key not configured\n(no-tty)"))
    with pytest.raises(Failure) as failure:
        Wandb(tmp_path, 1, "online", LABELS)
    [said] = failure.value.diagnostics
    assert said.code == "RL0787" and "api_key not configured (no-tty)" in said.title and "offline" in said.help


def test_wandb_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    writer = Wandb(tmp_path / "out", 1, "offline", LABELS)
    writer.write(1, {"reward": 0.5})
    writer.write(2, {"reward": 0.75})
    writer.close(ok=True)
    [stored] = (tmp_path / "out/wandb").glob("offline-run-*/run-*.wandb")
    end = time.monotonic() + 60  # its own process writes
    while b"reward" not in stored.read_bytes() and time.monotonic() < end:
        time.sleep(0.05)
    assert b"reward" in stored.read_bytes()


@pytest.mark.parametrize("package, make, extra", [
    ("wandb", lambda out: Wandb(out, 1, "offline", LABELS), "rldsl[wandb]"),
    ("tensorboard", lambda out: TensorBoard(out, 1), "rldsl[tensorboard]")])
def test_packages_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, make: Any,
                                     extra: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Failure) as failure:
        make(tmp_path)
    [said] = failure.value.diagnostics
    assert said.code == "RL0782" and package in said.title and extra in said.help
    assert not list(tmp_path.iterdir())


def test_tensorboard_in_a_place_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(Failure, match="RL0708"):
        TensorBoard(tmp_path, 1)


def test_lines_of_the_steps_before_stay(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"step": 1, "t": "a\u2028b"}\n{"step": 2}\n{"step": 3}\n{"ste', encoding="utf-8")
    truncate(file, 3)
    assert file.read_text(encoding="utf-8") == '{"step": 1, "t": "a\u2028b"}\n{"step": 2}\n'
    truncate(file, 1)
    assert file.read_text() == ""


@pytest.mark.parametrize("step", [1, 5])
def test_a_file_that_is_not_there_begins_empty(tmp_path: Path, step: int) -> None:
    truncate(tmp_path / "x.jsonl", step)
    assert (tmp_path / "x.jsonl").read_text() == ""


def test_lines_that_are_none_of_ours_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    odd = ["{step: 1}", "[]", "3", '{"t": 1}', '{"step": "1"}', '{"step": true}', '{"step": -1}', "[" * 100_000, ""]
    file.write_text("".join(f"{line}\n" for line in ['{"step": 1}', *odd, '{"step": 2}']))
    with file.open("ab") as opened:
        opened.write(b'{"step": 1, "t": "\xff\xfe"}\n\xff\n')
    truncate(file, 3)
    assert [json.loads(line)["step"] for line in file.read_text(encoding="utf-8").splitlines()] == [1, 2, 1]
