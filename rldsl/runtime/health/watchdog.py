"""When a rank fails, all stop within seconds, and one clear message says which rank and where.

Every rank leaves signs of life (`runtime/health/heartbeats.py`), with the event that it is at, and looks there for the
name of a rank that has failed. A rank that dies without a word (killed, out of memory) is the one whose signs stay the
same. torchrun answers such a death with SIGTERM to all others, at once; the watcher catches it, so that they can still
say why they stop. Each also looks after the rank that follows it, which may be in no connection with it, or on another
machine. Where the ranks were and who waited for whom (`postmortem/analysis.py`) is part of the message; each rank that
still can leaves a dump of what it did last. """

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.naming import Labels
from rldsl.plan.visible_plan import visible_plan
from rldsl.postmortem.analysis import LOST_CONTACT, Findings, analyse, rank_traces
from rldsl.postmortem.dumps import Heartbeat, RankDump, RankPosition
from rldsl.postmortem.dumps import LastHeartbeats as LastSigns
from rldsl.postmortem.findings_text import event_text
from rldsl.report import render
from rldsl.runtime.health import stack_trace
from rldsl.runtime.health.dump_files import write_dump
from rldsl.runtime.health.event_ring import EventRing
from rldsl.runtime.health.failure_messages import describe_other_ranks, describe_own_error, tell_torchrun
from rldsl.runtime.health.heartbeats import Heartbeats, PeerMonitor, StallDetector
from rldsl.runtime.plan_file import PlanFile

BEAT, SILENCE = 0.5, 2.5  # seconds between signs of life; without one for so long a rank counts as silent
FAR = 60.0  # seconds for which ranks of several machines stand still before a silent one counts as gone
FAR_LATE = 300.0  # the same where a rank that works on its device looks like one that stands still
INTERRUPTED = 128 + signal.SIGINT  # as a shell reports it
LAST = 20.0  # seconds in which a rank that ends must come further or be gone, whatever the store does


