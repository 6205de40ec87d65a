"""A process that has imported a user's environment and forks itself for each conversation.

In: on a socket, first the function to load, then requests with descriptors: "fork" (the child's socket, output and
trace), "signal" and "kill" of a child. Out: an answer to each "fork", and the exit status of each child that ended.
Each child runs one conversation (`_converse`): requests "describe", "begin", "answer" and "reward", or "run" of an
agent, each answered with a result or an error, and ends when its socket is closed.
Invariant: the environment is created in the child, so that nothing of a conversation is seen by another one: a child
begins with what importing the file left, and the server runs no more of the user's code than that import. All children
end with the server, which ends with its rank. A child is signaled by its parent alone, before it is reaped, so that no
other process can be hit.
Codes: RL0714 the environment raised, RL0715 it returned the wrong thing, and those of `contract.py`.
"""

from __future__ import annotations

import functools
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

from rldsl.diag import Failure
from rldsl.plan.function import Function
from rldsl.runtime.environments.agent_form import AgentForm
from rldsl.runtime.environments.contract import Talk, open_talk
from rldsl.runtime.rewards import user_functions
from rldsl.runtime.rewards.hashed_modules import raise_refused
from rldsl.runtime.rewards.worker import encoded, end_with, failure_fields, function_from, receive, send, serve, set_up
from rldsl.runtime.rewards.worker_process import kill_group


def main(channel: int, trace: int, rank: int) -> None:
    """The server; the arguments are those of `rewards.worker.main`."""
    end_with(rank)
    set_up(channel, trace)
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    with socket.socket(fileno=channel) as peer:
        request = receive(peer)
        if request is None:
            return
        (function,) = map(function_from, request["load"])
        try:
            user_functions.imported(function, "class", "an environment is a class, or a function that makes one")
        except Failure as failure:
            send(peer, encoded({"error": failure_fields(failure)}))
            return
        sys.stdout.flush()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        send(peer, encoded({}))
        with suppress(ConnectionError):
            _serve(peer, woken, function)


def _serve(peer: socket.socket, woken: socket.socket, function: Function) -> None:
    children: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(peer, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(1 << 12)
                    ended = [c for c in children if os.waitid(os.P_PID, c, os.WEXITED | os.WNOWAIT | os.WNOHANG)]
                    for child in ended:
                        _end(peer, children, child)
                    continue
                request = receive(peer)
                if request is None:
                    return
                if "fork" in request:
                    _, descriptors, _, _ = socket.recv_fds(peer, 1, 3)
                    children.add(child := _fork(descriptors, function, (peer, woken)))
                    for descriptor in descriptors:
                        os.close(descriptor)
                    send(peer, encoded({"pid": child}))
                elif "signal" in request and request["pid"] in children:
                    os.kill(request["pid"], request["signal"])
                elif "kill" in request and request["kill"] in children:
                    _end(peer, children, request["kill"])


def _end(peer: socket.socket, children: set[int], child: int) -> None:
    status = kill_group(child)
    children.discard(child)
    send(peer, encoded({"ended": child, "status": status}))


def _fork(descriptors: list[int], function: Function, ours: tuple[socket.socket, ...]) -> int:
    """A child that talks on the first of the descriptors, prints to the second and writes its stack to the third."""
    server = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 0
    try:
        os.setsid()
        end_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for mine in ours:
            mine.close()
        channel, output, trace = descriptors
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        set_up(channel, trace)
        with socket.socket(fileno=channel) as peer:
            _converse(peer, function)
    except SystemExit as left:
        status = _exit_status(left)
    finally:
        _leave(status)
    return 0


def _exit_status(left: SystemExit) -> int:
    """The exit status that Python gives a process that has called `sys.exit`."""
    if left.code is None or isinstance(left.code, int):
        return (left.code or 0) & 0xFF
    print(left.code, file=sys.stderr)
    return 1


def _leave(status: int) -> NoReturn:
    """End this child; what the server registered to run at its end is for the server."""
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(Exception):
        sys.stderr.flush()
    os._exit(status)


def _converse(peer: socket.socket, function: Function) -> None:
    talk: Talk | AgentForm | None = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal talk
        try:
            talk = talk or open_talk(function)
            return _guarded(function, functools.partial(_handle, talk, request))
        except Failure as failure:
            return {"error": failure_fields(failure)}

    serve(peer, answer)
    if talk is not None:
        talk.close()


def _guarded(function: Function, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        result = call()
    except Failure:
        raise
    except Exception as error:
        raise_refused()
        raise user_functions.raised("RL0714", f"`{function.name}` raised", function, error,
                                    help="only what a tool raises is answered to the model: handle this error in the "
                                         "environment, or let `on_error=end` end the conversation") from None
    raise_refused()
    return result


def _handle(talk: Talk | AgentForm, request: dict[str, Any]) -> dict[str, Any]:
    if isinstance(talk, AgentForm):
        return {"agent": True} if "describe" in request else {"reward": talk.run(**request["run"])}
    if "describe" in request:
        return {"speaks": talk.speaks, "tools": talk.tools(), "takes": asdict(talk.takes)}
    if "begin" in request:
        row = request["begin"]
        return {"messages": talk.begin(row["messages"], row["columns"], row["seed"])}
    if "answer" in request:
        said = talk.answer(request["answer"]["content"], request["answer"]["calls"])
        return {**asdict(said), **({"reward": talk.reward()} if said.done else {})}
    return {"reward": talk.reward()}
