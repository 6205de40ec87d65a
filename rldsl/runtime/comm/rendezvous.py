"""The ranks of one start find each other in a store that may hold what ranks of earlier starts left there.

torchrun starts ranks again in the store of the start before, and its counts of restarts differ between machines. So
each rank comes with a word of its own, rank 0 proposes the words that it sees, and when every rank has found its own
word in the same proposal, these are the ranks of this start: the proposal's digest is the prefix of all that follows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from secrets import token_hex
from typing import Any

PAUSE, SLOWEST, SLOWER = 0.02, 0.5, 1.3  # seconds between two looks: at first, at most, and how fast they grow


def start_prefix(store: Any, rank: int, world: int, timeout: timedelta) -> str:
    """The same on all ranks of this start, and on no others. TimeoutError: one of them did not come."""
    mine, end, pause = token_hex(8), time.monotonic() + timeout.total_seconds(), PAUSE
    store.set(_word(rank), mine)
    while time.monotonic() < end:
        if rank == 0:
            _propose(store, world)
        words = _get(store, ["proposal"])
        if words is not None:
            found = words[0].split(",")
            name = sha256(words[0].encode()).hexdigest()[:16]
            if len(found) == world and found[rank] == mine:
                store.set(f"{name}/{rank}", "here")
                if _get(store, [f"{name}/{r}" for r in range(world)] if rank == 0 else [f"{name}/go"]) is not None:
                    if rank == 0:
                        store.set(f"{name}/go", "go")
                    return name
        time.sleep(pause)
        pause = min(SLOWER * pause, SLOWEST)  # a thousand ranks that wait for a slow machine share one store
    raise TimeoutError(f"not all {world} ranks joined within {timeout.total_seconds():g} s")


def started_before(run: Any, start: Any, rank: int, world: int, restarted: bool) -> bool:
    """Whether this start goes on with what an earlier one began; the same on all ranks. Rank 0 decides: what earlier
    starts left says it (`begun`), and where nothing is left, one rank that torchrun has restarted is enough. torchrun
    counts only the restarts that its own ranks were the cause of, so `restarted` differs between machines.
    run: the store of all starts. start: that of this one. RuntimeError: a rank did not answer in the store's time."""
    start.set(f"restarted/{rank}", "yes" if restarted else "no")
    if rank == 0:
        told = [start.get(f"restarted/{r}") == b"yes" for r in range(world)]
        again = run.check(["begun"]) if run.add("starts", 1) > 1 else any(told)
        start.set("again", "yes" if again else "no")
    return bool(start.get("again") == b"yes")


def mark_begun(run: Any) -> None:
    """Rank 0 says that the run has its directory: later starts go on in it. One that was refused leaves no word."""
    run.set("begun", "yes")


def _propose(store: Any, world: int) -> None:
    words = _get(store, [_word(r) for r in range(world)])
    if words is not None and _get(store, ["proposal"]) != [",".join(words)]:
        store.set("proposal", ",".join(words))


def _word(rank: int) -> str:
    return f"word/{rank}"


def _get(store: Any, keys: Sequence[str]) -> list[str] | None:
    """Their values; None while one is missing. `get` alone would wait."""
    return [v.decode() for v in store.multi_get(list(keys))] if store.check(list(keys)) else None
