"""Worlds in which a rank goes wrong: real processes, their store in another one, as under torchrun.

In: the bytes of a plan, and a directory. Out: a `World` whose ranks end with it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.world import context

TIMEOUT = 5.0  # seconds that a rank waits for another


@dataclass(frozen=True, slots=True)
class World:
    """folder: where the ranks work; `out` in it is the run's directory."""

    folder: Path
    ranks: list[Any]
    store: Any

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def send(self, rank: int, number: int) -> None:
        """rank: -1 is the process that holds the store."""
        os.kill((self.store if rank < 0 else self.ranks[rank]).pid, number)

    def until(self, true: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert all(r.is_alive() for r in self.ranks) and time.monotonic() < end, self.said()
            time.sleep(0.02)

    def ended(self, ranks: list[int], seconds: float, status: int = 1) -> None:
        """These ranks end by themselves, with this exit status."""
        end = time.monotonic() + seconds
        for rank in ranks:
            self.ranks[rank].join(max(0.0, end - time.monotonic()))
        assert [self.ranks[rank].exitcode for rank in ranks] == [status] * len(ranks), self.said()


@contextmanager
def world(data: bytes, size: int, folder: Path, timeout: float = TIMEOUT,
          library: float | None = None, last: float = 20.0) -> Iterator[World]:
    """library: seconds that a message may take (default: `timeout`). last: those that a rank has in order to end."""
    (folder / "said").write_text("")
    ours, theirs = context().Pipe()
    store = context().Process(target=_store, daemon=True, args=(theirs,))
    store.start()
    port = ours.recv()
    ranks = [context().Process(target=_rank, daemon=True, args=(r, size, port, data, str(folder), timeout, library, last))
             for r in range(size)]
    try:
        for rank in ranks:
            rank.start()
        yield World(folder, ranks, store)
    finally:
        for process in (*ranks, store):
            process.kill()
        for process in (*ranks, store):
            process.join()


def _store(pipe: Any) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(3600)


def _rank(rank: int, size: int, port: int, data: bytes, folder: str, timeout: float, library: float | None,
          last: float) -> None:
    import torch
    import torch.distributed as dist

    from rldsl.runtime.health import watchdog
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(folder)
    said = os.open("said", os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    store = dist.TCPStore("localhost", port, is_master=False)
    limit = timedelta(seconds=library or timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    watchdog.SHUTDOWN_SECONDS = last
    file = PlanFile.from_bytes(data, "p.plan")
    watch = watchdog.Watchdog(store, rank, size, file, timeout)
    try:
        execute(file, "out", watchdog=watch, options=Options(timeout=limit))
    except BaseException as error:
        watch.fail(error)
    watch.close()
    dist.destroy_process_group()
