"""Copies that are not kept, in runs: the same numbers, and memory that is really given back."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl import api
from rldsl.memory import curves
from rldsl.memory.curve import each_rank, points
from rldsl.plan.codec import encode
from rldsl.plan.events import Free, Generate, Train
from rldsl.plan.projection import event_paths
from tests.copies.programs import program
from tests.end_to_end.programs import Metrics, run_program
from tests.memory.accounting import measured
from tests.samples import thorough_between
from tests.tiny import make_all


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


def two(flow: str, keep: bool) -> str:
    """On two ranks."""
    text = program(flow, keep).replace("gpus=4", "gpus=2").replace("mesh(0:4)", "mesh(0:2)")
    return text.replace("dp=2 tp=2", "tp=2").replace("dp=4", "dp=2")


def run(folder: Path, flow: str, keep: bool) -> Metrics:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "copies.rlf").write_text(two(flow, keep))
    return run_program(folder / "copies.rlf", {}, folder / "run")


@pytest.mark.parametrize("flow", thorough_between(["twice", "repeat", "sync"]))
def test_numbers_are_those_of_copies_that_are_kept(flow: str, tiny: Path, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    kept, dropped = (run(tmp_path / str(keep), flow, keep) for keep in (True, False))
    assert dropped == kept and len(kept) == 2 and any("loss" in name for name in kept[0])


def test_the_memory_is_given_back(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages that live, counted as torch makes them: a free gives back what the plan says, in each step."""
    monkeypatch.chdir(tiny)
    held: dict[bool, list[int]] = {}
    for keep in (True, False):
        path = tmp_path / f"{keep}.rlf"
        path.write_text(two("step", keep))
        plan = api.compile(str(path))
        found = measured(encode(plan), tmp_path / f"out {keep}", 2)
        train = next(e for e, _ in event_paths(plan) if isinstance(e, Train))
        held[keep] = [m.events[train.id][0] for m in found]
        copy = next(e for e, _ in event_paths(plan) if isinstance(e, Generate)).reads[0]
        frees = [e for e, _ in event_paths(plan) if isinstance(e, Free) and copy in e.buffers]
        assert len(frees) == (not keep)
        for e in frees:
            for rank, curve in each_rank(curves(plan, "cpu")):
                before, _, after = found[rank].events[e.id]
                said = next(p for p in points(curve) if p.event == e.id)
                assert before - after == pytest.approx(said.before - said.after, rel=0.01) and before > after
    size = 4 * 2 * 1000  # the copy is larger than that
    assert all(a - b > size for a, b in zip(held[True], held[False]))
