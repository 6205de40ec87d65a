"""When a rank fails, all stop within seconds, and one clear message says which rank and where.

Every rank writes heartbeats (`runtime/health/heartbeats.py`), with the event that it is at, and looks there for the
name of a rank that has failed. A rank that dies without a message (killed, out of memory) is the one whose heartbeat no
longer changes. torchrun answers such a death with SIGTERM to all others, at once; the watchdog catches it, so that they
can still say why they stop. Each rank also monitors the next rank, with which it may have no connection, or which may
be on another machine, and rank 0: the store may end with it, and then tells nobody who is gone. Where the ranks were
and who waited for whom (`postmortem/analysis.py`) is part of the message. Each rank that can still do so writes a dump
of what it did last.
"""

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
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from rldsl import threads
from rldsl.diag import Diagnostic, Failure
from rldsl.plan.naming import Labels
from rldsl.plan.visible_plan import visible_plan
from rldsl.postmortem.analysis import LOST_CONTACT, Findings, analyze, rank_traces
from rldsl.postmortem.dumps import Heartbeat, LastHeartbeats, RankDump, RankPosition
from rldsl.postmortem.findings_text import event_text
from rldsl.report import render
from rldsl.runtime.health import stack_trace
from rldsl.runtime.health.dump_files import write_dump
from rldsl.runtime.health.event_ring import EventRing
from rldsl.runtime.health.failure_messages import describe_other_ranks, describe_own_error, is_rank_gone, tell_torchrun
from rldsl.runtime.health.heartbeats import FirstRank, Heartbeats, PeerMonitor, StallDetector
from rldsl.runtime.message_file import has_reader, leave, report
from rldsl.runtime.parent import has_ended
from rldsl.runtime.plan_file import PlanFile

BEAT = 0.5  # seconds between heartbeats
SILENCE = 2.5  # seconds without a new heartbeat after which a rank counts as silent
FAR = 60.0  # seconds without progress after which a silent rank of another machine counts as gone
FAR_ASYNCHRONOUS = 300.0  # the same where a rank that works on its device looks like one without progress
INTERRUPTED = 128 + signal.SIGINT  # as a shell reports it
TERMINATED_STATUS = 128 + signal.SIGTERM
TERMINATED = "SIGTERM"  # instead of an event, where ranks see that one has ended: no failure, it was asked to
SHUTDOWN_SECONDS = 20.0  # a rank that shuts down makes progress within these or is ended, whatever the store does


