"""A Hub on loopback: repositories of models and datasets with one commit each, some of them gated, and commits that
arrive."""

from __future__ import annotations

import base64
import json
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
KIND = "(?P<kind>models|datasets)"
NAME = r"(?P<name>[^/]+/[^/]+)"


@dataclass
class Hub:
    """What it has, and what it was asked for."""

    folders: dict[str, Path]                           # name of a model repository -> its files
    datasets: dict[str, Path] = field(default_factory=dict)  # the same of datasets
    gated: set[str] = field(default_factory=set)       # names of those that refuse to be read
    token: str = ""                                    # that may write; "": none
    endpoint: str = ""                                 # for HF_ENDPOINT
    sent: list[str] = field(default_factory=list)      # the files that were downloaded
    commits: list[str] = field(default_factory=list)   # the summaries of commits that arrived
    private: set[str] = field(default_factory=set)     # names of repositories that were created as private ones

    def of(self, kind: str) -> dict[str, Path]:
        return self.datasets if kind == "datasets" else self.folders


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, body: bool) -> None:
            path = unquote(self.path.partition("?")[0])
            if found := re.fullmatch(rf"/api/{KIND}/{NAME}(/revision/(?P<rev>.+)|/tree/(?P<tree>.+?))?", path):
                self.about(found["kind"], found["name"], found["rev"] or found["tree"] or "main", bool(found["tree"]))
            elif found := re.fullmatch(rf"/(?P<kind>datasets/)?{NAME}/resolve/(?P<rev>[^/]+)/(?P<file>.+)", path):
                self.file("datasets" if found["kind"] else "models", found["name"], found["rev"], found["file"], body)
            else:
                self.refuse(404, "EntryNotFound")

        def do_POST(self) -> None:
            path = unquote(self.path.partition("?")[0])
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if path == "/api/repos/create":
                self.create(json.loads(data))
            elif found := re.fullmatch(rf"/api/{KIND}/{NAME}/paths-info/(?P<rev>.+)", path):
                asked = json.loads(data)["paths"] if data.startswith(b"{") else parse_qs(data.decode())["paths"]
                self.listed(found["kind"], found["name"], found["rev"], asked)
            elif found := re.fullmatch(rf"/api/{KIND}/{NAME}/preupload/(?P<rev>.+)", path):
                self.json({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                                     for f in json.loads(data)["files"]]})
            elif found := re.fullmatch(rf"/api/{KIND}/{NAME}/commit/(?P<rev>.+)", path):
                self.commit(found["kind"], found["name"], data)
            elif path == "/api/validate-yaml":
                self.json({"errors": [], "warnings": []})
            else:
                self.refuse(404, "EntryNotFound")

        # ------------------------------------------------------------------------------------------- reading

        def about(self, kind: str, name: str, revision: str, tree: bool) -> None:
            revision, _, below = revision.partition("/") if tree else (revision, "", "")
            if not self.allowed(kind, name, revision):
                return
            folder = hub.of(kind)[name]
            files = sorted(f for f in (folder / below).rglob("*") if f.is_file())
            if tree:
                self.json([entry(folder, f) for f in files])
            else:
                self.json({"id": name, "sha": COMMIT, "private": False, "gated": False,
                           "siblings": [{"rfilename": str(f.relative_to(folder))} for f in files]})

        def listed(self, kind: str, name: str, revision: str, asked: list[str]) -> None:
            if self.allowed(kind, name, revision):
                folder = hub.of(kind)[name]
                self.json([entry(folder, folder / path) for path in asked if (folder / path).exists()])

        def file(self, kind: str, name: str, revision: str, file: str, body: bool) -> None:
            if not self.allowed(kind, name, revision):
                return
            found = hub.of(kind)[name] / file
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

        # ------------------------------------------------------------------------------------------- writing

        def create(self, asked: dict) -> None:
            if not self.may_write():
                return
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            folders = hub.of(f"{asked.get('type', 'model')}s")
            if name in folders:
                self.json({"error": "You already created this repo", "url": f"{hub.endpoint}/{name}"}, 409)
                return
            folders[name] = Path(tempfile.mkdtemp(prefix="hub-"))
            hub.private |= {name} if asked.get("private") or asked.get("visibility") == "private" else set()
            self.json({"url": f"{hub.endpoint}/{name}", "name": name, "id": name})

        def commit(self, kind: str, name: str, data: bytes) -> None:
            if not self.may_write():
                return
            folder = hub.of(kind)[name]
            for line in data.splitlines():
                part = json.loads(line)
                if part["key"] == "header":
                    hub.commits.append(part["value"]["summary"])
                elif part["key"] == "file":
                    target = folder / part["value"]["path"]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(base64.b64decode(part["value"]["content"]))
            self.json({"success": True, "commitOid": COMMIT, "commitUrl": f"{hub.endpoint}/{name}/commit/{COMMIT}"})

        def may_write(self) -> bool:
            if hub.token and self.headers.get("Authorization") == f"Bearer {hub.token}":
                return True
            self.refuse(401, "")
            return False

        # ------------------------------------------------------------------------------------------- answers

        def allowed(self, kind: str, name: str, revision: str) -> bool:
            if name not in hub.of(kind):
                self.refuse(401, "RepoNotFound")
            elif name in hub.gated:
                self.refuse(403, "GatedRepo")
            elif revision not in ("main", "v1", COMMIT):
                self.refuse(404, "RevisionNotFound")
            else:
                return True
            return False

        def json(self, found: object, status: int = 200) -> None:
            data = json.dumps(found).encode()
            self.send_response(status)
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


def entry(folder: Path, path: Path) -> dict[str, object]:
    """A file or directory of a repository, as its tree lists it."""
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": COMMIT}
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": etag(path)}


def etag(file: Path) -> str:
    return sha1(file.read_bytes()).hexdigest()
