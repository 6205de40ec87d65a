"""The ranks of one start find each other in a store that may hold what ranks of earlier starts left there.

torchrun restarts ranks with the store of the previous start, and its counts of restarts differ between machines. So
each rank writes a random word, and rank 0 proposes the words that it sees. When every rank has found its word in the
same proposal, these are the ranks of this start: the proposal's digest is the prefix of all further keys.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from secrets import token_hex
from typing import Any

FIRST_PAUSE = 0.02  # seconds between two reads of the store
MAX_PAUSE = 0.5  # seconds
PAUSE_GROWTH = 1.3  # factor


def start_prefix(store: Any, rank: int, world: int, timeout: timedelta) -> str:
    """A prefix for keys that is the same on all ranks of this start and differs between starts. TimeoutError: a rank
    did not join."""
    word, end, pause = token_hex(8), time.monotonic() + timeout.total_seconds(), FIRST_PAUSE
    store.set(_word(rank), word)
    while time.monotonic() < end:
        if rank == 0:
            _propose(store, world)
        words = _get(store, ["proposal"])
        if words is not None:
            proposed = words[0].split(",")
            name = sha256(words[0].encode()).hexdigest()[:16]
            if len(proposed) == world and proposed[rank] == word:
                store.set(f"{name}/{rank}", "here")
                if _get(store, [f"{name}/{r}" for r in range(world)] if rank == 0 else [f"{name}/go"]) is not None:
                    if rank == 0:
                        store.set(f"{name}/go", "go")
                    return name
        time.sleep(pause)
        pause = min(PAUSE_GROWTH * pause, MAX_PAUSE)  # a thousand ranks that wait for a slow machine share one store
    raise TimeoutError(f"not all {world} ranks joined within {timeout.total_seconds():g} s")


def started_before(run: Any, start: Any, rank: int, world: int, restarted: bool) -> bool:
    """Whether this start continues what an earlier one began; the same on all ranks. Rank 0 decides: by the mark that
    an earlier start left (`begun`) or, if the store is new, by whether torchrun has restarted any rank. torchrun counts
    only the restarts that its own ranks caused, so `restarted` differs between machines.

    run: the store of all starts. start: the store of this one. RuntimeError: a rank did not answer in the store's
    timeout."""
    start.set(f"restarted/{rank}", "yes" if restarted else "no")
    if rank == 0:
        restarts = [start.get(f"restarted/{r}") == b"yes" for r in range(world)]
        again = run.check(["begun"]) if run.add("starts", 1) > 1 else any(restarts)
        start.set("again", "yes" if again else "no")
    return bool(start.get("again") == b"yes")


def mark_begun(run: Any) -> None:
    """Rank 0 marks that the run owns its directory, so that later starts continue in it. A start that was refused
    leaves no mark."""
    run.set("begun", "yes")


def _propose(store: Any, world: int) -> None:
    words = _get(store, [_word(r) for r in range(world)])
    if words is not None and _get(store, ["proposal"]) != [",".join(words)]:
        store.set("proposal", ",".join(words))


def _word(rank: int) -> str:
    return f"word/{rank}"


def _get(store: Any, keys: Sequence[str]) -> list[str] | None:
    """The values of `keys`; None while one is missing. `store.get` alone would wait."""
    return [v.decode() for v in store.multi_get(list(keys))] if store.check(list(keys)) else None