class Watchdog:
    """The watchdog of one rank, in a separate thread."""

    def __init__(self, store: Any, rank: int, world: int, plan: PlanFile | None = None, timeout: float = math.inf,
                 asynchronous: bool = False, agent: int | None = None, speaks: bool = True):
        """On the main thread only: it takes over SIGTERM and Ctrl-C. timeout: seconds that a rank waits for another.
        asynchronous: calls of communication return before it has run, and the library ends the process when it takes
        too long. agent: the process of torchrun's agent, whose end sends SIGTERM (`runtime/parent.py`). speaks: this
        rank, of all on its machine, reports that. Errors: RL0707, if its thread cannot be started."""
        self.heartbeats, self.rank, self.world = Heartbeats(store, rank, world), rank, world
        self.ring = EventRing()  # what this rank did last
        self.out: Path | None = None  # the directory of the run, once it may write there
        self.lock: Any = None  # of the run directory (`metrics/run_lock.py`): released at the end
        self.stops_after_step = False  # a run with checkpoints writes one and ends, after the step
        self.stop_requested = False  # SIGTERM came, and the run ends after the step
        self._is_terminated = False  # SIGTERM came, and the run ends at once
        # ends the run's record; returns the line that says how to resume. It gets "interrupted" or "terminated"
        self.interruption: Callable[[str], str] | None = None
        self._interrupted = False  # SIGINT came
        self._is_leaving = False  # the main thread is on its way out: no KeyboardInterrupt may cut that short
        self._plan, self._timeout, self._asynchronous = plan, timeout, asynchronous
        self._dump_refused = False  # by the disk
        self._first_rank = FirstRank()
        self._agent, self._speaks = agent, speaks
        self._failed_at: stack_trace.Stack | None = None  # where the main thread was when it failed
        self._known: float | None = None  # when this rank learned that the run has failed, as of time.time
        self._done, self._ending = threading.Event(), threading.Lock()
        self._deadline = math.inf  # at which this process ends, on the clock of time.monotonic
        self._slow_work = ""  # what to blame if the deadline is missed; "": the store
        self._is_limited = False  # whether a thread watches the deadline
        # a main thread that waits for a peer in C++ runs no handler: the wake-up descriptor reaches the watcher anyway
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._before = (signal.signal(signal.SIGTERM, self._note_sigterm),
                        signal.set_wakeup_fd(self._wake_write.fileno()), signal.getsignal(signal.SIGINT))
        if self._before[2] is signal.default_int_handler:  # else a shell has it ignored
            signal.signal(signal.SIGINT, self._interrupt_main)
        self._thread = threading.Thread(target=self._run, name="rldsl-watch", daemon=True)
        threads.start(self._thread, f"rank {rank}")

    def close(self) -> None:
        """End the watch, and restore what SIGTERM and Ctrl-C did before."""
        self._done.set()
        self._thread.join(timeout=4 * BEAT)
        signal.set_wakeup_fd(self._before[1])
        signal.signal(signal.SIGTERM, self._before[0])
        signal.signal(signal.SIGINT, self._before[2])
        self._wake_read.close()
        self._wake_write.close()

    def fail(self, error: BaseException) -> NoReturn:
        """Say what went wrong, once, and end this process."""
        self._is_leaving = True
        if self._interrupted or isinstance(error, KeyboardInterrupt):
            self.interrupt()
        self._stop_if_orphaned()
        self._failed_at = stack_trace.of_error(error.__traceback__)
        diagnostics = describe_own_error(error, self.rank, self._event_text())
        if any(d.code == "RL0799" for d in diagnostics):
            traceback.print_exception(error)
        if diagnostics:
            self._stop(diagnostics)
        if isinstance(error, Failure):  # another rank reports the error
            self._stop_for_others("a rank failed")
        self._stop_for_others("another rank exited without an error message", " ".join(str(error).split())[:300],
                              requested=self._is_terminated)

    def hold_if_terminated(self) -> None:
        """Called between two events: after SIGTERM, nothing more begins while the watchdog ends this process."""
        if self._is_terminated:
            threading.Event().wait()

    def _note_sigterm(self, *_: object) -> None:
        self._is_terminated = not self.stops_after_step

    def _interrupt_main(self, *_: object) -> None:
        """A terminal sends Ctrl-C to every process, and torchrun passes its own on to each rank: the second signal
        comes while the first still ends the run. If whatever runs now swallows the exception (a `__del__`, a callback
        of the garbage collector), the thread of the watchdog ends the process."""
        if not self._is_leaving:
            self._is_leaving = True
            raise KeyboardInterrupt

    def interrupt(self) -> NoReturn:
        """End this process after Ctrl-C, which every rank gets; rank 0 says where the run was."""
        self._ending.acquire()
        self._limit_shutdown()
        if self.rank == 0:
            self._say_where("interrupted")
        else:
            time.sleep(3 * BEAT)  # let the others see their own signal before they miss this rank
        self._leave(INTERRUPTED)

    def _terminate(self) -> NoReturn:
        """End this process after SIGTERM, which writes nothing: there are no checkpoints. A rank that did not get the
        signal, as on another machine, ends as soon as it sees that one did."""
        self._ending.acquire()
        self._limit_shutdown()
        self.heartbeats.report_failure(TERMINATED)
        self._leave_terminated()

    def _leave_terminated(self) -> NoReturn:
        if self.rank == 0:
            self._say_where("terminated")
        self._dump("RL0090", "the run was asked to stop (SIGTERM)", False)
        if self.rank == 0 and self.world > 1:
            time.sleep(3 * BEAT)  # the store may live in this process; let the others read it
        self._leave(TERMINATED_STATUS)

    def _say_where(self, what: str) -> None:
        """Print where the run was when a signal ended it. what: "interrupted" or "terminated"."""
        if self.interruption is None and has_reader():
            return  # whoever started the run says the same
        line = self.interruption(what) if self.interruption is not None else f"{what} before the first step"
        print(line, file=sys.stderr, flush=True)
        title, _, advice = line.partition("; ")
        leave((Diagnostic("RL0090", title, help=advice),))

    def _stop_for_others(self, default_title: str, library_message: str = "", requested: bool = False) -> NoReturn:
        """Name the ranks that are silent, or those that the others wait for, and stop (`describe_other_ranks`)."""
        attempt = 0
        if self._known is None:
            self._known = time.time()
        self._limit_shutdown()
        while not self.heartbeats.claim_search(attempt):
            self._wait_alive(2 * SILENCE)  # the rank that searches will report, unless it ends too
            attempt += 1
        before = self.heartbeats.all()
        heartbeats = self.heartbeats.mark_silent(before, self._wait_alive(SILENCE))
        self._limit_shutdown("finding out which rank waited for which took too long")
        findings = self._findings(heartbeats)
        if requested and findings is not None and not is_rank_gone(findings):
            self._terminate()
        diagnostic = describe_other_ranks(findings, default_title, self._event_text(), library_message, requested,
                                          self._postmortem_hint(), self._first_rank.is_gone())
        self._stop((diagnostic,), heartbeats)

    def _wait_alive(self, seconds: float) -> float:
        """Wait, with heartbeats; stop as soon as another rank has failed. Returns the seconds that it took."""
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < seconds:
            self.heartbeats.beat(self._position())
            if self.heartbeats.first_failure():
                self._stop_after_failure()
            self._limit_shutdown()
            time.sleep(BEAT / 2)
        return passed

    def _run(self) -> None:
        due, attempt = self._timeout, 0  # when to look for an overdue rank next; how often this rank has looked
        next_rank, stall = PeerMonitor(self.heartbeats), StallDetector(self._asynchronous)
        far = FAR_ASYNCHRONOUS if self._asynchronous else FAR
        while not self._done.is_set():
            position = self._position()
            self.heartbeats.beat(position)
            self._first_rank.find(self.heartbeats)
            if self.heartbeats.first_failure():
                self._stop_after_failure()
            stalled = stall.seconds(position)
            if self.ring.is_running and self._first_rank.is_gone() and not self.heartbeats.is_store_alive():
                self._stop_for_others("rank 0 exited without an error message")
            if self.ring.is_running and next_rank.is_gone(SILENCE, far, stalled):
                self._stop_for_others(f"rank {next_rank.rank} exited without an error message")
            if position.seconds < self._timeout:
                due, attempt = self._timeout, 0
            elif position.seconds >= due:
                due += max(4 * BEAT, self._timeout / 8)
                self._check_overdue(position, attempt)
                attempt += 1
            signals = self._wake_read.recv(64) if select.select([self._wake_read], [], [], BEAT)[0] else b""
            if signal.SIGINT in signals:
                self._interrupted = True
                time.sleep(2 * BEAT)  # the main thread ends by its KeyboardInterrupt, unless it waits in C++
                self.interrupt()
            if signal.SIGTERM in signals:
                self._stop_if_orphaned()
                self._note_sigterm()
                if not self.stops_after_step:
                    if self.world == 1:
                        self._terminate()
                    self._stop_for_others("the run was asked to stop (SIGTERM)", requested=True)
                self.stop_requested = True

    def _stop_if_orphaned(self) -> None:
        """Stop at once where torchrun's agent was killed and the rendezvous store with it: without one, ranks cannot
        complete a checkpoint or learn of each other. With a store, the run stops as SIGTERM stops it."""
        if self._agent is None or not has_ended(self._agent) or self.heartbeats.is_store_alive():
            return
        advice = ("checkpoints that were written are complete: start the run again with `--resume`",
                  self._postmortem_hint())
        self._stop((Diagnostic("RL0709", "torchrun was killed, so its ranks on this machine stop",
                               place=self._event_text(), help="; ".join(filter(None, advice))),), {}, self._speaks)

    def _check_overdue(self, position: RankPosition, attempt: int) -> None:
        """This rank has made no progress for as long as a rank may wait: stop, if it waits for others. One of all ranks
        at this position searches, for all that are overdue."""
        if position.phase == "start-up":  # includes this rank's own preparations; the library limits the waiting
            return
        if not self.heartbeats.claim_overdue_search(position, attempt):
            return
        findings = self._findings(self.heartbeats.all())
        if findings is None:
            return
        waited = {rank for wait in findings.waits for rank in wait.ranks}
        overdue = [t.rank for t in findings.traces
                   if t.rank in waited and t.position and t.position.seconds >= self._timeout]
        if overdue:
            rank = self.rank if self.rank in overdue else overdue[0]
            self._stop_for_others(f"rank {rank} waited more than {self._timeout:g} s for other ranks")

    def disown(self, diagnostic: Diagnostic) -> NoReturn:
        """End the run, from any thread, because its directory belongs to another one: nothing more is written there."""
        self.out = None
        self._stop((diagnostic,))

    def _leave(self, status: int = 1) -> NoReturn:
        if self.lock is not None:
            self.lock.release()
        _leave(status)

    def _limit_shutdown(self, slow: str = "") -> None:
        """End the process `SHUTDOWN_SECONDS` from now, even if the store does not answer. Each call starts the time
        anew. slow: what to blame if it runs out, unless it is the store."""
        self._deadline, self._slow_work = time.monotonic() + SHUTDOWN_SECONDS, slow
        if not self._is_limited:
            self._is_limited = True
            with suppress(Failure):  # without it the end may take longer, and the message is the one that is on its way
                threads.start(threading.Thread(target=self._end_at_deadline, name="rldsl-shutdown", daemon=True))

    def _end_at_deadline(self) -> None:
        while (left := self._deadline - time.monotonic()) > 0:
            time.sleep(min(left, BEAT))
        why = self._slow_work or f"the rendezvous store{', or its disk,' if self.out else ''} does not respond"
        advice = self._postmortem_hint() if self._slow_work else (
            "the machine of torchrun's rendezvous endpoint, or the file system of `--out`, is down or unreachable")
        diagnostic = Diagnostic("RL0709", why, place=self._event_text(), help=advice)
        report((diagnostic,))
        tell_torchrun(render((diagnostic,)), known=self._known)
        last = threading.Thread(target=self._last_words, args=(why,), daemon=True)
        with suppress(Failure):  # the message is out
            threads.start(last)
            last.join(4 * BEAT)
        _leave(1)

    def _last_words(self, why: str) -> None:
        """Report the failure and write a dump, as far as the store and the disk allow."""
        if self._slow_work:
            self.heartbeats.report_failure("")  # so that no other rank begins the same work
        self._dump("RL0709", why, False)

    def _stop_after_failure(self) -> NoReturn:
        """Stop because another rank failed. One of the ranks that do says so."""
        self._ending.acquire()  # never released: the first thread to get here ends the process
        self._limit_shutdown()
        rank, _, where = self.heartbeats.first_failure().partition("|")
        if where == TERMINATED:
            self._leave_terminated()
        self._dump("", f"rank {rank} ended the run", False)
        at = f": rank {rank} failed at {where}" if where else ""  # without: its message was about other ranks
        tell_torchrun(f"stopped{at}" if at else f"stopped: see the message of rank {rank}", is_cause=False)
        if self.heartbeats.claim_stop_message():
            print("; ".join(x for x in (f"all ranks stopped{at}", self._postmortem_hint()) if x),
                  file=sys.stderr, flush=True)
        self._leave()

    def _stop(self, diagnostics: tuple[Diagnostic, ...], heartbeats: dict[int, Heartbeat] | None = None,
              speaks: bool = True) -> NoReturn:
        """Report, dump and end this process. heartbeats: of all ranks, if they have been read already. speaks: False
        where another rank of this machine reports the same."""
        self._ending.acquire()
        self._limit_shutdown()
        main = diagnostics[0]
        first = self.heartbeats.report_failure("" if main.code == LOST_CONTACT else self._event_text())
        if first and speaks:
            report(diagnostics)
            tell_torchrun(render(diagnostics), known=self._known)
        self._dump(main.code, main.title, first)
        if first and self.world > 1:
            time.sleep(3 * BEAT)  # the store may live in this process; let the others read it
            latest = self.heartbeats.all() if heartbeats is None else heartbeats
            if self.out is not None and latest:  # without a store nothing is known: what others wrote stays
                write_dump(self.out, LastHeartbeats(self._plan_id(), self.heartbeats.start, self.rank,
                                                    round(time.time(), 3), tuple(sorted(latest.items()))))
        self._leave()

    def _dump(self, code: str, reason: str, first: bool) -> None:
        if self.out is None:
            return
        lines = (self._failed_at or stack_trace.of_main()).lines
        self._dump_refused = not write_dump(self.out, RankDump(
            self._plan_id(), self.heartbeats.start, self.rank, self.world, self.heartbeats.machine, os.getpid(),
            round(time.time(), 3), first, code, reason, self._position(), lines, self._asynchronous,
            self.ring.entries()))

    def _position(self) -> RankPosition:
        """Where this rank is, or where it failed."""
        if self._asynchronous:  # what the main thread is in says nothing about the communication
            return self.ring.position()
        return self.ring.position((self._failed_at or stack_trace.of_main(all_lines=False)).call)

    def _plan_id(self) -> str:
        return self._plan.id if self._plan is not None else ""

    def _findings(self, heartbeats: dict[int, Heartbeat]) -> Findings | None:
        """None without a plan, or if the store does not even know this rank."""
        if self._plan is None or self.rank not in heartbeats:
            return None
        return analyze(visible_plan(self._plan.plan), rank_traces(self.world, {}, heartbeats))

    def _postmortem_hint(self) -> str:
        """Nothing where there is no dump to look at."""
        if self.out is None or self._dump_refused:
            return ""
        return f"to see where each rank was, run `rlc postmortem {self.out}`"

    def _event_text(self) -> str:
        event = self.ring.event
        if event is None:
            return "start-up"
        plan = self._plan.plan if self._plan is not None else None
        return event_text(Labels.of(plan.values, plan.frames).event(event) if plan is not None else event)


def _leave(status: int) -> NoReturn:
    """End the process at once: communication threads may wait for a dead peer forever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
