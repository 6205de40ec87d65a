"""The ranks of a run on this machine alone, without torchrun: its agent imports torch, which takes as long as a rank
takes to do so, and each rank would wait for it.

In: a module, its arguments and the number of ranks. Out: how they ended. Ranks get the environment variables
that torchrun would set, each in its own session; rank 0 holds the store where they meet.
Invariant: no rank outlives `run`: once one has failed, or after Ctrl-C, the others get a signal and `PATIENCE` seconds.
Where rank 0 was killed, and the store with it, they first get `NOTICE` seconds to see that themselves: after SIGTERM
they could not tell it from a rank that was asked to stop. Errors: RL0707 the system starts no more processes.
SIGTERM goes to the ranks, which end after the step where the run writes checkpoints; a signal that comes while they are
started waits until all are.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

from rldsl import threads
from rldsl.diag import Failure, counted
from rldsl.signals import ctrl_c_held, interrupting_signal

PATIENCE = 30.0  # seconds that ranks have to end after a signal, as with torchrun
NOTICE = 15.0    # seconds that ranks have to notice that rank 0 was killed; they need some 4
PERIOD = 0.02    # seconds between looks


@dataclass(frozen=True, slots=True)
class Ending:
    """How ranks ended."""

    first: int                # exit code of the first that failed, negative for a signal; 0; 130 after Ctrl-C
    codes: Mapping[int, int]  # rank -> exit code, of those that failed; none after Ctrl-C
    forwarded: Set[int]       # signals that were passed on to them


def run(world: int, module: str, arguments: Sequence[str]) -> Ending:
    """Start `world` ranks of `python -m module` and wait for them. They import from the working directory what this
    process does: nothing after `python -P`, but for users' functions, whose modules `hashed_modules.py` finds."""
    ranks: list[subprocess.Popen[bytes]] = []
    forwarded: set[int] = set()

    def forward(number: int, _: object) -> None:
        forwarded.add(number)
        if len(ranks) == world:
            _pass_on(ranks, number)

    signal.signal(signal.SIGTERM, forward)
    safely = ["-P"] if sys.flags.safe_path else []  # as this process was started
    try:
        with held_port() as port:
            with ctrl_c_held() as release:
                for rank in range(world):
                    ranks.append(subprocess.Popen([sys.executable, *safely, "-u", "-m", module, *arguments],
                                                  start_new_session=True,
                                                  env=os.environ | _environment(rank, world, port)))
                release()
            for number in tuple(forwarded):  # that came meanwhile
                _pass_on(ranks, number)
            first = _first_failure(ranks)
            if ranks[0].poll() and ranks[0].returncode < 0 and not forwarded:
                _wait(ranks, NOTICE)
    except KeyboardInterrupt:
        _end(ranks, signal.SIGINT)
        return Ending(128 + signal.SIGINT, {}, forwarded)
    except OSError as error:
        _end(ranks, signal.SIGTERM)
        if threads.is_refused(error):
            raise Failure([threads.refused(f"the launcher of {counted(world, 'rank')}")]) from None
        raise
    _end(ranks, signal.SIGTERM)
    return Ending(first, {i: rank.returncode for i, rank in enumerate(ranks) if rank.returncode}, forwarded)


def _pass_on(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """To the ranks alone, which end what they started."""
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment variables of torchrun. The run id "local" means that the rank ends with the process that started
    it."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "local",
                 "TORCHELASTIC_RESTART_COUNT": 0}
    return {name: str(value) for name, value in variables.items()}


@contextmanager
def held_port() -> Iterator[int]:
    """A free TCP port of this machine that no other program is given meanwhile. Rank 0 listens on it only once torch is
    loaded, seconds later. A server that sets SO_REUSEADDR, as torch's TCPStore does, can listen on it beside us, who
    are bound and do not listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """The exit code of the first rank that has failed; 0 once all have ended without."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if failed := next((code for code in codes if code), 0):
            return failed
        if None not in codes:
            return 0
        time.sleep(PERIOD)


def _end(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """Wait for the ranks, after a signal and `PATIENCE` at most; another Ctrl-C ends the waiting."""
    try:
        _send(ranks, number)
        _wait(ranks, PATIENCE)
    except KeyboardInterrupt:
        pass
    _send(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended, `seconds` at most."""
    until = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        time.sleep(PERIOD)


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """To each that still runs, and to what it started."""
    for rank in ranks:
        if rank.poll() is None:
            try:
                os.killpg(rank.pid, interrupting_signal(rank.pid) if number == signal.SIGINT else number)
            except ProcessLookupError:  # it has just ended
                continue
