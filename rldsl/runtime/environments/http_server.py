"""An HTTP/1.1 server on this machine's loopback address, which only acts when it is asked to: no thread, no waiting.

In: requests with a key (`Authorization: Bearer KEY`). Out: each as a Request, once, whose answer is given later.
Invariant: nothing here blocks, and what an unknown client sends is not kept: a request is read beyond its head only if
its key is known. A client that reads slowly, sends half a request or never ends a line holds its own connection alone.
"""

from __future__ import annotations

import http.client
import io
import json
import selectors
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus

ADDRESS = "127.0.0.1"
LARGEST_HEAD = 1 << 16     # bytes of a request line and its headers
LARGEST_BODY = 1 << 25     # bytes of a request: a context of a million tokens as JSON has a quarter of that
MOST_CONNECTIONS = 512     # beyond it, the oldest one that waits for nothing is closed; clients connect again
LARGEST_READ = 1 << 20     # bytes
MOST_READS = 64            # of a connection at once: one that sends without end must not hold the others
BACKLOG = 128


@dataclass(eq=False)
class Connection:
    """A client."""

    peer: socket.socket
    received: bytearray = field(default_factory=bytearray)  # that was not used yet
    unsent: bytearray = field(default_factory=bytearray)    # of answers
    request: Request | None = None                          # that is not answered yet
    invited: bool = False                                   # it was told to send the body of this request
    closed: bool = False                                    # the client has closed it
    last: bool = False                                      # it ends when everything was sent, and
    ended: bool = False                                     # now only the client's end is waited for

    @property
    def idle(self) -> bool:
        return self.request is None and not self.unsent


@dataclass(frozen=True, eq=False)
class Request:
    """What a client with a known key wants."""

    connection: Connection  # on which the answer goes
    row: int                # whose key it has
    method: str             # GET, POST, ...
    path: str               # without a query
    body: bytes             # as it was sent


@dataclass(frozen=True)
class _Head:
    row: int
    method: str
    path: str
    size: int    # bytes of the body
    last: bool   # whether the client ends the connection after it
    waits: bool  # whether it waits for a word before it sends the body


class HttpError(Exception):
    """A request that is answered with an error here. status: its HTTP status. code, what: of its JSON."""

    def __init__(self, status: int, code: str, what: str):
        super().__init__(what)
        self.status, self.code = status, code


def error_body(code: str, what: str, field: str | None = None) -> bytes:
    """An error as OpenAI's clients read it. field: of the request, that is wrong."""
    return json.dumps({"error": {"message": what, "type": "invalid_request_error", "param": field, "code": code}}
                      ).encode()


