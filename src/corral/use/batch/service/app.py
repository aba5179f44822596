"""OpenAI's batch API over HTTP (`/v1/files`, `/v1/batches`), in front of the same runner.

The official `openai` SDK works against it unchanged. The key is checked before anything of a body is read, and a
refused connection is closed: a request without the key costs one head. Code that reads a folder runs in a thread of
Starlette's pool; uploads and downloads go piece by piece. One event loop serves all connections (uvicorn); the
batches themselves run in threads of their own (`workers`).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import shutil
import signal
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from corral.base.errors import CorralError, NotFoundError
from corral.base.home import home_dir
from corral.client.client import CHAT, COMPLETIONS
from corral.client.endpoint import Endpoint
from corral.serve.asgi_server import Hosted, Refusal, note_key
from corral.serve.connections import LIMITS, ServerLimits
from corral.use.batch.core.folder import BatchLock
from corral.use.batch.core.runner import RunnerSettings
from corral.use.batch.service.store import ENDED, Store, life_of, receive
from corral.use.batch.service.workers import Workers
from corral.use.batch.spec import BatchServers

LARGEST_JSON_BYTES = 1 << 20
LARGEST_PAGE = 10_000
MARGIN_BYTES = 256 << 20  # of the disk: batches need room for their results
CLOSE = {"connection": "close"}
OF_THE_MODEL = (
    "/v1/models",
    "/v1/chat",
    "/v1/completions",
)  # sent here by clients, because OpenAI has one address for all


class BatchQueue(Protocol):
    """Runs the batches."""

    def submit(self, identity: str) -> None: ...

    def cancel(self, identity: str) -> dict[str, Any]: ...


def make_app(store: Store, queue: BatchQueue, key: str, largest_upload_bytes: int) -> ASGIApp:
    """The whole API behind its key."""
    api = _Api(store, queue, largest_upload_bytes)
    routes = [
        Route("/health", api.health, methods=["GET"]),
        Route("/v1/files", api.upload, methods=["POST"]),
        Route("/v1/files", api.files, methods=["GET"]),
        Route("/v1/files/{identity}", api.file, methods=["GET"]),
        Route("/v1/files/{identity}", api.delete_file, methods=["DELETE"]),
        Route("/v1/files/{identity}/content", api.content, methods=["GET"]),
        Route("/v1/batches", api.create, methods=["POST"]),
        Route("/v1/batches", api.batches, methods=["GET"]),
        Route("/v1/batches/{identity}", api.batch, methods=["GET"]),
        Route("/v1/batches/{identity}/cancel", api.cancel, methods=["POST"]),
    ]
    answers: Any = {
        Refusal: _refused,
        CorralError: _refused,
        HTTPException: _unknown_path,
        ClientDisconnect: _refused,
        OSError: _refused,
    }
    return _KeyCheck(Starlette(routes=routes, exception_handlers=answers), key)


class _KeyCheck:
    """Refuses requests without the key; `/health` needs none."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        has_key = hmac.compare_digest(sent, self._expected)
        if has_key:
            note_key(scope)
        if has_key or scope["path"] == "/health":
            await self._app(scope, receive, send)
        else:
            refusal = Refusal(401, "The key is missing or wrong.")
            await JSONResponse(refusal.body(), 401, CLOSE)(scope, receive, send)


def _refused(_: Request, error: Exception) -> Response:
    """The connection is closed: what was not read of a body would be taken for the next request."""
    if isinstance(error, CorralError):
        status = 404 if isinstance(error, NotFoundError) else 400
        error = Refusal(status, error.message if status == 404 else error.in_full)
    elif isinstance(error, ClientDisconnect):
        error = Refusal(400, "The upload broke off.")
    elif isinstance(error, OSError):  # an error of the machine: no path of the server is shown
        error = Refusal(
            507 if error.errno == errno.ENOSPC else 500, f"The server cannot do that now ({error.strerror})."
        )
    assert isinstance(error, Refusal)
    return JSONResponse(error.body(), error.status, CLOSE)


def _unknown_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    asked = f"{request.method} {request.url.path[:200]}"
    text = f"There is no {asked}; this server has /v1/files and /v1/batches."
    if request.url.path.startswith(OF_THE_MODEL):
        text += " The model itself answers at the deployment's own address: see `corral status`."
    if status == 405:
        text = f"{HTTPStatus(405).phrase}: {asked}."
    return JSONResponse(Refusal(status, text).body(), status, CLOSE)


