"""Signs of life: what ranks know of each other while a run goes on, in the rendezvous store.

In: where this rank is, twice a second. Out: the last sign of every rank; who failed first. Counters are compared, never
clocks of different machines. A sign that stays the same means that a rank is gone, stopped, or in a long call that
holds Python's lock; for a process on this machine the system is asked which. """

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

_FAILED, _LOOKS, _SAID = "rldsl/failed", "rldsl/looks", "rldsl/said"  # each is claimed by one rank
_ALIVE, _START, _OVERDUE = "rldsl/alive/", "rldsl/start", "rldsl/overdue/"


class Heartbeats:
    """One rank's view of the store. start: a word of this start of the run, the same on all ranks."""

    def __init__(self, store: Any, rank: int, world: int):
        self.store = store.clone() if hasattr(store, "clone") else store
        self.rank, self.world, self.machine = rank, world, machine_name()
        self.start = str(self.store.compare_set(_START, "", token_hex(8)).decode())
        self._beats = 0

    def beat(self, stand: RankPosition) -> None:
        self._beats += 1
        sign = Heartbeat(self._beats, self.machine, os.getpid(), round(time(), 3), stand)
        try:
            self.store.set(f"{_ALIVE}{self.rank}", heartbeat_text(sign))
        except RuntimeError:  # the store is gone, with the process that held it: the main thread meets the same end
            return

    def all(self) -> dict[int, Heartbeat]:
        """The latest sign of each rank that ever gave one."""
        keys = [f"{_ALIVE}{rank}" for rank in range(self.world)]
        try:
            there = range(self.world) if self.store.check(keys) else \
                [rank for rank, key in enumerate(keys) if self.store.check([key])]
            texts = self.store.multi_get([keys[rank] for rank in there]) if there else []
            return {rank: read_heartbeat(text.decode()) for rank, text in zip(there, texts, strict=True)}
        except (RuntimeError, Failure):  # the store is gone, or holds what is none of ours
            return {}

    def of(self, rank: int) -> Heartbeat | None:
        """The latest sign of one rank."""
        key = f"{_ALIVE}{rank}"
        try:
            return read_heartbeat(self.store.get(key).decode()) if self.store.check([key]) else None
        except (RuntimeError, Failure):
            return None

    def compared(self, before: Mapping[int, Heartbeat], seconds: float) -> dict[int, Heartbeat]:
        """The signs now, of which those say so that have not changed in `seconds`."""
        found = self.all()
        for rank, sign in found.items():
            if rank != self.rank and before.get(rank) == sign:
                known = process_state(sign.pid) if sign.machine == self.machine else ""
                found[rank] = replace(sign, silent=round(seconds, 1), process=known)
        return found

    def failed(self) -> str:
        """Which rank failed first, and where ("RANK|EVENT", or "RANK|"); "" while none has."""
        try:
            return str(self.store.get(_FAILED).decode()) if self.store.check([_FAILED]) else ""
        except RuntimeError:
            return ""

    def fails(self, where: str) -> bool:
        """This rank has failed; whether it is the first."""
        return self._claims(_FAILED, f"{self.rank}|{where}")

    def looks(self, attempt: int = 0) -> bool:
        """Whether this rank is the first to look who is silent, in attempt `attempt` from 0: one is enough, and all of
        them would ask too much of the store."""
        return self._claims(f"{_LOOKS}{attempt or ''}", str(self.rank))

    def judges(self, stand: RankPosition, attempt: int) -> bool:
        """The same of who is overdue, among all ranks that are in this run of an event."""
        at = "" if stand.at is None else ".".join(map(str, (stand.at.event, *stand.at.turns)))
        return self._claims(f"{_OVERDUE}{at}/{attempt}", str(self.rank))

    def says(self) -> bool:
        """Whether this rank is the first to say that all have stopped."""
        return self._claims(_SAID, str(self.rank))

    def _claims(self, key: str, mine: str) -> bool:
        """Without a store every rank is the first: better said twice than never."""
        try:
            return bool(self.store.compare_set(key, "", mine).decode() == mine)
        except RuntimeError:
            return True


class PeerMonitor:
    """The rank after this one, which this rank looks after: every rank that goes has one that notices. A death breaks
    no connection where programs run behind what they post (NCCL), and torchrun tells nobody on other machines."""

    def __init__(self, signs: Heartbeats):
        self._signs, self.rank = signs, (signs.rank + 1) % signs.world
        self._last: Heartbeat | None = None
        self._since = self._looked = monotonic()

    def gone(self, near: float, far: float, still: float) -> bool:
        """Whether it has gone. near: seconds without a sign after which the system is asked for its process. far: those
        after which one of another machine counts as gone, if this rank has stood still as well, for `still` seconds
        (`StallDetector`)."""
        now = monotonic()
        if now - self._looked < near or self.rank == self._signs.rank:
            return False
        self._looked, sign = now, self._signs.of(self.rank)
        if sign is None or sign != self._last:
            self._last, self._since = sign, now
            return False
        silent = now - self._since
        if sign.machine == self._signs.machine:
            return silent >= near and process_state(sign.pid) == "gone"
        return min(silent, still) >= far


class StallDetector:
    """How long a rank has come no further. An event can take minutes and note nothing meanwhile, so what counts is the
    time in operations between ranks alone; where programs run behind what they post (`late`, NCCL), nobody sees these,
    and it is the time since the last note."""

    def __init__(self, late: bool = False):
        self._late, self._worked = late, monotonic()

    def seconds(self, stand: RankPosition) -> float:
        """stand: where the rank is now; to be asked as often as it gives signs."""
        if stand.phase == "calls" or not stand.call:
            self._worked = monotonic()
        return stand.seconds if self._late else min(stand.seconds, monotonic() - self._worked)


def machine_name() -> str:
    """Where the numbers of processes mean the same."""
    try:
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def process_state(pid: int) -> Literal["", "running", "stopped", "gone"]:
    """What the system says of a process of this machine; "": nothing."""
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"
    except (OSError, IndexError):
        return ""
    return "gone" if state in "ZXx" else "stopped" if state in "Tt" else "running"
