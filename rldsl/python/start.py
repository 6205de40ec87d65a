"""The ranks of a plan on this machine: started, watched, ended.

In: a plan file and the options of `rldsl.run`. Out: the exit status of the ranks. The ranks end, too, when this process
is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from rldsl import threads
from rldsl.diag import Diagnostic, Failure
from rldsl.progress import Interrupted, stage
from rldsl.runtime.message_file import VARIABLE, report
from rldsl.runtime.metrics.run_record import STOPPED, read_record
from rldsl.signals import ctrl_c_held, interrupting_signal, signal_name

PATIENCE = 8.0  # seconds that the ranks have to end after Ctrl-C
EARLY = "before the first step; to start again, repeat the command"
PASSED_ON = (signal.SIGINT, signal.SIGTERM)  # what this process sends to the launcher itself
TICK = 0.1      # seconds between two looks at a run that is followed


class Follower(Protocol):
    """What follows a run while it runs."""

    def line(self, text: str) -> None:
        """The ranks printed a line. Called in another thread."""

    def tick(self) -> bool:
        """Called every `TICK` seconds. Returns whether to stop the run after its running step."""


def interpreter() -> list[str]:
    """The command that starts Python without the working directory in `sys.path`: a user's file there, such as
    `h11.py`, must not be imported in the place of a library. Where that directory is what contains this package, it
    stays."""
    package = Path(__file__).resolve().parents[2]
    return [sys.executable] if package == Path.cwd().resolve() else [sys.executable, "-P"]


def launch(plan: str, world: int, out: str, options: Sequence[str], quiet: bool = False,
           messages: Path | None = None, follower: Follower | None = None) -> int:
    """Start the ranks and wait for them; Ctrl-C and SIGTERM are passed on to them, and they get time to stop.

    plan: its file. world: number of ranks. out: the directory of the run. options: of `rldsl.run`. quiet: what the
    ranks print goes to standard error. messages: the file where they leave their diagnostics
    (`runtime/message_file.py`). follower: gets what the ranks print, instead of the terminal. Returns the exit status
    of the ranks. Raises Interrupted, or KeyboardInterrupt where a follower is given. Errors: RL0707."""
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world))} | os.environ
    if messages is not None:
        environment[VARIABLE] = str(messages)
    command = [*interpreter(), "-m", "rldsl.runtime.launch", "--parent", str(os.getpid()), "--standalone",
               "--nproc-per-node", str(world), "-m", "rldsl.run", plan, "--out", out, *options]
    stage("")  # the ranks report
    earlier = read_record(Path(out))
    output, errors = (2 if quiet else None, None) if follower is None else (subprocess.PIPE, subprocess.STDOUT)
    # In a session of its own, so that a terminal sends Ctrl-C to this process alone, as `kill -INT` does: the launcher
    # gets it once either way, and a second one is the user's. Only the main thread gets Ctrl-C and can pass it on
    with ctrl_c_held() as release:
        try:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors, text=True,
                                       errors="replace",
                                       start_new_session=threading.current_thread() is threading.main_thread())
        except OSError as error:
            if threads.is_refused(error):
                raise Failure([threads.refused("this process")]) from None
            raise
        code = _waited(process, release, follower, Path(out), earlier)
    if code < 0 and -code not in PASSED_ON and follower is None:
        report((_killed(-code),))
    status = code if code >= 0 else 128 - code  # a signal ended it: as a shell reports that
    if status == 128 + signal.SIGTERM and follower is None and read_record(Path(out)) == earlier:
        print(f"terminated {EARLY}", file=sys.stderr, flush=True)
    return status


def _killed(number: int) -> Diagnostic:
    """What a signal that nobody passed on has done to the launcher."""
    return Diagnostic("RL0709", f"the process that started the ranks was killed ({signal_name(number)})",
                      help="the ranks stop by themselves, after the step where the run writes checkpoints; then start "
                           "the run again with `--resume`")


def _waited(process: subprocess.Popen[str], release: Callable[[], None], follower: Follower | None, out: Path,
            earlier: Mapping[str, Any] | None) -> int:
    """The exit code of the launcher, which has ended when this returns or raises. release: of `ctrl_c_held`. out: the
    directory of the run. earlier: the record that was there before."""
    with _passing_on_sigterm(process):
        try:
            release()
            return process.wait() if follower is None else _followed(process, follower)
        except KeyboardInterrupt:
            _end(process, signal.SIGINT)
            if follower is not None:
                raise
            held = read_record(out)
            if held is not None and held != earlier and held["state"] == STOPPED:  # rank 0 has printed where it stopped
                raise Interrupted from None
            raise Interrupted(f"interrupted {EARLY}") from None
        except BaseException:  # a callback that calls `exit`: this process may live on, the ranks must not
            _end(process, signal.SIGTERM)
            raise


@contextmanager
def _passing_on_sigterm(process: subprocess.Popen[str]) -> Iterator[None]:
    """Python allows signal handlers in the main thread only; elsewhere the ranks still notice that this process is
    gone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _followed(process: subprocess.Popen[str], follower: Follower) -> int:
    reader = threading.Thread(target=_read, args=(process.stdout, follower), daemon=True)
    threads.start(reader)
    stopping, code = False, None
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(TICK)
        # outside of the handler: what a callback raises does not happen "during handling of" that exception
        if code is None and follower.tick() and not stopping:
            stopping = True
            process.send_signal(signal.SIGTERM)
    reader.join()
    follower.tick()
    return code


def _read(stream: IO[str], follower: Follower) -> None:
    for text in stream:
        follower.line(text.rstrip("\n"))


def _end(process: subprocess.Popen[str], number: int) -> None:
    """End the launcher by a signal, which it passes on to the ranks, and wait. A second Ctrl-C, or `PATIENCE` seconds,
    make it kill them."""
    for request in (number, signal.SIGINT, signal.SIGKILL):
        try:
            process.send_signal(interrupting_signal(process.pid) if request == signal.SIGINT else request)
            process.wait(timeout=PATIENCE)
            return
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
