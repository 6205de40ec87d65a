"""torchrun, without its tracebacks: a rank that fails reports what went wrong, and so does this launcher.

In: the arguments of torchrun. After `--parent PID` they come from `rlc run`, the process with that id: when it ends,
this one gets SIGTERM; all of its ranks are on this machine, and `local_ranks` starts them without torchrun. Out: the
exit status of the first rank that failed, else 0; 130 after Ctrl-C. SIGTERM goes to the ranks. Where the run writes
checkpoints they end after the step, and the status is 0; otherwise they end within seconds, and it is 143.
Errors: RL0704 where the launchers of the machines cannot meet, RL0707 where the system starts no rank, RL0709 where
ranks were killed and none is left to report it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Set
from dataclasses import fields
from pathlib import Path

from rldsl.diag import Diagnostic, Failure
from rldsl.runtime import local_ranks
from rldsl.runtime.message_file import report
from rldsl.runtime.parent import terminate_with
from rldsl.signals import signal_name


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--parent"]:
        world, module = int(_value(arguments, "--nproc-per-node")), arguments.index("-m") + 1
        try:
            terminate_with(int(arguments[1]))
            ended = local_ranks.run(world, arguments[module], arguments[module + 1:])
        except Failure as failure:
            report(failure.diagnostics)
            return 1
        return _status(ended.first, ended.codes, ended.forwarded, whole=len(ended.codes) == world)
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import main as torchrun

    forwarded: set[int] = set()

    def forward(number: int, _: object) -> None:
        forwarded.add(number)
        _forward_to_ranks(number)

    if _can_forward():
        signal.signal(signal.SIGTERM, forward)
        arguments = ["--signals_to_handle", "SIGINT,SIGHUP,SIGQUIT", *arguments]
    logging.disable(logging.CRITICAL)  # of this process alone: the ranks speak for themselves
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        codes = {rank: f.exitcode for rank, f in error.failures.items()}
        code = min(error.failures.values(), key=lambda f: f.timestamp).exitcode
        return _status(code, codes, forwarded, whole=str(len(codes)) == _value(arguments, "--nproc-per-node"))
    except SignalException as stop:
        return 128 + stop.sigval
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (RendezvousError, DistError, TimeoutError, ConnectionError) as error:
        report((_cannot_meet(arguments, error),))
        return 1
    return 0


def _status(first: int, codes: Mapping[int, int], forwarded: Set[int], whole: bool) -> int:
    """The status of the launcher. first: exit code of the first rank that failed; codes: of all that failed. whole:
    these are all ranks of this machine."""
    if -first in forwarded:
        return 128 - first
    if whole and codes and max(codes.values()) < 0:
        report((_all_killed(codes),))
    return first if first >= 0 else 1


def _all_killed(codes: Mapping[int, int]) -> Diagnostic:
    """What ended the ranks of this machine, none of which could report it. codes: rank -> its exit code. torchrun sends
    SIGTERM to the ranks that are left, so it names the others if there are any."""
    killed = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes
    who = f"rank{'s' * (len(killed) > 1)} {', '.join(map(str, sorted(killed)))} {'were' if len(killed) > 1 else 'was'}"
    return Diagnostic("RL0709", f"{who} killed ({', '.join(sorted({signal_name(-c) for c in killed.values()}))})",
                      help="possibly because memory ran out; see the system log; checkpoints that were written are "
                           "complete: start the run again with `--resume`")


def _cannot_meet(arguments: list[str], error: Exception) -> Diagnostic:
    """Why the launchers of a run do not find each other."""
    text = " ".join(str(error).split())
    place = next((end for name in ("--rdzv-endpoint", "--rdzv_endpoint", "--master-port", "--master_port")
                  if (end := _value(arguments, name))), "")
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return Diagnostic("RL0704", "the port of the rendezvous is in use", place=place,
                          help="another run or program on this machine uses it: choose another port, or use "
                               "`--standalone` for a run on one machine")
    machines = _value(arguments, "--nnodes") or "1"
    return Diagnostic("RL0704", f"the launchers of the {machines} machines did not meet", place=place,
                      notes=(f"message of the library: {text[:300] or type(error).__name__}",),
                      help="start the same command on every machine within the time limit "
                           "(`--rdzv-conf join_timeout=600`), and check that each can reach the address of "
                           "`--rdzv-endpoint`")


def _value(arguments: list[str], name: str) -> str:
    """The value of an option, given as `--name value` or `--name=value`."""
    for i, argument in enumerate(arguments):
        if argument == name:
            return "".join(arguments[i + 1 : i + 2])
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return ""


def _can_forward() -> bool:
    """Whether this torchrun leaves SIGTERM to us, and this system can list our child processes."""
    from torch.distributed.launcher.api import LaunchConfig

    return any(f.name == "signals_to_handle" for f in fields(LaunchConfig)) and _children(os.getpid()) is not None


def _children(pid: int) -> list[int] | None:
    try:
        lists = [(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return None
    return [int(child) for found in lists for child in found]


def _forward_to_ranks(number: int) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    ranks = _children(os.getpid())
    if not ranks:  # the launchers have not met yet, or the ranks are being restarted
        raise SignalException("asked to stop", signal.Signals(number))
    for child in ranks:
        try:
            os.kill(child, number)
        except ProcessLookupError:  # it has just ended
            continue


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # torch is being imported
        sys.exit(128 + signal.SIGINT)
