"""A rank looks after the next one: a death that breaks no connection, and of which nobody is told, ends the run too."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rldsl.plan.events import Free
from rldsl.postmortem.dumps import EventRun, Heartbeat, Phase, RankPosition
from rldsl.runtime.health import heartbeats as module
from rldsl.runtime.health.event_ring import EventRing
from rldsl.runtime.health.heartbeats import PeerMonitor, StallDetector
from rldsl.runtime.local_ranks import held_port
from tests.postmortem.runs import _store
from tests.world import context


def _rank(rank: int, port: int, folder: str, waits: bool, holds_store: bool = False) -> None:
    """Its main thread is in a collective that never returns and does not notice that anybody is gone, as with NCCL."""
    import torch.distributed as dist

    from rldsl.runtime.health import watchdog

    said = os.open(f"{folder}/said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(said, 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    store = dist.TCPStore("localhost", port, is_master=holds_store)
    watch = watchdog.Watchdog(store, rank, 3, None, 600.0, asynchronous=True)
    watch.stops_after_step = waits
    watch.ring.begin_event(Free(id=7, mesh="m", buffers=(), at="p.rlf:1:1"))
    Path(f"{folder}/{rank}").touch()
    threading.Event().wait()


def start(ranks: Sequence[Any], place: Path) -> None:
    """Until each has shown a sign of life."""
    for rank in ranks:
        rank.start()
    end = time.monotonic() + 60
    while not all((place / str(r)).exists() for r in range(len(ranks))) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(1.5)


@pytest.mark.thorough
@pytest.mark.parametrize("told", [False, True])
def test_a_death_that_breaks_no_connection(tmp_path: Path, told: bool) -> None:
    """told: torchrun sends SIGTERM, which in a run with checkpoints asks for the end of the step."""
    ours, theirs = context().Pipe()
    store = context().Process(target=_store, daemon=True, args=(theirs,))
    store.start()
    port = ours.recv()
    ranks = [context().Process(target=_rank, daemon=True, args=(r, port, str(tmp_path), True)) for r in range(3)]
    try:
        start(ranks, tmp_path)
        os.kill(ranks[1].pid, signal.SIGKILL)
        if told:
            os.kill(ranks[0].pid, signal.SIGTERM)
            os.kill(ranks[2].pid, signal.SIGTERM)
        for rank in (ranks[0], ranks[2]):
            rank.join(30)
        text = (tmp_path / "said").read_text()
        assert [ranks[0].exitcode, ranks[2].exitcode] == [1, 1], text
        assert text.count("error[") == 1 and "RL0709" in text and "rank 1 " in text, text
    finally:
        for process in (*ranks, store):
            process.kill()


@pytest.mark.thorough
def test_the_death_of_the_rank_that_holds_the_store(tmp_path: Path) -> None:
    """Nobody tells the others, who are in long work of their own: each sees it, and each says so."""
    with held_port() as port:
        ranks = [context().Process(target=_rank, daemon=True, args=(r, port, str(tmp_path), True, r == 0))
                 for r in range(3)]
        try:
            start(ranks, tmp_path)
            assert all(rank.is_alive() for rank in ranks)
            os.kill(ranks[0].pid, signal.SIGKILL)
            for rank in ranks[1:]:
                rank.join(30)
            text = (tmp_path / "said").read_text()
            assert [rank.exitcode for rank in ranks[1:]] == [1, 1], text
            assert text.count("error[RL0709]: rank 0 exited without an error message") == text.count("error[") == 2
        finally:
            for process in ranks:
                process.kill()


class Signs:
    """Of rank 0 in a world; `at` is the sign of the next one."""

    rank, machine = 0, "here"

    def __init__(self, world: int = 2, at: Heartbeat | None = None):
        self.world, self.at = world, at

    def of(self, rank: int) -> Heartbeat | None:
        assert rank == 1
        return self.at


NEAR, FAR = 2.5, 60.0
DEAD = 1 << 22  # above the largest number that a process can have


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def looks(clock: list[float], signs: Any, still: float = 1e9, seconds: int = 200, beats: bool = False) -> int | None:
    """The second in which the neighbor counts as gone."""
    found = PeerMonitor(signs)
    for second in range(seconds):
        clock[0] = float(second)
        if beats:
            signs.at = replace(signs.at, beat=second)
        if found.is_gone(NEAR, FAR, min(still, float(second))):
            return second
    return None


def sign(machine: str, pid: int) -> Heartbeat:
    return Heartbeat(1, machine, pid, 0.0, RankPosition())


def test_a_process_of_this_machine(clock: list[float]) -> None:
    assert looks(clock, Signs(at=sign("here", DEAD))) == 6


def test_a_rank_of_another_machine(clock: list[float]) -> None:
    second = looks(clock, Signs(at=sign("there", DEAD)))
    assert second is not None and FAR <= second <= FAR + 3 * NEAR


@pytest.mark.parametrize("case", ["process is there", "no sign", "it beats", "far and it beats", "alone",
                                  "this rank goes on"])
def test_who_is_not_gone(clock: list[float], case: str) -> None:
    if case == "process is there":  # in a long call that holds Python's lock
        assert looks(clock, Signs(at=sign("here", os.getpid()))) is None
    elif case == "no sign":  # it has not begun
        assert looks(clock, Signs()) is None
    elif case == "it beats":
        assert looks(clock, Signs(at=sign("here", DEAD)), beats=True) is None
    elif case == "far and it beats":
        assert looks(clock, Signs(at=sign("there", DEAD)), beats=True) is None
    elif case == "alone":
        assert looks(clock, Signs(world=1, at=sign("here", DEAD))) is None
    else:  # silent in a long call, and nobody has waited for it for so long
        assert looks(clock, Signs(at=sign("there", DEAD)), still=10.0) is None


def stillness(clock: list[float], call: Callable[[int], str], phase: Phase = "begins", late: bool = False) -> float:
    """Of a rank that is in one event for 300 seconds. call: the operation that it is in, in each second."""
    clock[0], still = 0.0, 0.0
    found = StallDetector(late)
    for second in range(301):
        clock[0] = float(second)
        still = found.seconds(RankPosition(EventRun(1, (1,)), phase, float(second), call=call(second)))
    return still


def test_who_works_in_a_long_event_does_not_stand_still(clock: list[float]) -> None:
    """Five minutes in a healthy `generate` note nothing, and now and then it is in an operation between ranks."""
    assert stillness(clock, lambda s: "all_reduce" if s % 4 else "") < 4 < NEAR + FAR
    assert stillness(clock, lambda s: "") == 0
    assert stillness(clock, lambda s: "wait", phase="calls") == 0  # the wait of the user's function
    assert stillness(clock, lambda s: "all_reduce" if s > 200 else "") == 100


def test_who_waits_in_an_event_stands_still(clock: list[float]) -> None:
    assert stillness(clock, lambda s: "all_reduce") == 300
    assert stillness(clock, lambda s: "wait", phase="waits") == 300
    assert stillness(clock, lambda s: "", late=True) == 300  # nobody can see what it does


def test_a_rank_walks_between_its_first_event_and_its_end() -> None:
    ring = EventRing()
    assert not ring.is_running
    ring.begin_event(Free(id=0, mesh="m", buffers=()))
    assert ring.is_running
    ring.end_event()
    assert ring.is_running
    ring.finish()
    assert not ring.is_running
