"""At `--timeout` all ranks of a run become overdue at once: one of them looks, and says so for all."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch.distributed as dist

from rldsl.postmortem.dumps import Heartbeat, RankPosition
from rldsl.runtime.health import watchdog
from rldsl.runtime.health.heartbeats import Heartbeats
from rldsl.runtime.plan_file import PlanFile
from tests.postmortem.hand import DATA, GENERATE, LENGTHS, TRAIN, TURN, at

TIMEOUT = 40.0  # below the seconds of `at`


class Blamed(Exception):
    """In place of the end of the process."""


class World:
    """Eight ranks in one process. looked: how often all signs were read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        store, self.looked, every = dist.HashStore(), 0, Heartbeats.all

        def counted(signs: Heartbeats) -> dict[int, Heartbeat]:
            self.looked += 1
            return every(signs)

        def blame(watch: watchdog.Watchdog, otherwise: str, *_: object) -> None:
            raise Blamed(otherwise)

        monkeypatch.setattr(Heartbeats, "all", counted)
        monkeypatch.setattr(watchdog.Watchdog, "_run", lambda watch: None)  # the test says when a rank looks
        monkeypatch.setattr(watchdog.Watchdog, "_stop_for_others", blame)
        self.watches = [watchdog.Watchdog(store, rank, 8, PlanFile.from_bytes(DATA), TIMEOUT) for rank in range(8)]

    def overdue(self, positions: Mapping[int, RankPosition], ranks: Sequence[int], attempt: int = 0) -> list[str]:
        """What these ranks say, each in its turn, where all are as `positions` says."""
        for rank, position in positions.items():
            self.watches[rank].heartbeats.beat(position)
        said = []
        for rank in ranks:
            try:
                self.watches[rank]._check_overdue(positions[rank], attempt)
            except Blamed as blamed:
                said.append(str(blamed))
        return said


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    before = signal.getsignal(signal.SIGTERM)
    found = World(monkeypatch)
    yield found
    for watch in reversed(found.watches):
        watch.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_one_of_all_that_wait_looks(world: World) -> None:
    positions = {rank: at(LENGTHS, 3) if rank != 4 else at(TURN, 2, 3, call="") for rank in range(8)}
    assert world.overdue(positions, [0, 1, 2, 3, 5, 6, 7]) == ["rank 0 waited more than 40 s for other ranks"]
    assert world.looked == 1


def test_who_looks_speaks_for_others(world: World) -> None:
    """Rank 0 works for longer than `--timeout`, and 1 waits for 3 in the same event."""
    positions = {rank: at(TRAIN, 2, call="") for rank in range(8)}
    positions |= {rank: at(GENERATE, 3, call="recv" if rank == 1 else "") for rank in range(4)}
    assert world.overdue(positions, range(4)) == ["rank 1 waited more than 40 s for other ranks"]
    assert world.looked == 1


@pytest.mark.parametrize("seconds, said", [(TIMEOUT - 1, 0), (TIMEOUT, 1)])
def test_nobody_is_ended_before_its_time(world: World, seconds: float, said: int) -> None:
    """Rank 0 works; 1 began to wait for 3 later."""
    positions = {rank: at(GENERATE, 3, call="recv" if rank == 1 else "", seconds=seconds if rank == 1 else 41.0)
              for rank in range(8)}
    assert len(world.overdue(positions, range(4))) == said and world.looked == 1


def test_those_that_work_end_nothing_and_are_looked_at_again(world: World) -> None:
    working = {rank: at(GENERATE, 3, call="") for rank in range(8)}
    assert not world.overdue(working, range(4)) and world.looked == 1
    waiting = working | {1: at(GENERATE, 3, call="recv")}
    assert not world.overdue(waiting, range(1, 4)) and world.looked == 1, "once for each attempt"
    assert len(world.overdue(waiting, range(4), attempt=1)) == 1 and world.looked == 2


@pytest.mark.parametrize("slow, says, told", [
    ("", "the rendezvous store does not respond", ""), ("thinking took too long", "thinking took too long", "0|")])
def test_a_rank_that_ends_has_a_deadline(world: World, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str], slow: str, says: str, told: str) -> None:
    """With the words for what was slow; where that is not the store, it tells the others."""
    left: list[bool] = []
    monkeypatch.setattr(watchdog, "SHUTDOWN_SECONDS", 0.0)
    monkeypatch.setattr(watchdog, "_leave", lambda *_: left.append(True))
    watch = world.watches[0]
    watch._is_limited, watch._deadline, watch._slow_work = True, 0.0, slow
    watch._end_at_deadline()
    text = capsys.readouterr().err
    assert left and says in text and text.count("error[RL0709]") == 1
    assert watch.heartbeats.first_failure() == told


def test_each_step_towards_the_end_has_the_whole_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog.Watchdog, "_end_at_deadline", lambda watch: None)
    watch = world.watches[0]
    watch._limit_shutdown()
    first = watch._deadline
    watch._limit_shutdown("thinking")
    assert watch._deadline > first and watch._slow_work == "thinking"
    watch._limit_shutdown()
    assert watch._slow_work == ""
