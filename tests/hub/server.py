"""A Hub on loopback: model repositories with one commit each, some of them gated or private."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What it has, and what it was asked for."""

    folders: dict[str, Path]                           # name of a repository -> its files
    gated: set[str] = field(default_factory=set)       # names of those that refuse to be read
    endpoint: str = ""                                 # for HF_ENDPOINT
    sent: list[str] = field(default_factory=list)      # the files that were downloaded


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/(.+)|/tree/(.+))?", path):
                self.about(found[1], found[3] or found[4] or "main", bool(found[4]))
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self.file(found[1], found[2], found[3], body)
            else:
                self.refuse(404, "EntryNotFound")

        def about(self, name: str, revision: str, tree: bool) -> None:
            if not self.allowed(name, revision):
                return
            files = sorted(f for f in hub.folders[name].iterdir() if f.is_file())
            if tree:
                self.json([{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": etag(f)} for f in files])
            else:
                self.json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": f.name} for f in files],
                           "private": False, "gated": False})

        def file(self, name: str, revision: str, file: str, body: bool) -> None:
            if not self.allowed(name, revision):
                return
            found = hub.folders[name] / file
            if not found.is_file():
                self.refuse(404, "EntryNotFound")
                return
            data = found.read_bytes()
            self.send_response(200)
            for key, value in (("Content-Length", len(data)), ("ETag", f'"{etag(found)}"'), ("X-Repo-Commit", COMMIT)):
                self.send_header(key, str(value))
            self.end_headers()
            if body:
                hub.sent.append(file)
                self.wfile.write(data)

        def allowed(self, name: str, revision: str) -> bool:
            if name not in hub.folders:
                self.refuse(401, "RepoNotFound")
            elif name in hub.gated:
                self.refuse(403, "GatedRepo")
            elif revision not in ("main", "v1", COMMIT):
                self.refuse(404, "RevisionNotFound")
            else:
                return True
            return False

        def json(self, found: object) -> None:
            data = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def etag(file: Path) -> str:
    return sha1(file.read_bytes()).hexdigest()
