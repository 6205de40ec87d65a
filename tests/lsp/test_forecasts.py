"""The queue of forecasts: the newest question of a file alone, an answer for everything, and no end with a worker."""

from __future__ import annotations

import asyncio

import pytest

from rldsl.lsp import forecasts
from rldsl.lsp.forecast import Forecast, Question
from rldsl.lsp.forecasts import Forecasts

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "QUIET", 0.05)


class Slow(Forecasts):
    """Answers after a moment with the text of the question; `asked` is what it was asked."""

    def __init__(self, fault: Exception | None = None, wait: float = 0.05) -> None:
        super().__init__(self.count)
        self.asked: list[str] = []
        self.times, self.fault, self.wait = 0, fault, wait

    def count(self) -> None:
        self.times += 1

    async def _ask(self, question: Question) -> Forecast:
        self.asked.append(question.text)
        await asyncio.sleep(self.wait)
        if self.fault is not None:
            raise self.fault
        return Forecast(machine=question.text)


async def settled(queue: Forecasts) -> None:
    async with asyncio.timeout(20):
        assert queue._work is not None
        await queue._work


async def test_an_answer_is_there_after_it_was_told() -> None:
    queue = Slow()
    assert queue.of(Question("a", "1")) is None
    await settled(queue)
    assert (queue.of(Question("a", "1")), queue.times) == (Forecast(machine="1"), 1)
    assert queue.of(Question("a", "1", cluster="h100x8")) is None  # another question
    await queue.close()


async def test_what_was_written_over_is_not_asked() -> None:
    queue = Slow()
    for text in "123":
        queue.of(Question("a", text))
        await asyncio.sleep(0)
    queue.of(Question("b", "other"))
    await settled(queue)
    assert sorted(queue.asked) == ["3", "other"] and queue.times == 2


async def test_a_text_that_changes_while_it_is_asked_about_is_asked_about_again() -> None:
    queue = Slow()
    queue.of(Question("a", "1"))
    while not queue.asked:
        await asyncio.sleep(0.01)
    queue.of(Question("a", "2"))
    await settled(queue)
    assert queue.asked == ["1", "2"] and queue.of(Question("a", "2")) == Forecast(machine="2")
    assert queue.of(Question("a", "1")) is None
    await queue.close()


@pytest.mark.parametrize("fault", [OSError("gone"), ValueError("no JSON"), KeyError("calls"), TypeError("more")])
async def test_a_worker_that_fails_leaves_a_reason_and_no_silence(fault: Exception) -> None:
    queue = Slow(fault)
    queue.of(Question("a", "1"))
    await settled(queue)
    found = queue.of(Question("a", "1"))
    assert found is not None and "the forecast failed" in found.why


async def test_a_worker_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "MAX_SECONDS", 0.05)
    queue = Slow(wait=60)
    queue.of(Question("a", "1"))
    await settled(queue)
    found = queue.of(Question("a", "1"))
    assert found is not None and found.why.startswith("no answer in")


async def test_after_a_clear_everything_is_asked_again() -> None:
    queue = Slow()
    queue.of(Question("a", "1"))
    await settled(queue)
    queue.clear()
    assert queue.of(Question("a", "1")) is None
    await settled(queue)
    assert queue.asked == ["1", "1"]


@pytest.mark.parametrize("fault", [None, OSError("gone")])
async def test_an_answer_that_was_made_of_older_files_is_dropped(fault: Exception | None) -> None:
    queue = Slow(fault)
    queue.of(Question("a", "1"))
    while not queue.asked:
        await asyncio.sleep(0.01)
    queue.clear()
    assert queue.times == 0
    await settled(queue)
    assert queue.asked == ["1", "1"] and queue.times == 1
    assert queue.of(Question("a", "1")) is not None


async def test_a_real_worker_that_is_killed_is_started_again() -> None:
    queue = Forecasts(lambda: None)
    queue.of(Question("a.rlf", "flow f("))
    await settled(queue)
    assert queue._worker is not None
    queue._worker.kill()
    await queue._worker.communicate()
    queue.of(Question("a.rlf", "flow g("))
    await settled(queue)
    found = queue.of(Question("a.rlf", "flow g("))
    assert found is not None and "unclosed" in found.why
    await queue.close()


async def test_closing_does_not_wait_for_an_answer() -> None:
    queue = Forecasts(lambda: None)
    queue.of(Question("a.rlf", "flow f("))
    while queue._worker is None:
        await asyncio.sleep(0.01)
    worker = queue._worker
    async with asyncio.timeout(5):
        await queue.close()
    assert worker.returncode is not None and queue._worker is None
