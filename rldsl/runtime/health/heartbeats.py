"""Heartbeats: what ranks know of each other during a run, in the rendezvous store.

In: where this rank is, twice a second. Out: the last heartbeat of every rank; who failed first. Counters are compared,
never clocks of different machines. A heartbeat that no longer changes means that a rank is gone, stopped, or in a long
call that holds Python's global interpreter lock; for a process on this machine the system is asked which.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from time import monotonic, time
from typing import Any, Literal

from rldsl.diag import Failure
from rldsl.postmortem.dumps import Heartbeat, RankPosition, heartbeat_text, read_heartbeat

_FAILED, _SEARCH, _SAID = "rldsl/failed", "rldsl/looks", "rldsl/said"  # each is claimed by one rank
_ALIVE, _START, _OVERDUE = "rldsl/alive/", "rldsl/start", "rldsl/overdue/"


class Heartbeats:
    """One rank's view of the store."""

    def __init__(self, store: Any, rank: int, world: int):
        self.store = store.clone() if hasattr(store, "clone") else store
        self.rank, self.world, self.machine = rank, world, machine_name()
        # the id of this start of the run, the same on all ranks
        self.start = str(self.store.compare_set(_START, "", token_hex(8)).decode())
        self._beats = 0

    def beat(self, position: RankPosition) -> None:
        """Write this rank's next heartbeat."""
        self._beats += 1
        heartbeat = Heartbeat(self._beats, self.machine, os.getpid(), round(time(), 3), position)
        try:
            self.store.set(f"{_ALIVE}{self.rank}", heartbeat_text(heartbeat))
        except RuntimeError:  # the store is gone, with the process that held it: the main thread meets the same end
            return

    def is_store_alive(self) -> bool:
        """Whether the process that holds the store still answers."""
        try:
            return bool(self.store.check([_START]))
        except RuntimeError:
            return False

    def all(self) -> dict[int, Heartbeat]:
        """The latest heartbeat of each rank that has written one."""
        keys = [f"{_ALIVE}{rank}" for rank in range(self.world)]
        try:
            known = range(self.world) if self.store.check(keys) else \
                [rank for rank, key in enumerate(keys) if self.store.check([key])]
            texts = self.store.multi_get([keys[rank] for rank in known]) if known else []
            return {rank: read_heartbeat(text.decode()) for rank, text in zip(known, texts, strict=True)}
        except (RuntimeError, Failure):  # the store is gone, or holds something else
            return {}

    def of(self, rank: int) -> Heartbeat | None:
        """The latest heartbeat of one rank."""
        key = f"{_ALIVE}{rank}"
        try:
            return read_heartbeat(self.store.get(key).decode()) if self.store.check([key]) else None
        except (RuntimeError, Failure):
            return None

    def mark_silent(self, before: Mapping[int, Heartbeat], seconds: float) -> dict[int, Heartbeat]:
        """The heartbeats now; those that have not changed in `seconds` are marked as silent."""
        result = self.all()
        for rank, heartbeat in result.items():
            if rank != self.rank and before.get(rank) == heartbeat:
                state = process_state(heartbeat.pid) if heartbeat.machine == self.machine else ""
                result[rank] = replace(heartbeat, silent=round(seconds, 1), process=state)
        return result

    def first_failure(self) -> str:
        """Which rank failed first, and where ("RANK|EVENT", or "RANK|"); "" while none has."""
        try:
            return str(self.store.get(_FAILED).decode()) if self.store.check([_FAILED]) else ""
        except RuntimeError:
            return ""

    def report_failure(self, where: str) -> bool:
        """Report that this rank has failed. Returns whether it is the first."""
        return self._claim(_FAILED, f"{self.rank}|{where}")

    def claim_search(self, attempt: int = 0) -> bool:
        """Whether this rank is to search for silent ranks, in attempt `attempt` from 0: one rank does, since all of
        them would ask too much of the store."""
        return self._claim(f"{_SEARCH}{attempt or ''}", str(self.rank))

    def claim_overdue_search(self, position: RankPosition, attempt: int) -> bool:
        """Whether this rank, of all that are in this run of an event, is to search for overdue ranks."""
        at = "" if position.at is None else ".".join(map(str, (position.at.event, *position.at.turns)))
        return self._claim(f"{_OVERDUE}{at}/{attempt}", str(self.rank))

    def claim_stop_message(self) -> bool:
        """Whether this rank is to report that all have stopped."""
        return self._claim(_SAID, str(self.rank))

    def _claim(self, key: str, value: str) -> bool:
        """Whether this rank is the first to claim `key`. Without a store every rank is: better reported twice than
        never."""
        try:
            return bool(self.store.compare_set(key, "", value).decode() == value)
        except RuntimeError:
            return True


class PeerMonitor:
    """Monitors the next rank, so that the end of every rank is noticed by one. Where communication is asynchronous
    (NCCL) a death breaks no connection, and torchrun informs nobody on other machines."""

    def __init__(self, heartbeats: Heartbeats):
        self._heartbeats, self.rank = heartbeats, (heartbeats.rank + 1) % heartbeats.world
        self._last: Heartbeat | None = None
        self._since = self._looked = monotonic()

    def is_gone(self, near: float, far: float, stalled: float) -> bool:
        """Whether the next rank is gone. near: seconds without a heartbeat after which the system is asked for its
        process. far: seconds after which a rank of another machine counts as gone, if this rank has made no progress
        either. stalled: for how many seconds that is so (`StallDetector`)."""
        now = monotonic()
        if now - self._looked < near or self.rank == self._heartbeats.rank:
            return False
        self._looked, heartbeat = now, self._heartbeats.of(self.rank)
        if heartbeat is None or heartbeat != self._last:
            self._last, self._since = heartbeat, now
            return False
        silent = now - self._since
        if heartbeat.machine == self._heartbeats.machine:
            return silent >= near and process_state(heartbeat.pid) == "gone"
        return min(silent, stalled) >= far


class FirstRank:
    """The process of rank 0 on this machine. The store may live in it, and ends with it: then nothing else says which
    rank is gone."""

    def __init__(self) -> None:
        self._pid: int | None = None  # None: not known yet; 0: of another machine

    def find(self, heartbeats: Heartbeats) -> None:
        """Learn its process from its first heartbeat."""
        if self._pid is None and heartbeats.rank and (first := heartbeats.of(0)) is not None:
            self._pid = first.pid if first.machine == heartbeats.machine else 0

    def is_gone(self) -> bool:
        """Whether it has ended."""
        return process_state(self._pid) == "gone" if self._pid else False


class StallDetector:
    """How long this rank has made no progress. An event can take minutes without an entry in the ring, so only the time
    in operations between ranks counts. Where these return before they have run (`asynchronous`, NCCL) they cannot be
    seen, and the time since the last entry counts."""

    def __init__(self, asynchronous: bool = False):
        self._asynchronous, self._worked = asynchronous, monotonic()

    def seconds(self, position: RankPosition) -> float:
        """position: where the rank is now. Call it with every heartbeat."""
        if position.phase == "calls" or not position.call:
            self._worked = monotonic()
        return position.seconds if self._asynchronous else min(position.seconds, monotonic() - self._worked)


def machine_name() -> str:
    """The name of the machine, or of the container, inside which process ids mean the same."""
    try:
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def process_state(pid: int) -> Literal["", "running", "stopped", "gone"]:
    """The state of a process of this machine; "" if the system does not provide it."""
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"
    except (OSError, IndexError):
        return ""
    return "gone" if state in "ZXx" else "stopped" if state in "Tt" else "running"
