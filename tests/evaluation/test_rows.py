"""Which rows an evaluation reads, and what is said where ranks or plans do not agree with the file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rldsl.diag import Failure
from rldsl.plan.events import When, Fetch, Loop
from rldsl.plan.model import Data
from rldsl.runtime.data import Source
from rldsl.runtime.interpreter import eval_loops
from rldsl.runtime.state.data_reader import DataReader

DATA = Data("heldout", "jsonl", "heldout.jsonl", "prompts", 3, (), "models/sft", shuffle=True)
FETCH = Fetch(id=1, mesh="m0", data="heldout", frames=("p",))


def context(trips: int = 4) -> Any:
    loop = Loop("repeat1", trips, (FETCH,), over="heldout")
    return SimpleNamespace(data={"heldout": DATA}, device=torch.device("cpu"),
                           plan=SimpleNamespace(body=(Loop("steps", 4, (When(2, (loop,)),)),)))


def reader(rows: int) -> DataReader:
    return DataReader(context(), {"heldout": Source(DATA, range(rows), None, 1.0)})  # type: ignore[arg-type]


def step(evaluated_source: str = "heldout", iteration: int = 0) -> Any:
    return SimpleNamespace(evaluated_source=evaluated_source, iteration=iteration)


def batches(rows: int, times: int) -> list[list[int]]:
    out = []
    for i in range(times):
        source, number = eval_loops.next_rows(step(iteration=i), reader(rows), FETCH.data)
        out.append(source.batch(number, 7))
    return out


@pytest.mark.parametrize("rows", [3, 4, 5, 6, 8, 9])
def test_every_row_once_in_the_order_of_the_file(rows: int) -> None:
    times = eval_loops.num_iterations(reader(rows), Loop("x", 4, (), over="heldout"))
    assert times == -(-rows // 3)
    assert [r for b in batches(rows, times) for r in b] == list(range(rows))


def test_training_keeps_its_place() -> None:
    here = reader(8)
    eval_loops.next_rows(step(), here, FETCH.data)
    assert here.position == {}


def test_the_same_source_in_training_goes_on_by_itself() -> None:
    here, outside = reader(9), step("")
    assert [eval_loops.next_rows(outside, here, FETCH.data)[1] for _ in range(3)] == [0, 1, 2]
    assert not isinstance(eval_loops.next_rows(outside, here, FETCH.data)[0], eval_loops.InOrderSource)


def checked(rows: int, others: list[int], monkeypatch: pytest.MonkeyPatch, trips: int = 4) -> str:
    """The title of the failure, or "". others: rows that other ranks see; -1 where they take no part."""
    here = context(trips)
    monkeypatch.setattr(eval_loops, "all_gather", lambda mine: torch.tensor([[n] for n in (int(mine[0]), *others)]))
    try:
        eval_loops.check_evaluations(here, reader(rows), here.plan.body)
    except Failure as failure:
        (found,) = failure.diagnostics
        assert found.code == "RL0779" and found.place == "heldout.jsonl"
        return f"{found.title}; {found.help}"
    return ""


@pytest.mark.parametrize("others", [[], [8], [8, -1], [-1, -1]])
def test_ranks_that_agree(others: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(8, others, monkeypatch) == ""


@pytest.mark.parametrize("others", [[7], [9, 8], [-1, 0], [8, 8, 100]])
def test_ranks_that_see_other_files(others: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "every machine the same data" in checked(8, others, monkeypatch)


@pytest.mark.parametrize("rows,trips", [(4, 1), (13, 4), (1000, 333)])
def test_rows_beyond_the_room_are_an_error(rows: int, trips: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"max {-(-rows // 3)}`" in checked(rows, [], monkeypatch, trips)


@pytest.mark.parametrize("rows,trips", [(3, 1), (12, 4), (999, 333)])
def test_a_full_room_is_none(rows: int, trips: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(rows, [], monkeypatch, trips) == ""