class LoopbackServer:
    """A server on a free port."""

    def __init__(self, row_of: Callable[[str], int | None]):
        """row_of: the conversation that a key belongs to; None if it is unknown."""
        self.row_of = row_of
        self.listener = socket.create_server((ADDRESS, 0), backlog=BACKLOG)
        self.listener.setblocking(False)
        self.port: int = self.listener.getsockname()[1]
        self.connections: list[Connection] = []

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let a selector wake when there is something to do here."""
        selector.register(self.listener, selectors.EVENT_READ)
        for connection in self.connections:
            reads = not connection.closed and len(connection.received) < LARGEST_HEAD + LARGEST_BODY
            events = selectors.EVENT_READ if reads else 0
            if events := events | (selectors.EVENT_WRITE if connection.unsent else 0):
                selector.register(connection.peer, events)

    def requests(self) -> list[Request]:
        """The requests that have arrived since the last call."""
        self._accept()
        found = []
        for connection in list(self.connections):
            self._receive(connection)
            if connection.request is None and not connection.last:
                try:
                    connection.request = self._request(connection)
                except HttpError as error:
                    connection.last = True  # what follows cannot be told apart
                    connection.received.clear()
                    self._write(connection, error.status, error_body(error.code, str(error)))
                if connection.request is not None:
                    found.append(connection.request)
            self._send(connection)
            if connection.closed and connection.request is None:
                self._close(connection)
            elif connection.last and connection.idle and not connection.ended:
                connection.ended = True  # closing it now could take back what the client has not read yet
                with suppress(OSError):
                    connection.peer.shutdown(socket.SHUT_WR)
        return found

    def answer(self, request: Request, status: int, body: bytes, content: str = "application/json") -> None:
        """Answer a request. Nothing if its client is gone."""
        connection = request.connection
        if connection.request is request and connection in self.connections:
            connection.request = None
            self._write(connection, status, body, content)
            self._send(connection)

    def close(self) -> None:
        """Close all connections. It may be called again."""
        for connection in list(self.connections):
            self._close(connection)
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptor is left: the system keeps the connection until there is one
                return
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections.append(Connection(peer))
            if len(self.connections) > MOST_CONNECTIONS:
                idle = next((c for c in self.connections[:-1] if c.idle), None)
                self._close(idle or self.connections[-1])

    def _receive(self, connection: Connection) -> None:
        for _ in range(MOST_READS):
            if connection.closed or len(connection.received) >= LARGEST_HEAD + LARGEST_BODY:
                return
            try:
                part = connection.peer.recv(LARGEST_READ)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            connection.closed = not part
            connection.received += b"" if connection.last else part

    def _request(self, connection: Connection) -> Request | None:
        """The next request of a connection, if all of it has arrived."""
        end = connection.received.find(b"\r\n\r\n")
        if end < 0 and len(connection.received) <= LARGEST_HEAD:
            return None
        if not 0 <= end <= LARGEST_HEAD:
            raise HttpError(431, "request_too_large", f"the head of a request has more than {LARGEST_HEAD >> 10} KiB")
        head = self._head(bytes(connection.received[: end + 4]))
        body = connection.received[end + 4 : end + 4 + head.size]
        if len(body) < head.size:
            if head.waits and not connection.invited:
                connection.invited = True
                connection.unsent += b"HTTP/1.1 100 Continue\r\n\r\n"
            return None
        connection.invited = False
        del connection.received[: end + 4 + head.size]
        connection.last = head.last
        return Request(connection, head.row, head.method, head.path, bytes(body))

    def _head(self, data: bytes) -> _Head:
        first, _, rest = data.partition(b"\r\n")
        parts = first.decode("latin-1").split(" ")
        try:
            fields = http.client.parse_headers(io.BytesIO(rest))
        except http.client.HTTPException:
            parts = []
        if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise HttpError(400, "bad_request", "this is no HTTP/1.1 request")
        method, target, version = parts
        kind, _, key = (fields["authorization"] or "").partition(" ")
        row = self.row_of(key.strip()) if kind.lower() == "bearer" else None
        if row is None:
            raise HttpError(401, "invalid_api_key", "the API key is not one of a conversation that is under way: give "
                                                    "the client the `api_key` that `run` was called with")
        if fields["transfer-encoding"]:
            raise HttpError(411, "length_required", "send the body at once, with a Content-Length")
        length = fields["content-length"] or "0"
        if not (length.isascii() and length.isdigit()):
            raise HttpError(400, "bad_request", f"Content-Length is {length!r}")
        if len(length) > 12 or int(length) > LARGEST_BODY:
            raise HttpError(413, "request_too_large", f"a request has at most {LARGEST_BODY >> 20} MiB")
        last = (fields["connection"] or "").lower() == "close" or version == "HTTP/1.0"
        return _Head(row, method, target.partition("?")[0], int(length), last,
                     (fields["expect"] or "").lower() == "100-continue")

    def _write(self, connection: Connection, status: int, body: bytes, content: str = "application/json") -> None:
        fields = {"Content-Type": content, "Content-Length": str(len(body)),
                  "Connection": "close" if connection.last else "keep-alive"}
        connection.unsent += _head_of(status, fields) + body

    def _send(self, connection: Connection) -> None:
        while connection.unsent:
            try:
                sent = connection.peer.send(connection.unsent)
            except BlockingIOError:
                return
            except OSError:  # the client is gone
                connection.unsent.clear()
                connection.closed = True
                return
            del connection.unsent[:sent]

    def _close(self, connection: Connection) -> None:
        self.connections.remove(connection)
        connection.closed = True
        connection.peer.close()


def _head_of(status: int, fields: Mapping[str, str]) -> bytes:
    phrase = HTTPStatus(status).phrase
    return (f"HTTP/1.1 {status} {phrase}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items()) + "\r\n").encode()
