"""Commands as they are typed, without paying for the import of torch each time.

`command("rldsl.cli", "run", "p.rlf")` does what `python -m rldsl.cli run p.rlf` does, in a process that is forked from
the server of `tests/world.py`, with its own arguments, environment, output and exit status; `command("x.py")` is
`python x.py`. Ranks that it launches on this machine are forked in turn instead of by torchrun, and get what torchrun
would tell them: the first that fails ends the others. Tests of launching itself: `tests/torchrun.py`.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from rldsl.runtime.local_ranks import held_port
from tests import stacks
from tests.world import context

LAUNCH = "rldsl.runtime.launch"
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def command(module: str, *arguments: str, timeout: float = 120.0,
            env: Mapping[str, str] | None = None,
            before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    """env: besides that of this process. before: called in the new process, in its environment, before the command.
    Raises AssertionError when it has not ended in time."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (str(Path(folder) / name) for name in ("out", "err"))
        process = start(module, *arguments, files=(os.devnull, out, err), env=env, before=before)
        process.join(timeout)
        if process.exitcode is None:
            busy = stacks.dump_all(process.pid)
            process.kill()
            process.join()
            said = f"{busy}\n{Path(err).read_text()}"
            raise AssertionError(f"{module} {' '.join(arguments)} has not ended after {timeout} s:\n{said}")
        return subprocess.CompletedProcess((module, *arguments), process.exitcode, Path(out).read_text(),
                                           Path(err).read_text())


def run(line: Sequence[str], env: Mapping[str, str] | None = None, **_: Any) -> subprocess.CompletedProcess[str]:
    """In the place of `subprocess.run`, of a `python -m` whose output is captured as text."""
    assert [word for word in line[:3] if word != "-P"][:2] == [sys.executable, "-m"]
    return command(*line[line.index("-m") + 1 :], env=env)


def start(module: str, *arguments: str, files: tuple[str, str, str], env: Mapping[str, str] | None = None,
          before: Callable[[], None] | None = None) -> Any:
    """The process, as of `multiprocessing`, just begun. files: what it reads from and writes to; a terminal, perhaps.
    before: see `command`."""
    environment = {k: v for k, v in os.environ.items() if k not in HIDDEN} | {"OMP_NUM_THREADS": "1"} | dict(env or {})
    process = context().Process(target=_enter, args=(module, arguments, os.getcwd(), environment, files, before))
    process.start()
    return process


def _enter(module: str, arguments: tuple[str, ...], cwd: str, environment: dict[str, str],
           files: tuple[str, str, str], before: Callable[[], None] | None) -> NoReturn:
    os.chdir(cwd)
    for fd, file in enumerate(files):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND if fd else os.O_RDONLY), fd)
    stacks.register()
    sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, closefd=False) for fd, mode in enumerate("rww"))
    fork_ranks()
    if before is not None:
        os.environ.update(environment)
        before()
    _run(module, arguments, environment)


def fork_ranks() -> None:
    """From now on this process forks the ranks that it launches on this machine."""
    real = subprocess.Popen

    def popen(line: Any, *rest: Any, **more: Any) -> Any:
        if isinstance(line, list) and LAUNCH in line:  # whatever options Python gets
            arguments = line[line.index(LAUNCH) + 1 :]
            return Launch(arguments, more.get("env") or dict(os.environ), more.get("stdout"), more.get("stderr"))
        assert not isinstance(line, list) or "rldsl.run" not in line, f"these ranks would each import torch: {line}"
        return real(line, *rest, **more)

    subprocess.Popen = popen  # type: ignore[assignment,misc]


def _run(module: str, arguments: tuple[str, ...], environment: Mapping[str, str]) -> NoReturn:
    """The module as the main program; the process ends with its exit status."""
    import traceback

    import torch

    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    code: Any = 0
    try:
        if module == LAUNCH:
            code = Launch(list(arguments), dict(environment)).wait()
        elif module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


class Launch:
    """The ranks of a launch, as far as `rlc run` asks for them: a Popen of torchrun."""

    def __init__(self, arguments: list[str], environment: dict[str, str], stdout: int | None = None,
                 stderr: int | None = None) -> None:
        world = int(arguments[arguments.index("--nproc-per-node") + 1])
        module, *rest = arguments[arguments.index("-m") + 1 :]
        self.held = ExitStack()  # the port, as long as there are ranks
        port = self.held.enter_context(held_port())
        self.ranks: set[int] = set()
        self.code = 0
        pipes = {1: stdout, 2: stderr}
        ends = {fd: os.pipe() for fd, to in pipes.items() if to == subprocess.PIPE}
        targets = {fd: ends[fd][1] if fd in ends else to for fd, to in pipes.items() if to is not None}
        if stderr == subprocess.STDOUT:
            targets[2] = targets[1]
        for rank in range(world):
            told = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1",
                        MASTER_PORT=port)
            if (pid := os.fork()) == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                for fd, target in targets.items():
                    os.dup2(target, fd)
                _run(module, tuple(rest), environment | {k: str(v) for k, v in told.items()})
            self.ranks.add(pid)
        for _, write in ends.values():
            os.close(write)
        self.stdout, self.stderr = (open(ends[fd][0]) if fd in ends else None for fd in pipes)

    @property
    def returncode(self) -> int:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.ranks:
            pid, status = os.waitpid(-1, 0 if end is None else os.WNOHANG)
            if pid in self.ranks:
                self.ranks.remove(pid)
                if (code := os.waitstatus_to_exitcode(status)) and not self.code:
                    self.code = code if code > 0 else 1
                    self.send_signal(signal.SIGTERM)
            elif end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("ranks", timeout or 0.0)
        self.held.close()
        return self.code

    def send_signal(self, number: int) -> None:
        for pid in self.ranks:
            os.kill(pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
