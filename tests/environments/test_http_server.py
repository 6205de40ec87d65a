"""The server of the endpoint, against clients that do what they should not."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest

from rldsl.runtime.environments import http_server
from rldsl.runtime.environments.http_server import LoopbackServer, Request

KEYS = {"first": 1, "second": 2}


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    found = LoopbackServer(KEYS.get)
    yield found
    found.close()


def connected(server: LoopbackServer, data: bytes = b"") -> socket.socket:
    client = socket.create_connection((http_server.ADDRESS, server.port), timeout=10)
    client.sendall(data)
    return client


def until(server: LoopbackServer, what: Callable[[list[Request]], bool]) -> list[Request]:
    """All requests that arrive before something is true."""
    found: list[Request] = []
    deadline = time.monotonic() + 20
    while not what(found):
        found += server.requests()
        assert time.monotonic() < deadline, found
        time.sleep(0.002)
    return found


def head(key: str = "first", method: str = "POST", path: str = "/p", **fields: Any) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x"] + ([f"Authorization: Bearer {key}"] if key else [])
    return "\r\n".join([*lines, *(f"{k.replace('_', '-')}: {v}" for k, v in fields.items()), "", ""]).encode()


def answer(server: LoopbackServer, client: socket.socket) -> tuple[int, Any]:
    """Status and JSON of what a client gets; nobody asks for a request."""
    got: list[tuple[int, Any]] = []

    def read() -> None:
        response = http.client.HTTPResponse(client)
        response.begin()
        got.append((response.status, json.loads(response.read())))

    reader = Thread(target=read)
    reader.start()
    assert until(server, lambda requests: not reader.is_alive()) == []
    return got[0]


def test_requests_in_pieces_and_in_a_row(server: LoopbackServer) -> None:
    """One connection: a request byte by byte, then two that are sent at once, which are taken one after the other."""
    data = head(Content_Length=3, path="/a?x=1") + b"abc"
    with connected(server) as client:
        for i in range(0, len(data), 7):
            client.sendall(data[i : i + 7])
            assert i + 7 >= len(data) or server.requests() == []
        (first,) = until(server, bool)
        assert (first.row, first.method, first.path, first.body) == (1, "POST", "/a", b"abc")
        client.sendall(head("second", "GET") + head("second", "GET", "/q"))
        assert server.requests() == []
        server.answer(first, 200, b"{}")
        (second,) = until(server, bool)
        assert (second.row, second.path) == (2, "/p") and server.requests() == []
        server.answer(first, 200, b"again")  # it is answered already
        server.answer(second, 200, b"{}")
        (third,) = until(server, bool)
        server.answer(third, 200, b"{}", "text/event-stream")
        client.settimeout(10)
        text = b""
        while text.count(b"HTTP/1.1 200 OK") < 3 or not text.endswith(b"{}"):
            text += client.recv(4096)
        assert b"again" not in text and b"Content-Type: text/event-stream" in text


@pytest.mark.parametrize("data, status, code", [
    (head(""), 401, "invalid_api_key"), (head("third"), 401, "invalid_api_key"),
    (head().replace(b"Bearer", b"Basic"), 401, "invalid_api_key"),
    (head("", Content_Length=1 << 24) + b"x" * (1 << 22), 401, "invalid_api_key"),  # its body is not kept
    (head(Content_Length=1 << 30), 413, "request_too_large"), (head(Content_Length="9" * 5000), 413, "request_too_large"),
    (head(Content_Length="-1"), 400, "bad_request"), (head(Content_Length="2x"), 400, "bad_request"),
    (head(Transfer_Encoding="chunked"), 411, "length_required"),
    (b"nonsense\r\n\r\n", 400, "bad_request"), (b"\x16\x03\x01\x00\xf1\x01\r\n\r\n", 400, "bad_request"),
    (b"GET / HTTP/2\r\n\r\n", 400, "bad_request"),
    (head(X="y" * (1 << 17)), 431, "request_too_large"), (b"x" * (1 << 17), 431, "request_too_large"),
    (head(**{f"A{i}": i for i in range(200)}), 400, "bad_request"),
])
def test_what_is_no_request_is_answered_and_closed(server: LoopbackServer, data: bytes, status: int, code: str) -> None:
    with connected(server) as client:
        sender = Thread(target=lambda: client.sendall(data))
        sender.start()
        found, error = answer(server, client)
        until(server, lambda requests: not sender.is_alive())
        assert (found, error["error"]["code"]) == (status, code)
        client.settimeout(10)
        assert client.recv(1) == b""  # the server sends nothing more
    until(server, lambda requests: not server.connections)


def test_a_client_that_waits_for_a_word(server: LoopbackServer) -> None:
    with connected(server, head(Content_Length=2, Expect="100-continue")) as client:
        until(server, lambda requests: bool(server.connections and server.connections[0].received))
        server.requests()
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"ab")
        (request,) = until(server, bool)
        assert request.body == b"ab"


def test_a_client_that_is_gone(server: LoopbackServer) -> None:
    with connected(server, head()) as client:
        (request,) = until(server, bool)
        assert client.close() is None
    until(server, lambda requests: request.connection.closed)
    server.answer(request, 200, b"{}")
    server.requests()
    assert server.connections == []
    server.answer(request, 200, b"{}")


def test_a_client_that_does_not_read_holds_nobody(server: LoopbackServer) -> None:
    with connected(server, head()) as slow, connected(server, head("second")) as other:
        first, second = sorted(until(server, lambda requests: len(requests) == 2), key=lambda request: request.row)
        server.answer(first, 200, b"x" * (1 << 24))
        assert first.connection.unsent  # the rest waits
        server.answer(second, 200, b"{}")
        assert answer(server, other) == (200, {})
        read = 0
        slow.settimeout(10)
        while read < 1 << 24:
            server.requests()
            read += len(slow.recv(1 << 20))
        assert not first.connection.unsent


def test_connections_are_bounded(server: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 3)
    with connected(server, head()) as asking:
        (request,) = until(server, bool)
        idle = [connected(server, b"POST") for _ in range(5)]
        until(server, lambda requests: len(server.connections) == 3)
        server.requests()
        assert request.connection in server.connections
        server.answer(request, 200, b"{}")
        assert answer(server, asking) == (200, {})
        for client in idle:
            client.close()


def test_it_listens_on_the_loopback_address_alone(server: LoopbackServer) -> None:
    assert server.listener.getsockname()[0] == "127.0.0.1"
    assert server.requests() == []
    server.close()
    server.close()
