"""A real HTTP server in a thread, on two host names, that serves files and misbehaves as told."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR


@dataclass
class Served:
    """A file, and what goes wrong with the next answers (one trouble each; afterwards the server behaves).

    Troubles: ("cut", share) sends so much of the body and closes; ("stall", share) sends so much and then nothing;
    ("status", code, headers); ("html",) a page with status 200; ("short", n) sends n bytes and says that is all; ("corrupt",) flips
    a bit; ("redirect", url). ``always`` is the trouble of every answer after those.
    """

    content: bytes
    etag: str = '"v1"'
    modified: str = ""
    ranges: bool = True  # heeds Range
    careless: bool = False  # heeds Range and not If-Range
    stated: int | None = None  # Content-Length, where it is to be a lie; -1: none
    kind: str = "application/octet-stream"
    headers: dict[str, str] = field(default_factory=dict)
    troubles: list[tuple] = field(default_factory=list)
    always: tuple = ()


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, Served] = {}
        self.log: list[Asked] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is part of the tests; anything else is shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class FileServer:
    def __init__(self) -> None:
        self._server = _Server()
        self.files = self._server.files
        self.log = self._server.log
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{path}"

    def add(self, path: str, content: bytes, **settings: object) -> Served:
        self.files["/" + path] = Served(content, **settings)  # type: ignore[arg-type]
        return self.files["/" + path]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving() -> Iterator[FileServer]:
    server = FileServer()
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked = Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
        self.server.log.append(self.asked)
        served = self.server.files.get(self.path)
        if served is None:
            self._answer(404, b"no such file", {})
            return
        trouble = served.troubles.pop(0) if served.troubles else served.always
        match trouble:
            case ("status", code, headers):
                self._answer(code, b"trouble", headers)
            case ("html",):
                self._answer(200, b"<!DOCTYPE html><title>Log in</title>", {"Content-Type": "text/html; charset=utf-8"})
            case ("redirect", url):
                self._answer(302, b"", {"Location": url, **served.headers})
            case _:
                self._file(served, trouble)

    def _file(self, served: Served, trouble: tuple) -> None:
        content = served.content
        if trouble[:1] == ("corrupt",):
            content = content[:-1] + bytes([content[-1] ^ 1])
        if trouble[:1] == ("short",):
            content = content[: trouble[1]]
        headers = {"Content-Type": served.kind, **served.headers}
        if served.etag:
            headers["ETag"] = served.etag
        if served.modified:
            headers["Last-Modified"] = served.modified
        start, status = 0, 200
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        fits = served.careless or self.headers.get("If-Range") in (None, served.etag or served.modified, served.modified)
        if wanted and served.ranges and fits:
            start, status = int(wanted[1]), 206
            if start >= len(content):
                self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        length = len(body) if served.stated is None else served.stated
        cut = round(trouble[1] * len(body)) if trouble[:1] in (("cut",), ("stall",)) else None
        self.stalls = trouble[:1] == ("stall",)
        self._answer(status, body, headers, length=length, cut=cut)

    def _answer(self, code: int, body: bytes, headers: dict[str, str], length: int | None = None, cut: int | None = None) -> None:
        self.asked.status = code
        self.send_response(code)
        length = len(body) if length is None else length
        if length >= 0:
            headers = {"Content-Length": str(length), **headers}
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = body if cut is None else body[:cut]
        self.asked.sent = len(body)
        try:
            self.wfile.write(body)
            if cut is not None and self.stalls:
                self.wfile.flush()
                self.connection.recv(1)  # until the client is gone
            if cut is not None or length != len(body):
                self.wfile.flush()
                self.connection.shutdown(SHUT_RDWR)
                self.close_connection = True
        except OSError:  # the client reads the head only
            self.close_connection = True
