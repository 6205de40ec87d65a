"""Whole steps of `benchmarks/bound.py`: what runs on how many ranks, and what is said where nothing was measured.

TRL is not installed where tests run: its trainer here has the interface that `step_trl.py` uses, and trains nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import bound_measure as bound
from benchmarks import step_trl
from benchmarks.bound_least import Lengths
from benchmarks.bound_shapes import Shape
from benchmarks.bound_sides import Turn
from benchmarks.step_work import Times, Work, write_data
from tests.tiny import make_model

PHASES = dict(decode=2.0, prefill=1.0, logprobs=1.0, forward=1.0, backward=2.0, update=1.0)
SHAPE = Shape({}, 4, 2, 6, 5)
TIMES = {  # module, ranks -> two steps: one of 20 tokens, and one of 40 that takes twice as long
    ("step_ours", 1): Times([1.0, 1.0], [7.0, 14.0], [20.0, 40.0]),
    ("step_trl", 1): Times([1.0, 1.0], [14.0, 28.0], [20.0, 40.0]),
    ("step_ours", 2): Times([5.0, 10.0], [1.0, 1.0], [20.0, 40.0]),
    ("step_trl", 2): Times([20.0, 40.0], [1.0, 1.0], [20.0, 40.0]),
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int, int]]:
    """Interpreter, module, ranks and processes of what was measured. Two ranks take half of the least time of one."""
    found: list[tuple[str, str, int, int]] = []

    def measured(python: str, module: str, work: Work, processes: int, limit: float) -> Times | str:
        name = module.removeprefix("benchmarks.")
        found.append((python, name, work.ranks, processes))
        assert limit > 60 and (work.batch, work.n, work.steps) == (4, 2, 4)
        return f"Traceback\n{python}" if "broken" in python and work.ranks > 1 else TIMES[name, work.ranks]

    monkeypatch.setattr(bound, "measured", measured)
    monkeypatch.setattr(bound, "least_of_ranks", lambda *_: {name: s / 2 for name, s in PHASES.items()})
    return found


def steps(folder: Path, peer: str, ranks: int) -> dict[str, float]:
    row = bound.Row(PHASES, Turn(PHASES, 40), Turn(PHASES, 40), Lengths((5,), 1, (1,)))
    return bound.measure_steps(SHAPE, str(folder), row, folder / "step", peer, 2, ranks)


def test_trl_runs_on_as_many_ranks(started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of 20 tokens has half of the least time, 7 s; ours starts its second rank itself."""
    assert steps(tmp_path, "/peer", 2) == {"ours": 0.5, "TRL": 0.25, "2 ranks": 0.35, "TRL, 2 ranks": 3.5 / 40}
    assert started == [(sys.executable, "step_ours", 1, 1), ("/peer", "step_trl", 1, 1),
                       (sys.executable, "step_ours", 2, 1), ("/peer", "step_trl", 2, 2)]
    assert not capsys.readouterr().out


def test_without_ranks_one_process_of_each(started: list[Any], tmp_path: Path) -> None:
    assert list(steps(tmp_path, "/peer", 0)) == ["ours", "TRL"] and len(started) == 2


def test_what_was_not_measured_is_said(started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(steps(tmp_path, "", 2)) == ["ours", "2 ranks"]
    assert capsys.readouterr().out.splitlines() == [f"  {name}: not measured: no interpreter with TRL is named"
                                                    for name in ("TRL", "TRL, 2 ranks")]
    assert list(steps(tmp_path, "/broken", 2)) == ["ours", "TRL", "2 ranks"]
    assert capsys.readouterr().out == "  TRL, 2 ranks: not measured: /broken\n"


@pytest.mark.parametrize(("options", "rows"), [
    ({}, 12), (dict(ranks=2), 6), (dict(ranks=4), 3), (dict(ranks=2, updates=3), 2)])
def test_rows_of_a_rank(options: dict[str, int], rows: int) -> None:
    assert step_trl.rows_of_rank(Work("grpo", "", steps=1, batch=3, n=4, **options)) == rows  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [dict(ranks=5), dict(ranks=2, updates=4), dict(updates=5)])
def test_rows_that_cannot_be_divided(options: dict[str, int]) -> None:
    with pytest.raises(SystemExit, match="^12 sequences cannot be divided into [58] equal parts"):
        step_trl.grpo(Work("grpo", "", steps=1, batch=3, n=4, **options))  # type: ignore[arg-type]


class Trainer:
    """Asks for the rewards of its rows, of three tokens each, and then ends a step. The other rank samples as many."""

    ranks = 1
    asked: Any = None

    def __init__(self, *, args: Any, reward_funcs: Any, callbacks: Any, **_: Any):
        type(self).asked = args
        self.reward, self.callbacks = reward_funcs, callbacks
        self.accelerator = SimpleNamespace(num_processes=self.ranks, reduce=lambda x, how: self.ranks * x)

    def train(self) -> None:
        rows = self.asked.per_device_train_batch_size * self.asked.steps_per_generation
        self.callbacks[0].on_train_begin()
        for step in range(1, self.asked.max_steps + 1):
            if step % self.asked.steps_per_generation == 0:
                assert self.reward(completions=["a1"] * rows, completion_ids=[[2, 3, 4]] * rows) == [0.5] * rows
            self.callbacks[0].on_step_end(self.asked, SimpleNamespace(global_step=step), None)


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> type[Trainer]:
    for name, content in (("trl", dict(GRPOConfig=SimpleNamespace, GRPOTrainer=Trainer)),
                          ("datasets", dict(Dataset=SimpleNamespace(from_list=list)))):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for key, value in content.items():
            setattr(sys.modules[name], key, value)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    return Trainer


@pytest.mark.parametrize(("ranks", "updates", "backend"), [(1, 1, None), (2, 1, "gloo"), (2, 2, "gloo")])
def test_tokens_of_all_ranks_count(ranks: int, updates: int, backend: str | None, trl: type[Trainer], tmp_path: Path,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "models/sft", "llama")
    write_data(tmp_path, 8, 6, 5)
    monkeypatch.setattr(trl, "ranks", ranks)
    work = Work("grpo", str(tmp_path), steps=4, batch=4, n=2, prompt=6, tokens=5, ranks=ranks, updates=updates)
    found = step_trl.grpo(work)
    assert found.tokens == [24.0, 24.0] and len(found.wall) == 2
    assert trl.asked.per_device_train_batch_size == 8 // ranks // updates and trl.asked.ddp_backend == backend
    monkeypatch.setattr(trl, "ranks", 3)
    with pytest.raises(RuntimeError, match="^3 ranks found one another, not [12]$"):
        step_trl.grpo(work)
