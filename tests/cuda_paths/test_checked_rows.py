"""Rows that are not there are an error on a GPU, too, of which the host hears without waiting."""

from __future__ import annotations

import pytest
import torch

from rldsl.diag import InternalError
from rldsl.runtime import store
from rldsl.runtime.store import RaggedRows


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asserted, by the operation that a GPU runs; on the processor it raises at once."""
    asserted: list[str] = []
    real = torch._assert_async

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda")
        is_cuda = True

    def check(condition: torch.Tensor, text: str) -> None:
        asserted.append(text)
        real(condition.as_subclass(torch.Tensor), text)

    plain = store._check
    monkeypatch.setattr(store, "_check", lambda equal, text: plain(equal.as_subclass(Elsewhere), text))
    monkeypatch.setattr(torch, "_assert_async", check)
    return asserted


def held() -> RaggedRows:
    return RaggedRows(torch.tensor([1, 3, 4]), torch.tensor([2, 0, 1]), torch.tensor([10.0, 11.0, 40.0]))


def test_rows_that_are_there(gpu: list[str]) -> None:
    assert held().select(torch.tensor([1, 4])).data.tolist() == [10, 11, 40]
    assert held().select(torch.tensor([1, 3, 4])).data.tolist() == [10, 11, 40]
    assert gpu == ["requested rows are not stored here", "the requested rows differ from the stored rows"]


@pytest.mark.parametrize("rows", [[1, 2], [1, 2, 4], [5], [0]])
def test_rows_that_are_not(rows: list[int], gpu: list[str]) -> None:
    with pytest.raises(RuntimeError, match="rows"):
        held().select(torch.tensor(rows))
    assert len(gpu) == 1


@pytest.mark.parametrize("rows", [[1, 2], [1, 2, 4], [5], [0]])
def test_on_a_cpu_it_is_an_internal_error(rows: list[int]) -> None:
    with pytest.raises(InternalError, match="rows"):
        held().select(torch.tensor(rows))


def test_of_no_rows_nothing_is_there() -> None:
    empty = RaggedRows.empty(torch.float32, torch.device("cpu"))
    with pytest.raises(InternalError, match="not stored"):
        empty.gather(torch.tensor([1]))
    assert not len(empty.gather(torch.tensor([], dtype=torch.int64)).data)
