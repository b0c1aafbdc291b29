"""A hub on this machine that serves one model, as far as downloads ask for it, and can fail."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL, COMMIT = "some/model", "c" * 40


class Hub(ThreadingHTTPServer):
    """Its files, and the downloads that were asked of it: a name and the first byte."""

    daemon_threads = True
    disable_nagle_algorithm = True

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.asked: list[tuple[str, int]] = []
        # Of a name: how many bytes come before the connection breaks; None: all of them.
        self.cut: Callable[[str], int | None] = lambda name: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """A client that hung up is none."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{MODEL}/tree"):
            self._json([_entry(*item) for item in self.server.files.items()])
        elif path.startswith(f"/api/models/{MODEL}"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._json({"id": MODEL, "sha": COMMIT, "siblings": siblings})
        else:
            self._file(path.rpartition("/")[2], with_body)

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _file(self, name: str, with_body: bool) -> None:
        content = self.server.files[name]
        first = int(self.headers.get("Range", "bytes=0-")[6:].rstrip("-"))
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{_digest(name, content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        if with_body:
            self.server.asked.append((name, first))
            count = self.server.cut(name)
            self.wfile.write(content[first:] if count is None else content[first : first + count])
            self.close_connection = count is not None

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def _digest(name: str, content: bytes) -> str:
    """As the hub names it: SHA-256 of weights, git's SHA-1 of others."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    digest = _digest(name, content)
    entry = {"type": "file", "path": name, "size": len(content), "oid": digest[:40]}
    if name.endswith(".safetensors"):
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 100}
    return entry


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub with these files while the block runs."""
    with Hub(files) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
