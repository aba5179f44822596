"""OpenAI's batch API over HTTP (`/v1/files`, `/v1/batches`), in front of the same runner.

The official `openai` SDK works against it unchanged. Every path except `/health` needs the key. Uploads are written
to disk as they arrive; downloads are sent from disk; nothing is held in memory.
"""

from __future__ import annotations

import hmac
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from corral.batch.core.lock import JobLock
from corral.batch.core.runner import Settings
from corral.batch.service.multipart import read_form
from corral.batch.service.store import Store
from corral.batch.service.workers import Workers
from corral.batch.serving import Where
from corral.client.client import CHAT, COMPLETIONS
from corral.client.endpoint import Endpoint
from corral.errors import ConflictError, CorralError, NotFoundError, UsageError
from corral.home import home_dir

__all__ = ["BatchService", "ServiceOptions", "serve_forever"]


@dataclass(frozen=True)
class ServiceOptions:
    """Everything that can be set."""

    folder: Path | None = None  # default: `batches` in Corral's home
    where: Where = field(default_factory=Where)
    key_file: str | None = None
    bind: str = "127.0.0.1"
    port: int = 8100
    jobs: int = 2
    any_model: bool = False
    as_json: bool = False
    settings: Settings = field(default_factory=lambda: Settings(wait=True))  # for whoever starts the model again


class BatchService:
    """The service in a thread of its own: `with BatchService(options) as service: service.url`."""

    def __init__(self, options: ServiceOptions) -> None:
        self.options = options
        self.store = Store(options.folder or home_dir() / "batches")
        self.key_file = options.key_file or str(self.store.own_key())
        self._lock = JobLock(self.store.folder / "lock", f"the folder {self.store.folder}")

    def __enter__(self) -> BatchService:
        key = Endpoint("http://127.0.0.1", "", self.key_file).key() or ""
        self._lock.__enter__()
        try:
            self._server = ThreadingHTTPServer((self.options.bind, self.options.port), _Handler)
        except OSError as error:
            self._lock.__exit__(None, None, None)
            raise ConflictError(
                f"cannot listen on {self.options.bind}:{self.options.port}: {error.strerror}.",
                "Choose another --port; 0 takes any free one.",
            ) from error
        self._server.daemon_threads = True
        options = self.options
        self.workers = Workers(self.store, options.where, options.jobs, options.any_model, options.settings)
        self._server.service, self._server.key = self, key  # type: ignore[attr-defined]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.workers.close()
        self._lock.__exit__(None, None, None)

    @property
    def url(self) -> str:
        return f"http://{self.options.bind}:{self._server.server_port}"

    def touch(self) -> None:
        self._lock.touch()


def serve_forever(options: ServiceOptions) -> int:
    """Serve until SIGTERM or Ctrl-C; batches under way continue at the next start."""
    ended = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: ended.set())
    with BatchService(options) as service:
        about = {"url": service.url, "pid": os.getpid(), "key_file": service.key_file}
        if options.as_json:
            text = json.dumps(about)
        else:
            text = f"batch API on {service.url}/v1\n  key      {service.key_file}\n  folder   {service.store.folder}"
        print(text, flush=True)  # noqa: T201
        while not ended.wait(5):
            service.touch()
    return 0


