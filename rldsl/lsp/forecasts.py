"""Forecasts as an editor needs them: at once or not yet, and a word when there is a new one.

In: questions. Out: the forecasts that are known; others are computed one after another in a separate process,
the newest question of each file alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable

from rldsl.diag import present
from rldsl.lsp.forecast import Forecast, Question
from rldsl.lsp.worker import question_line, read_forecast

QUIET = 0.5  # seconds that a program must stay as it is: compiling is dear
MAX_SECONDS = 120.0  # for one answer
MAX_ANSWER_BYTES = 1 << 24


class Forecasts:
    """on_answer: called when a forecast has become known."""

    def __init__(self, on_answer: Callable[[], None]) -> None:
        self.on_answer = on_answer
        self.known: dict[str, tuple[Question, Forecast]] = {}
        self._wanted: dict[str, Question] = {}
        self._cleared = 0  # how often: an answer made of older files is none
        self._work: asyncio.Task[None] | None = None
        self._worker: asyncio.subprocess.Process | None = None

    def of(self, question: Question) -> Forecast | None:
        """The forecast, or None while it is being computed."""
        known = self.known.get(question.path)
        if known is not None and known[0] == question:
            return known[1]
        self._wanted[question.path] = question
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._answer())
        return None

    def clear(self) -> None:
        """Forget all forecasts: files may have changed."""
        self._cleared += 1
        self.known.clear()

    async def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        await self._kill()

    async def _answer(self) -> None:
        while self._wanted:
            path, question = next(reversed(self._wanted.items()))
            await asyncio.sleep(QUIET)
            if self._wanted[path] != question:  # written on meanwhile
                continue
            cleared = self._cleared
            try:
                found = await asyncio.wait_for(self._ask(question), MAX_SECONDS)
            except TimeoutError:
                await self._kill()
                found = Forecast(why=f"no answer in {MAX_SECONDS:.0f} s")
            except (OSError, ValueError, TypeError, KeyError) as error:
                await self._kill()
                found = Forecast(why=f"the forecast failed: {error}")
            if self._cleared != cleared:
                continue
            self.known[path] = question, found
            if self._wanted[path] == question:
                del self._wanted[path]
            self.on_answer()

    async def _ask(self, question: Question) -> Forecast:
        if self._worker is None or self._worker.returncode is not None:
            self._worker = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rldsl.lsp.worker", stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, limit=MAX_ANSWER_BYTES)
        questions = present(self._worker.stdin, "pipe to the worker", "lsp")
        answers = present(self._worker.stdout, "pipe from the worker", "lsp")
        questions.write(question_line(question))
        await questions.drain()
        return read_forecast(await answers.readline())

    async def _kill(self) -> None:
        """Kill the worker and wait for its end: once the event loop is closed it would be too late."""
        worker, self._worker = self._worker, None
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await worker.communicate()
