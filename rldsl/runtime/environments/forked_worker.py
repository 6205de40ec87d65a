"""A conversation's process as its rank sees it: forked by the server of an environment, signaled and ended through it.

In: the function of an environment. Out: a server, and workers that it forks in milliseconds, each with the socket, the
output and the trace of `rewards/worker_process.py`.
Errors: Failure of the user's file, ConnectionError if the server has died.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import IO, Any

from rldsl.diag import counted
from rldsl.plan.function import Function
from rldsl.runtime.rewards import worker_process
from rldsl.runtime.rewards.worker import encoded, failure_from, receive, send
from rldsl.runtime.rewards.worker_process import Worker

SECONDS_TO_ANSWER = 30.0  # of the server, which does nothing that takes long
SHOWN_OUTPUT = 1 << 16  # characters of a turn's output that are printed
SERVER = "rldsl.runtime.environments.fork_server"


@dataclass
class Forked:
    """A process that the server has forked."""

    pid: int                          # its number
    stdout: IO[bytes] | None          # the pipe for its output


@dataclass(eq=False)
class ForkServer:
    """The server of one environment."""

    worker: Worker                                          # its process
    ended: dict[int, int] = field(default_factory=dict)     # exit status of each child that ended and was not asked for

    def fork(self, name: str) -> ForkedWorker:
        """A process for a conversation. name: printed in front of its output."""
        ours, theirs = socket.socketpair()
        reading, output = os.pipe()
        trace, tracing = os.pipe()
        for descriptor in (reading, trace):
            os.set_blocking(descriptor, False)
        try:
            self._send({"fork": True})
            socket.send_fds(self.worker.peer, [b"."], [theirs.fileno(), output, tracing])
            pid = self._receive("pid")["pid"]
        finally:
            theirs.close()
            os.close(output)
            os.close(tracing)
        stream = io.FileIO(reading)
        return ForkedWorker(name, Forked(pid, stream), ours, trace, server=self)

    def signal(self, pid: int, number: int) -> None:
        """Signal a child; nothing if it has ended."""
        self._send({"pid": pid, "signal": number})

    def has_ended(self, pid: int) -> bool:
        """Whether a child has ended."""
        try:
            while self.worker.has_answer():
                self._receive(None)
        except ConnectionError:  # the server has died, and its children with it
            self.ended.setdefault(pid, -signal.SIGKILL)
        return pid in self.ended

    def kill(self, pid: int) -> int:
        """Kill a child and its descendants, if it lives. Returns its exit status; that of a kill if the server died."""
        if not self.has_ended(pid):
            try:
                self._send({"kill": pid})
                while pid not in self.ended:
                    self._receive("ended")
            except ConnectionError:
                return -signal.SIGKILL
        return self.ended.pop(pid)

    def close(self) -> None:
        """End the server, and its children with it."""
        worker_process.end([self.worker])

    def _send(self, message: Any) -> None:
        self.worker.peer.settimeout(SECONDS_TO_ANSWER)
        send(self.worker.peer, encoded(message))

    def _receive(self, key: str | None) -> dict[str, Any]:
        """The next message with this key; others say which children have ended. None: any message."""
        while True:
            self.worker.peer.settimeout(SECONDS_TO_ANSWER)
            message = receive(self.worker.peer)
            if message is None:
                raise ConnectionError("the server of an environment has died")
            if "ended" in message:
                self.ended[message["ended"]] = message["status"]
            if key is None or key in message:
                return dict(message)


@dataclass(eq=False, kw_only=True)
class ForkedWorker(Worker):
    """A worker whose parent is the server."""

    server: ForkServer  # that has forked it
    num_shown: int = 0  # characters of this turn's output
    num_hidden: int = 0  # lines of it that are not printed

    def print_line(self, text: str) -> None:
        """Print a line, if the turn has not printed too much."""
        self.num_shown += len(text) + 1
        if self.num_shown <= SHOWN_OUTPUT:
            super().print_line(text)
        else:
            self.num_hidden += 1

    def begin_turn(self) -> None:
        """Say how much of the last turn's output was not printed."""
        hidden, self.num_hidden, self.num_shown = self.num_hidden, 0, 0
        if hidden:
            super().print_line(f"... ({counted(hidden, 'more line')} of this turn: {SHOWN_OUTPUT >> 10} KiB are shown)")

    def end(self) -> int:
        status = super().end()
        self.begin_turn()
        return status

    @property
    def ended(self) -> bool:
        return self.server.has_ended(self.process.pid)

    def _send_signal(self, number: int) -> None:
        self.server.signal(self.process.pid, number)

    def _kill(self) -> int:
        return self.server.kill(self.process.pid)


def start_server(name: str, function: Function, seconds: float) -> ForkServer:
    """Start the server of an environment, which imports its file. Errors: its Failure; TimeoutError after `seconds`;
    ConnectionError if it ended its process."""
    worker = worker_process.start(name, [function], seconds, SERVER)
    try:
        while not worker.has_answer():
            if time.monotonic() > worker.deadline:
                raise TimeoutError
            worker_process.wait([worker])
            worker.print_output()
        answer = worker.receive_answer()
        worker.print_output()
        if answer is None:
            raise ConnectionError
        if "error" in answer:
            raise failure_from(answer["error"])
    except BaseException:
        worker.end()
        raise
    worker.work = None
    return ForkServer(worker)