class Watchdog:
    """One rank's watcher. ring: what the rank does. out: the directory of the run, once it may write there."""

    def __init__(self, store: Any, rank: int, world: int, plan: PlanFile | None = None, timeout: float = math.inf,
                 late: bool = False):
        """On the main thread only: it takes over SIGTERM. timeout: seconds that a rank waits
        for another. late: posts run behind Python, and the library ends the process when one takes too long."""
        self.signs, self.rank, self.world = Heartbeats(store, rank, world), rank, world
        self.ring = EventRing()
        self.out: Path | None = None
        self.lock: Any = None  # of the run directory (`metrics/run_lock.py`): released at the end
        self.stops_after_step = False  # a run with checkpoints ends by itself, after the step
        self.stop_requested = False  # SIGTERM came
        self.interruption: Callable[[], str] | None = None  # ends the run's record; the line that says how to resume
        self._interrupted = False  # SIGINT came
        self._plan, self._timeout, self._late = plan, timeout, late
        self._fell: stack_trace.Stack | None = None  # where the main thread was when it failed
        self._done, self._ending = threading.Event(), threading.Lock()
        self._until, self._slow, self._limited = math.inf, "", False
        # a main thread that waits for a peer in C++ runs no handler: the wake-up descriptor reaches the watcher anyway
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._before = (signal.signal(signal.SIGTERM, lambda *_: None),
                        signal.set_wakeup_fd(self._wake_write.fileno()))
        self._thread = threading.Thread(target=self._run, name="rldsl-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch, and give SIGTERM back."""
        self._done.set()
        self._thread.join(timeout=4 * BEAT)
        signal.set_wakeup_fd(self._before[1])
        signal.signal(signal.SIGTERM, self._before[0])
        self._wake_read.close()
        self._wake_write.close()

    def fail(self, error: BaseException) -> NoReturn:
        """Say what went wrong, once, and end this process."""
        if self._interrupted or isinstance(error, KeyboardInterrupt):
            self.interrupt()
        self._fell = stack_trace.of_error(error.__traceback__)
        said = describe_own_error(error, self.rank, self._where())
        if any(d.code == "RL0799" for d in said):
            traceback.print_exception(error)
        if said:
            self._stop(said)
        if isinstance(error, Failure):  # another rank has the words
            self._blame("a rank failed")
        self._blame("another rank exited without an error message", " ".join(str(error).split())[:300])

    def interrupt(self) -> NoReturn:
        """End this process after Ctrl-C, which every rank gets; rank 0 says where the run was."""
        self._ending.acquire()
        self._limit()
        if self.rank == 0:
            line = self.interruption() if self.interruption is not None else ""
            print(line or "interrupted before the first step", file=sys.stderr, flush=True)
        else:
            time.sleep(3 * BEAT)  # let the others see their own signal before they miss this rank
        self._leave(INTERRUPTED)

    def _blame(self, otherwise: str, said: str = "", asked: bool = False) -> NoReturn:
        """Name the ranks that are silent, or those that the others wait for; stop (`blame.others`)."""
        attempt = 0
        self._limit()
        while not self.signs.looks(attempt):
            self._pass(2 * SILENCE)  # whoever looks will speak, unless it ends too
            attempt += 1
        before = self.signs.all()
        signs = self.signs.compared(before, self._pass(SILENCE))
        self._limit("finding out which rank waited for which took too long")
        findings = self._findings(signs)
        self._stop((describe_other_ranks(findings, otherwise, self._where(), said, asked, self._more()),), signs)

    def _pass(self, seconds: float) -> float:
        """Let so much time pass, alive; stop as soon as another rank has said why. The seconds that it was."""
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < seconds:
            self.signs.beat(self._stand())
            if self.signs.failed():
                self._follow()
            self._limit()
            time.sleep(BEAT / 2)
        return passed

    def _run(self) -> None:
        due, attempt, next_rank, stillness = self._timeout, 0, PeerMonitor(self.signs), StallDetector(self._late)
        while not self._done.is_set():
            stand = self._stand()
            self.signs.beat(stand)
            if self.signs.failed():
                self._follow()
            still = stillness.seconds(stand)
            if self.ring.walks and next_rank.gone(SILENCE, FAR_LATE if self._late else FAR, still):
                self._blame(f"rank {next_rank.rank} exited without an error message")
            if stand.seconds < self._timeout:
                due, attempt = self._timeout, 0
            elif stand.seconds >= due:
                due += max(4 * BEAT, self._timeout / 8)
                self._overdue(stand, attempt)
                attempt += 1
            signals = self._wake_read.recv(64) if select.select([self._wake_read], [], [], BEAT)[0] else b""
            if signal.SIGINT in signals:
                self._interrupted = True
                time.sleep(2 * BEAT)  # the main thread ends by its KeyboardInterrupt, unless it waits in C++
                self.interrupt()
            if signal.SIGTERM in signals:
                if not self.stops_after_step:
                    self._blame("the run was asked to stop (SIGTERM)", asked=True)
                self.stop_requested = True

    def _overdue(self, stand: RankPosition, attempt: int) -> None:
        """This rank has not come further for as long as a rank may wait: stop, if it is others that it waits for. One
        of all ranks that stand here looks, for all that are overdue."""
        if stand.phase == "start-up":  # its seconds include its own preparations; the library counts those of waiting
            return
        if not self.signs.judges(stand, attempt):
            return
        findings = self._findings(self.signs.all())
        if findings is None:
            return
        waited = {rank for wait in findings.waits for rank in wait.ranks}
        overdue = [t.rank for t in findings.traces if t.rank in waited and t.stand and t.stand.seconds >= self._timeout]
        if overdue:
            rank = self.rank if self.rank in overdue else overdue[0]
            self._blame(f"rank {rank} waited more than {self._timeout:g} s for other ranks")

    def disown(self, diagnostic: Diagnostic) -> NoReturn:
        """End the run, from any thread, because its directory belongs to another one: nothing more is written there."""
        self.out = None
        self._stop((diagnostic,))

    def _leave(self, status: int = 1) -> NoReturn:
        if self.lock is not None:
            self.lock.release()
        _leave(status)

    def _limit(self, slow: str = "") -> None:
        """From now on the process ends within some seconds, even when the store does not answer; the next call gives it
        as many again. slow: what is to blame then, where it is not the store."""
        self._until, self._slow = time.monotonic() + LAST, slow
        if not self._limited:
            self._limited = True
            threading.Thread(target=self._ends, name="rldsl-ends", daemon=True).start()

    def _ends(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            time.sleep(min(left, BEAT))
        why = self._slow or f"the rendezvous store{', or its disk,' if self.out else ''} does not respond"
        advice = self._more() if self._slow else (
            "the machine of torchrun's rendezvous endpoint, or the file system of `--out`, is down or unreachable")
        print(render((Diagnostic("RL0709", why, place=self._where(), help=advice),)), file=sys.stderr, flush=True)
        last = threading.Thread(target=self._last_words, args=(why,), daemon=True)
        last.start()
        last.join(4 * BEAT)
        _leave(1)

    def _last_words(self, why: str) -> None:
        """As far as the store and the disk allow."""
        if self._slow:
            self.signs.fails("")  # so that no other begins the same work
        self._dump("RL0709", why, False)

    def _follow(self) -> NoReturn:
        """Stop because another rank failed; one of those that follow says so."""
        self._ending.acquire()  # never released: the first thread to get here ends the process
        self._limit()
        rank, _, where = self.signs.failed().partition("|")
        self._dump("", f"rank {rank} ended the run", False)
        if self.signs.says():
            at = f": rank {rank} failed at {where}" if where else ""  # without: it has told of others
            print("; ".join(x for x in (f"all ranks stopped{at}", self._more()) if x),
                  file=sys.stderr, flush=True)
        self._leave()

    def _stop(self, diagnostics: tuple[Diagnostic, ...], signs: dict[int, Heartbeat] | None = None) -> NoReturn:
        """signs: of all ranks, where they have been looked at."""
        self._ending.acquire()
        self._limit()
        said = diagnostics[0]
        first = self.signs.fails("" if said.code == LOST_CONTACT else self._where())
        if first:
            print(render(diagnostics, sys.stderr.isatty()), file=sys.stderr, flush=True)
            tell_torchrun(render(diagnostics))
        self._dump(said.code, said.title, first)
        if first and self.world > 1:
            time.sleep(3 * BEAT)  # the store may live in this process; let the others read it
            held = self.signs.all() if signs is None else signs
            if self.out is not None and held:  # without a store nothing is known: what others wrote stays
                write_dump(self.out, LastSigns(self._plan_id(), self.signs.start, self.rank, round(time.time(), 3),
                                          tuple(sorted(held.items()))))
        self._leave()

    def _dump(self, code: str, reason: str, first: bool) -> None:
        if self.out is None:
            return
        lines = (self._fell or stack_trace.of_main()).lines
        write_dump(self.out, RankDump(self._plan_id(), self.signs.start, self.rank, self.world, self.signs.machine,
                             os.getpid(), round(time.time(), 3), first, code, reason, self._stand(), lines, self._late,
                             self.ring.entries()))

    def _stand(self) -> RankPosition:
        """Where this rank is; what it failed in, once it has."""
        return self.ring.stand("" if self._late else (self._fell or stack_trace.of_main(whole=False)).call)

    def _plan_id(self) -> str:
        return self._plan.id if self._plan is not None else ""

    def _findings(self, signs: dict[int, Heartbeat]) -> Findings | None:
        """None: without a plan, or where the store does not even know this rank."""
        if self._plan is None or self.rank not in signs:
            return None
        return analyse(visible_plan(self._plan.plan), rank_traces(self.world, {}, signs))

    def _more(self) -> str:
        return f"to see where each rank was, run `rlc postmortem {self.out}`" if self.out is not None else ""

    def _where(self) -> str:
        event = self.ring.event
        if event is None:
            return "start-up"
        known = self._plan.plan if self._plan is not None else None
        return event_text(Labels.of(known.values, known.frames).event(event) if known is not None else event)


def _leave(status: int) -> NoReturn:
    """Communication threads may hang in a dead peer, so the process ends without them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
