"""torchrun itself, without paying for the import of torch in its agent and in each rank.

`begun(folder, "--nproc-per-node", "2", "-m", "rldsl.run", "p.plan")` does what `python -m rldsl.runtime.launch` does
with these arguments, in a process forked from the server of `tests/world.py`. The agent is torchrun's own, with its
rendezvous, restarts and signals; only where it would execute `python -u -m rldsl.run ...` it forks, and the rank runs
that module. Agents and ranks that are executed: tests/cluster/test_two_hosts.py, and an emitted program in
tests/plan_views/test_emitted_runs.py.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import forked, stacks
from tests.cpu import children


@dataclass(frozen=True, slots=True)
class Agent:
    """process: as of `multiprocessing`. file: what the agent and its ranks say."""

    process: Any
    file: Path

    def said(self) -> str:
        return self.file.read_text()

    def ranks(self) -> list[int]:
        """Their processes, in the order in which they began."""
        return sorted(children(self.process.pid))

    def wait(self, seconds: float) -> int:
        """Its exit status. Raises AssertionError when it has not ended in time."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            busy = stacks.dump_all(self.process.pid)
            raise AssertionError(f"not ended after {seconds} s:\n{busy}\n{self.said()}")
        return int(self.process.exitcode)


@contextmanager
def begun(folder: Path, *arguments: str, typed: str = "", patience: float = 30.0) -> Iterator[Agent]:
    """torchrun, just begun; it ends with its ranks at the end of the block. folder: where what they say is written, and
    what they read. patience: seconds that a rank has to end once another has failed, at most torchrun's own 30."""
    (folder / "typed").write_text(typed)
    read, said = str(folder / "typed"), str(folder / "said")
    agent = Agent(forked.start("tests.torchrun", str(patience), "--standalone", *arguments, files=(read, said, said)),
                  Path(said))
    try:
        yield agent
    finally:
        for pid in (agent.process.pid, *agent.ranks()):  # listed first; an agent that is alive may begin others
            _send(pid, signal.SIGKILL)
        agent.process.join()


def until(true: Callable[[], bool], agent: Agent, seconds: float = 90.0) -> None:
    """Wait for it, while torchrun goes on."""
    end = time.monotonic() + seconds
    while not true():
        assert agent.process.is_alive() and time.monotonic() < end, agent.said()
        time.sleep(0.01)


class Forked:
    """A Popen of `python -u -m MODULE ...` or `python -u FILE.py ...`, as torchrun's agent asks for it."""

    patience = 30.0

    def __init__(self, args: Sequence[str], env: Mapping[str, str], stdout: Any = None, stderr: Any = None,
                 start_new_session: bool = False) -> None:
        assert args[:2] == (sys.executable, "-u") and stdout is stderr is None, args
        self.returncode: int | None = None
        if (pid := os.fork()) == 0:
            os.setpgid(0, 0)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # what an execution would undo
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            logging.disable(logging.NOTSET)
            module, *rest = args[3:] if args[2] == "-m" else args[2:]
            forked._run(module, tuple(rest), env)
        self.pid = pid
        try:
            os.setpgid(pid, pid)  # whichever comes first: the agent sends signals to the group
        except OSError:
            pass

    def poll(self) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = float("inf") if timeout is None else time.monotonic() + min(timeout, self.patience)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(0.01)
        return code


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _caller(depth: int = 2) -> str:
    """The name of a method, for torchrun's records. Its own function has `inspect` look at every module that was ever
    imported, thousands where the server has loaded transformers: 0.8 s of CPU for each agent."""
    return sys._getframe(depth).f_code.co_name


if __name__ == "__main__":
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from rldsl.runtime.launch import main

    Forked.patience = float(sys.argv[1])
    subprocess_handler.Popen = Forked  # type: ignore[misc,assignment]
    dynamic_rendezvous.get_method_name = _caller
    sys.exit(main(sys.argv[2:]))
