"""When a rank fails, all stop within seconds, and one clear message says which rank and where.

Every rank leaves a sign of life in the rendezvous store, with the event that it is at, and looks there for the name of
a rank that has failed. A rank that dies without a word (killed, out of memory) is the one whose signs stay the same:
counters are compared, never clocks of different machines. torchrun answers such a death with SIGTERM to all others,
at once; the watcher catches it, so that they can still say why they stop.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.events import Event
from rldsl.report import render

BEAT, SILENCE = 0.5, 2.5  # seconds between signs of life; without one for so long a rank counts as dead
_FAILED, _SAID, _ALIVE = "rldsl/failed", "rldsl/said", "rldsl/alive/"


class Watch:
    """One rank's watcher. `at` is the event that the rank is executing."""

    def __init__(self, store: Any, rank: int, world: int):
        """On the main thread only: it takes over SIGTERM."""
        self.store, self.rank, self.world = store.clone() if hasattr(store, "clone") else store, rank, world
        self.at: Event | None = None
        self.waits, self.asked = False, False  # a run with checkpoints ends by itself, after the step; asked: SIGTERM came
        self._done, self._ending, self._beats = threading.Event(), threading.Lock(), 0
        # a main thread that waits for a peer in C++ runs no handler: the wake-up descriptor reaches the watcher anyway
        self._bell, ring = socket.socketpair()
        ring.setblocking(False)
        self._ring = ring
        self._before = signal.signal(signal.SIGTERM, lambda *_: None), signal.set_wakeup_fd(ring.fileno())
        self._thread = threading.Thread(target=self._run, name="rldsl-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch, and give SIGTERM back."""
        self._done.set()
        self._thread.join(timeout=4 * BEAT)
        signal.set_wakeup_fd(self._before[1])
        signal.signal(signal.SIGTERM, self._before[0])
        self._bell.close()
        self._ring.close()

    def fail(self, error: BaseException) -> NoReturn:
        """Say what went wrong, once, and end this process."""
        if isinstance(error, Failure) and error.diagnostics:
            self._stop(error.diagnostics)
        if isinstance(error, Failure):  # another rank has the words
            self._blame("a rank failed")
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            self._stop((Diagnostic("RL0707", f"rank {self.rank} is out of memory", place=self._where(),
                                   help="give the call a larger mesh, more tp or pp, a smaller mbs, or offload=true"),))
        if not lost_contact(error):
            import traceback

            traceback.print_exc()
            self._stop((Diagnostic("RL0799", f"internal error (please report): {type(error).__name__}: {error}",
                                   place=self._where()),))
        self._blame("another rank stopped without a word", " ".join(str(error).split())[:300])

    def _blame(self, otherwise: str, said: str = "") -> NoReturn:
        """Name the rank whose signs of life stay the same; stop. said: by the communication library."""
        before, until = self._signs(), time.monotonic() + SILENCE
        while time.monotonic() < until:  # time for the culprit's own words, too
            self._beat()
            if self._failed():
                self._follow()
            time.sleep(BEAT / 2)
        silent = {r: sign for r, sign in self._signs().items() if r != self.rank and before.get(r) == sign}
        title = otherwise
        if silent:
            title = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))} stopped without a word"
        places = dict.fromkeys(sign.partition("|")[2] for sign in silent.values())
        self._stop((Diagnostic("RL0709", title, place=", ".join(places) or self._where(), help=(
            "killed from outside, or out of memory? the system's log knows; " if silent else "")
            + "checkpoints that were written are whole", notes=(f"the library said: {said}",) if said else ()),))

    def _run(self) -> None:
        try:
            while not self._done.is_set():
                self._beat()
                if self._failed():
                    self._follow()
                if select.select([self._bell], [], [], BEAT)[0] and signal.SIGTERM in self._bell.recv(64):
                    if not self.waits:
                        self._blame("the run was asked to stop (SIGTERM)")
                    self.asked = True
        except Exception:  # the store went away: the main thread meets the same end and reports it
            return

    def _beat(self) -> None:
        self._beats += 1
        self.store.set(f"{_ALIVE}{self.rank}", f"{self._beats}|{self._where()}")

    def _signs(self) -> dict[int, str]:
        """The latest sign of life of each rank that ever gave one."""
        try:
            keys = {r: f"{_ALIVE}{r}" for r in range(self.world)}
            return {r: self.store.get(key).decode() for r, key in keys.items() if self.store.check([key])}
        except Exception:
            return {}

    def _failed(self) -> bool:
        try:
            return self.store.check([_FAILED])
        except Exception:
            return False

    def _follow(self) -> NoReturn:
        """Stop because another rank failed; one of those that follow says so."""
        rank, _, where = self.store.get(_FAILED).decode().partition("|")
        if self._first(_SAID):
            at = f" at {where}" if where else ""
            print(f"all ranks stopped: rank {rank} failed{at}", file=sys.stderr, flush=True)
        _leave()

    def _stop(self, diagnostics: tuple[Diagnostic, ...]) -> NoReturn:
        self._ending.acquire()  # never released: the first thread to get here ends the process
        try:
            first = self._first(_FAILED, f"{self.rank}|{self._where()}")
        except Exception:  # no store: better said twice than never
            first = True
        if first and diagnostics:
            print(render(diagnostics, sys.stderr.isatty()), file=sys.stderr, flush=True)
        if first:
            time.sleep(3 * BEAT if self.world > 1 else 0)  # the store may live in this process; let the others read it
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
