"""A small model hub on loopback: enough of the real one's HTTP for the real client library to download from it."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves folders as repositories: `repos["owner/name"] = folder`. `gated` ones need one certain token."""

    def __init__(self, repos: dict[str, Path], gated: set[str] | None = None, host: str = "127.0.0.1") -> None:
        self.repos, self.gated = repos, gated or set()
        self.served: dict[str, int] = {}  # file name -> bytes of it sent
        self.break_after: dict[str, int] = {}  # file name -> bytes after which the connection is cut, once
        self.next_page = ""  # where a list of files is said to go on
        self.redirect = ""  # where every question is sent
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        path = unquote(urlsplit(request.path).path).strip("/")
        if self.redirect:
            return _send(request, 302, {"Location": self.redirect}, b"", with_body)
        api = path.startswith("api/models/")
        parts = (path.removeprefix("api/models/") if api else path).split("/")
        repo = "/".join(parts[:2])
        if repo not in self.repos:
            return _send(request, 404, {"X-Error-Code": "RepoNotFound"}, b"{}", with_body)
        if request.headers.get("Authorization") == "Bearer revoked":
            told = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return _send(request, 401, told, b'{"error": "unknown"}', with_body)
        if repo in self.gated and request.headers.get("Authorization") != "Bearer tok-en-that-is-good":
            return _send(request, 403, {"X-Error-Code": "GatedRepo"}, b'{"error": "gated"}', with_body)
        if api:
            return self._api(request, self.repos[repo], parts[2:], with_body)
        return self._file(request, self.repos[repo], "/".join(parts[4:]), with_body)

    def _api(self, request: BaseHTTPRequestHandler, folder: Path, rest: list[str], with_body: bool) -> None:
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        headers = {"Content-Type": "application/json"}
        if rest and rest[0] == "tree":
            body: object = [
                {"type": "file", "path": name, "size": (folder / name).stat().st_size, **_hashes(folder / name)}
                for name in files
            ]
            headers |= {"Link": f'<{self.next_page}>; rel="next"'} if self.next_page else {}
        else:
            body = {"id": "x", "modelId": "x", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files],
                    "private": False, "gated": False, "tags": [], "downloads": 0, "likes": 0}  # fmt: skip
        _send(request, 200, headers, json.dumps(body).encode(), with_body)

    def _file(self, request: BaseHTTPRequestHandler, folder: Path, name: str, with_body: bool) -> None:
        path = folder / name
        if not path.is_file():
            return _send(request, 404, {"X-Error-Code": "EntryNotFound"}, b"", with_body)
        data = path.read_bytes()
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status = 200
        if wanted := request.headers.get("Range"):
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            total = len(data)
            data = data[int(start) : int(end) + 1 if end else None]
            headers["Content-Range"] = f"bytes {start}-{int(start) + len(data) - 1}/{total}"
            status = 206
        if with_body:
            self.served[name] = self.served.get(name, 0) + len(data)
        limit = self.break_after.pop(name, None) if with_body else None
        _send(request, status, headers, data, with_body, limit)
        return None


def _etag(path: Path) -> str:
    """As the real hub: the sha256 of weights (which it keeps apart), git's own hash of everything else."""
    body = path.read_bytes()
    if path.suffix == ".safetensors":
        return hashlib.sha256(body).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def _hashes(path: Path) -> dict[str, object]:
    if path.suffix != ".safetensors":
        return {"oid": _etag(path)}
    pointer = {"oid": _etag(path), "size": path.stat().st_size, "pointerSize": 130}
    return {"oid": hashlib.sha1(_etag(path).encode()).hexdigest(), "lfs": pointer}


def _send(
    request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, with_body: bool,
    limit: int | None = None,
) -> None:  # fmt: skip
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if with_body:
        request.wfile.write(body[:limit])
    if limit is not None:
        request.close_connection = True
