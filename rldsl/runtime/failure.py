"""When a rank fails, all stop within seconds, and one clear message says which rank and where.

Every rank leaves a sign of life in the rendezvous store each second, and looks there for the name of a rank that has
failed. A rank that dies without a word (killed, out of memory) is named by its missing signs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, NoReturn

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.model import Event
from rldsl.report import render

BEAT, SILENCE = 1.0, 3.5  # seconds between signs of life; without one for so long a rank counts as dead
_FAILED, _SAID, _ALIVE = "rldsl/failed", "rldsl/said", "rldsl/alive/"


class Watch:
    """One rank's watcher. `at` is the event that the rank is executing."""

    def __init__(self, store: Any, rank: int, world: int):
        self.store, self.rank, self.world = store.clone() if hasattr(store, "clone") else store, rank, world
        self.at: Event | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rldsl-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join(timeout=2 * BEAT)

    def fail(self, error: BaseException) -> NoReturn:
        """Say what went wrong, once, and end this process."""
        if isinstance(error, Failure):
            self._stop(error.diagnostics)
        if not lost_contact(error):
            import traceback

            traceback.print_exc()
            self._stop((Diagnostic("RL0799", f"internal error (please report): {type(error).__name__}: {error}",
                                   place=self._where()),))
        until = time.monotonic() + SILENCE + 2 * BEAT  # time for the culprit's own words, or for its silence to show
        while time.monotonic() < until:
            if self._failed():
                self._follow()
            time.sleep(0.2)
        silent = [r for r in range(self.world) if r != self.rank and not self._alive(r)]
        who = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}" if silent else "another rank"
        self._stop((Diagnostic("RL0709", f"{who} stopped without a word", place=self._where(),
                               help="killed from outside or out of memory? the system's log knows; checkpoints that "
                                    "were written are whole"),))

    def _run(self) -> None:
        try:
            while not self._done.wait(BEAT):
                self.store.set(f"{_ALIVE}{self.rank}", str(time.time()))
                if self._failed():
                    self._follow()
        except Exception:  # the store went away: the main thread meets the same end and reports it
            return

    def _alive(self, rank: int) -> bool:
        key = f"{_ALIVE}{rank}"
        try:
            return not self.store.check([key]) or time.time() - float(self.store.get(key)) < SILENCE
        except Exception:
            return True

    def _failed(self) -> bool:
        try:
            return self.store.check([_FAILED])
        except Exception:
            return False

    def _follow(self) -> NoReturn:
        """Stop because another rank failed; one of those that follow says so."""
        rank, _, where = self.store.get(_FAILED).decode().partition("|")
        if self._first(_SAID):
            print(f"all ranks stopped: rank {rank} failed{f' at {where}' if where else ''}", file=sys.stderr, flush=True)
        _leave()

    def _stop(self, diagnostics: tuple[Diagnostic, ...]) -> NoReturn:
        try:
            first = self._first(_FAILED, f"{self.rank}|{self._where()}")
        except Exception:  # no store: better said twice than never
            first = True
        if first and diagnostics:
            print(render(diagnostics, sys.stderr.isatty()), file=sys.stderr, flush=True)
        if first:
            time.sleep(2.5 * BEAT if self.world > 1 else 0)  # the store may live in this process; let the others read it
        _leave()

    def _first(self, key: str, value: str = "1") -> bool:
        """Whether this rank is the first to claim `key`."""
        mine = f"{value}|{self.rank}" if key == _SAID else value
        return self.store.compare_set(key, "", mine).decode() == mine

    def _where(self) -> str:
        if self.at is None:
            return "start-up"
        call = f"{getattr(self.at, 'model', '')} {type(self.at).__name__.lower()}".strip()
        return f"event {self.at.id} ({call}) {self.at.at}".strip()


def lost_contact(error: BaseException) -> bool:
    """Whether an exception of the communication library means that a peer is gone."""
    text = str(error).lower()
    signs = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "timeout",
             "socket", "gloo", "nccl", "peer")
    return isinstance(error, (RuntimeError, ConnectionError)) and any(sign in text for sign in signs)


def _leave() -> NoReturn:
    """Communication threads may hang in a dead peer, so the process ends without them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