class _Api:
    """The handlers of the paths."""

    def __init__(self, store: Store, queue: BatchQueue, largest_upload_bytes: int) -> None:
        self._store, self._queue, self._largest = store, queue, largest_upload_bytes

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def upload(self, request: Request) -> Response:
        announced = int(request.headers.get("content-length", 0))  # digits: llhttp has read it
        if announced > self._largest:
            raise Refusal(413, f"The upload is longer than {self._largest:,} bytes.")
        if announced + MARGIN_BYTES > shutil.disk_usage(self._store.folder).free:
            raise Refusal(507, "The server has no room for this file.")
        identity, path = self._store.new_upload()
        form = await receive(request.headers.get("content-type", ""), request.stream(), path, self._largest)
        try:
            if form.get("purpose") != "batch":
                purpose = str(form.get("purpose"))[:80]
                raise Refusal(400, f"purpose is {purpose!r}; this server keeps files for 'batch'.")
            prefix = "expires_after["
            policy = {name[len(prefix) : -1]: value for name, value in form.items() if name.startswith(prefix)}
            kept = (identity, form["filename"], "batch", path, life_of(policy, "expires_after"))
            about = await run_in_threadpool(self._store.keep_upload, *kept)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return JSONResponse(about)

    async def files(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        files = await run_in_threadpool(self._store.files)
        return _page(request, [file for file in files if purpose in (None, file["purpose"])])

    async def file(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self._store.file, request.path_params["identity"]))

    async def delete_file(self, request: Request) -> Response:
        identity = request.path_params["identity"]
        await run_in_threadpool(self._store.delete_file, identity)
        return JSONResponse({"id": identity, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        identity = request.path_params["identity"]
        path = await run_in_threadpool(self._store.content, identity)
        if not path.is_file():
            raise Refusal(404, f"The content of {identity} is gone.")
        return FileResponse(path, media_type="application/octet-stream")

    async def create(self, request: Request) -> Response:
        body = await _json(request)
        file, endpoint = body.get("input_file_id"), body.get("endpoint")
        if not isinstance(file, str) or not isinstance(endpoint, str):
            raise Refusal(400, "Give a JSON object with input_file_id and endpoint.")
        if endpoint not in (CHAT, COMPLETIONS):
            raise Refusal(400, f"endpoint is {endpoint[:80]!r}; it must be {CHAT} or {COMPLETIONS}.")
        metadata = body.get("metadata")
        if not isinstance(metadata, dict | None):
            raise Refusal(400, "metadata is not an object.")
        life_s = life_of(body.get("output_expires_after"), "output_expires_after")
        await run_in_threadpool(self._store.file, file)
        window = str(body.get("completion_window", "24h"))[:80]
        batch = await run_in_threadpool(self._store.add_batch, file, endpoint, window, metadata, life_s)
        self._queue.submit(batch["id"])
        return JSONResponse(batch)

    async def batches(self, request: Request) -> Response:
        return _page(request, await run_in_threadpool(self._store.batches))

    async def batch(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self._store.batch, request.path_params["identity"]))

    async def cancel(self, request: Request) -> Response:
        identity = request.path_params["identity"]
        status = (await run_in_threadpool(self._store.batch, identity))["status"]
        if status in ENDED:
            raise Refusal(409, f"{identity} is {status}; it cannot be cancelled any more.")
        return JSONResponse(await run_in_threadpool(self._queue.cancel, identity))


async def _json(request: Request) -> dict[str, Any]:
    """The body as an object, within bounds of size and depth."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > LARGEST_JSON_BYTES:
            raise Refusal(413, f"The request is longer than {LARGEST_JSON_BYTES:,} bytes.")
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refusal(400, "The body is not a JSON object.")
    return body


def _page(request: Request, items: list[dict[str, Any]]) -> Response:
    """One page of a list, newest first unless `order` is `asc`, in OpenAI's cursor shape."""
    limit, after = request.query_params.get("limit", "20"), request.query_params.get("after")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= LARGEST_PAGE:
        raise Refusal(400, f"limit is {limit[:80]!r}; it is a number from 1 to {LARGEST_PAGE}.")
    if request.query_params.get("order") == "asc":
        items = items[::-1]
    if after is not None:
        at = next((n for n, item in enumerate(items) if item["id"] == after), len(items))
        items = items[at + 1 :]
    page = items[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(items) > len(page)
    return JSONResponse({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


ENDING_S = 5  # for answers under way when the service ends


@dataclass(frozen=True)
class ServiceOptions:
    """The settings of the service."""

    folder: Path | None = None  # default: `batches` in Corral's home
    servers: BatchServers = field(default_factory=BatchServers)
    key_file: str | None = None
    bind: str = "127.0.0.1"
    port: int = 8100
    jobs: int = 2
    any_model: bool = False
    skip_bad: bool = False
    as_json: bool = False
    largest_upload_bytes: int = 64 << 30
    limits: ServerLimits = LIMITS
    settings: RunnerSettings = field(default_factory=lambda: RunnerSettings(wait=True))


class BatchService:
    """The service in a thread of its own: `with BatchService(options) as service: service.url`."""

    def __init__(self, options: ServiceOptions) -> None:
        self.options = options
        self.store = Store(options.folder or home_dir() / "batches")
        self.key_file = options.key_file or str(self.store.own_key())
        self._lock = BatchLock(self.store.folder / "lock", f"the folder {self.store.folder}")

    def __enter__(self) -> Self:
        key = Endpoint("http://127.0.0.1", "", self.key_file).key() or ""
        self._lock.__enter__()
        try:
            bind, port = self.options.bind, self.options.port
            self._hosted = Hosted(bind, port, "corral-batch-api", ENDING_S, self.options.limits)
            self.store.drop_broken_uploads()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        options = self.options
        self.workers = Workers(
            self.store, options.servers, options.jobs, options.any_model, options.settings, options.skip_bad
        )
        app = make_app(self.store, self.workers, key, options.largest_upload_bytes)
        self._hosted.start(app)
        return self

    def __exit__(self, *_: object) -> None:
        self._hosted.close()
        self.workers.close()
        self._lock.__exit__(None, None, None)

    @property
    def url(self) -> str:
        host = f"[{self.options.bind}]" if ":" in self.options.bind else self.options.bind
        return f"http://{host}:{self._hosted.port}"

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