class _Refusal(Exception):  # noqa: N818 - an answer, not an error of ours
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "corral", ""

    @property
    def _service(self) -> BatchService:
        return self.server.service  # type: ignore[attr-defined,no-any-return]

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        path = [unquote(step) for step in parts.path.strip("/").split("/")]
        self._query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self._body_read = method == "GET"
        try:
            if path == ["health"]:
                self._json({"status": "ok"})
                return
            given = self.headers.get("authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, f"Bearer {self.server.key}".encode()):  # type: ignore[attr-defined]
                raise _Refusal(401, "The key is missing or wrong.")
            self._route(method, path)
        except _Refusal as refusal:
            self._refuse(refusal.status, str(refusal))
        except NotFoundError as error:
            self._refuse(404, error.message)
        except CorralError as error:
            self._refuse(400, f"{error.message} {error.remedy}")
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _route(self, method: str, path: list[str]) -> None:
        store = self._service.store
        match (method, path):
            case ("POST", ["v1", "files"]):
                self._json(self._upload())
            case ("GET", ["v1", "files"]):
                wanted = self._query.get("purpose")
                self._page([f for f in store.files() if wanted in (None, f["purpose"])])
            case ("GET", ["v1", "files", identity]):
                self._json(store.file(identity))
            case ("GET", ["v1", "files", identity, "content"]):
                self._send_file(store.content(identity))
            case ("DELETE", ["v1", "files", identity]):
                store.delete_file(identity)
                self._json({"id": identity, "object": "file", "deleted": True})
            case ("POST", ["v1", "batches"]):
                self._json(self._create())
            case ("GET", ["v1", "batches"]):
                self._page(store.batches())
            case ("GET", ["v1", "batches", identity]):
                self._json(store.batch(identity))
            case ("POST", ["v1", "batches", identity, "cancel"]):
                self._read_body()
                self._json(self._service.workers.cancel(identity))
            case _:
                raise _Refusal(404, f"There is no {method} {self.path}; this server has /v1/files and /v1/batches.")

    def _upload(self) -> dict[str, Any]:
        store = self._service.store
        identity, place = store.new_upload()
        try:
            form = read_form(self.headers.get("content-type", ""), self._pieces(), place)
        except UsageError:
            place.unlink(missing_ok=True)
            raise
        self._body_read = True
        if form.get("purpose") != "batch":
            place.unlink(missing_ok=True)
            raise _Refusal(400, f"purpose is {form.get('purpose')!r}; this server keeps files for 'batch'.")
        return store.add_file(identity, form["filename"], "batch", place)

    def _create(self) -> dict[str, Any]:
        try:
            body = json.loads(self._read_body())
            file, endpoint = body["input_file_id"], body["endpoint"]
        except (ValueError, KeyError, TypeError):
            raise _Refusal(400, "Give a JSON object with input_file_id and endpoint.") from None
        if endpoint not in (CHAT, COMPLETIONS):
            raise _Refusal(400, f"endpoint is {endpoint!r}; possible are {CHAT} and {COMPLETIONS}.")
        self._service.store.file(str(file))
        window = str(body.get("completion_window", "24h"))
        batch = self._service.store.add_batch(file, endpoint, window, body.get("metadata"))
        self._service.workers.submit(batch["id"])
        return batch

    # Bodies

    def _pieces(self) -> Iterator[bytes]:
        """The request's body as it arrives."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("content-length") or 0)
        while left > 0:
            piece = self.rfile.read(min(left, 1 << 16))
            if not piece:
                raise ConnectionError("the upload broke off")
            left -= len(piece)
            yield piece

    def _read_body(self) -> bytes:
        data = b""
        for piece in self._pieces():
            data += piece
            if len(data) > 1 << 20:
                raise _Refusal(413, "The request is too large.")
        self._body_read = True
        return data

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value, ensure_ascii=False).encode()
        self.send_response(status, HTTPStatus(status).phrase)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if not self._body_read:  # what was not read would be taken for the next request
            self.send_header("connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, message: str) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        self._json({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)

    def _page(self, items: list[dict[str, Any]]) -> None:
        """One page of a list, newest first, in OpenAI's cursor shape."""
        after, limit = self._query.get("after"), int(self._query.get("limit", 20))
        if after is not None:
            at = next((n for n, item in enumerate(items) if item["id"] == after), len(items))
            items = items[at + 1 :]
        page = items[: max(1, min(limit, 10_000))]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        more = len(items) > len(page)
        self._json({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})

    def _send_file(self, path: Path) -> None:
        try:
            file = path.open("rb")
        except OSError:
            raise NotFoundError(f"the content of {path.stem} is gone.") from None
        with file:
            self.send_response(200)
            self.send_header("content-type", "application/octet-stream")
            self.send_header("content-length", str(path.stat().st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, 1 << 16)
