"""A process that calls users' Python functions for a rank.

In: on a socket, first the functions to load, then requests of a function and some rows. Out: on the same socket, the
results or an error, as JSON; what the functions print goes to the process's own output, which the rank reads. A request
or an answer is its length in eight bytes, then JSON in UTF-8.
Invariant: nothing heavy is imported, and the process ends with its rank.
"""

from __future__ import annotations

import base64
import faulthandler
import io
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.function import Function
from rldsl.runtime.rewards import user_functions

STACK_SIGNAL = signal.SIGUSR1  # makes a worker write its stack trace
BYTES = "\0bytes"  # the only key of an object that stands for bytes
BYTES_KEY = json.dumps(BYTES).encode()


def main(channel: int, trace: int, rank: int) -> None:
    """channel: descriptor of the socket. trace: descriptor for stack traces, on request and in a crash. rank: process
    id of the rank."""
    end_with(rank)
    set_up(channel, trace)
    with socket.socket(fileno=channel) as peer:
        functions: dict[str, Function] = {}
        serve(peer, lambda request: _answer(request, functions))


def serve(peer: socket.socket, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests until the other side closes. What was printed comes before the answer."""
    while (request := receive(peer)) is not None:
        reply = answer(request)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            send(peer, encoded(reply))
        except ConnectionError:  # the rank no longer wants it
            return


def set_up(channel: int, trace: int) -> None:
    """Of a process that runs users' code: its stack traces go to `trace`, and its output is unbuffered text."""
    for descriptor in (channel, trace):  # what the functions start must not keep them open
        os.set_inheritable(descriptor, False)
    faulthandler.enable(trace, all_threads=False)
    faulthandler.register(STACK_SIGNAL, trace, all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # which it is from the start of a process
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", write_through=True)


def _answer(request: dict[str, Any], functions: dict[str, Function]) -> dict[str, Any]:
    try:
        if "load" in request:
            functions.update((f["id"], function_from(f)) for f in request["load"])
            for function in functions.values():
                user_functions.loaded(function)
            return {}
        return {"values": user_functions.call(functions[request["function"]], request["rows"], request["names"])}
    except Failure as failure:
        return {"error": failure_fields(failure)}


def failure_fields(failure: Failure) -> dict[str, Any]:
    """A failure of one diagnostic, for JSON."""
    (diagnostic,) = failure.diagnostics
    kept = ("code", "title", "place", "notes", "help")
    return {k: v for k, v in asdict(diagnostic).items() if k in kept}


def failure_from(fields: dict[str, Any]) -> Failure:
    """The opposite of `failure_fields`, after JSON."""
    return Failure([Diagnostic(**{**fields, "notes": tuple(fields["notes"])})])


def function_from(fields: dict[str, Any]) -> Function:
    """A Function from JSON, which has no tuples."""
    return Function(**{**fields, "modules": tuple(map(tuple, fields["modules"])), "columns": tuple(fields["columns"])})


def end_with(parent: int) -> None:
    """Let this process be killed when its parent dies, even in the middle of a function. Where the system does not
    support that, it ends at its next read."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


def encoded(message: Any) -> bytes:
    """JSON. What it cannot express (dates, decimals) becomes text; arrays become lists. Bytes, such as those of images,
    stay bytes."""
    return json.dumps(message, default=_expressed).encode()


def decoded(message: bytes) -> Any:
    """What `encoded` was given."""
    return json.loads(message, object_hook=_with_bytes if BYTES_KEY in message else None)


def _expressed(value: Any) -> Any:
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _with_bytes(found: dict[str, Any]) -> Any:
    return base64.b64decode(found[BYTES]) if found.keys() == {BYTES} else found


def send(peer: socket.socket, message: bytes) -> None:
    peer.sendall(len(message).to_bytes(8, "big") + message)


def receive(peer: socket.socket) -> Any:
    """The next message; None when the other side has closed or died."""
    head = _exactly(peer, 8)
    body = _exactly(peer, int.from_bytes(head, "big")) if head else None
    return decoded(body) if body is not None else None


def _exactly(peer: socket.socket, size: int) -> bytes | None:
    parts, left = [], size
    while left:
        try:
            part = peer.recv(min(left, 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
