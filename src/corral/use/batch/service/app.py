"""The paths of OpenAI's batch API (`/v1/files`, `/v1/batches`), as a Starlette application.

The key is looked at before anything of a body is read, and a refused connection is closed: a stranger costs one head.
Whatever reads a folder runs in a thread of Starlette's pool; uploads and downloads go piece by piece.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import shutil
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from corral.base.errors import CorralError, NotFoundError
from corral.client.client import CHAT, COMPLETIONS
from corral.serve.asgi_server import Refusal
from corral.use.batch.service.store import ENDED, Store
from corral.use.batch.service.upload import pieces_in_time, receive

LARGEST_JSON_BYTES = 1 << 20
LARGEST_PAGE = 10_000
MARGIN_BYTES = 256 << 20  # of the disk: batches need room for their results
CLOSE = {"connection": "close"}
OF_THE_MODEL = ("/v1/models", "/v1/chat", "/v1/completions")  # what people ask here, because OpenAI has one address
Endpoint = Callable[[Request], Awaitable[Response]]


class Carrier(Protocol):
    """Who carries out batches."""

    def submit(self, identity: str) -> None: ...

    def cancel(self, identity: str) -> dict[str, Any]: ...


def make_app(store: Store, carrier: Carrier, key: str, largest_upload_bytes: int) -> ASGIApp:
    """The whole API behind its key."""
    api = _Api(store, carrier, largest_upload_bytes)
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
    return _Door(Starlette(routes=routes, exception_handlers=answers), key)


class _Door:
    """Lets in who has the key; `/health` is open."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._wanted = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if scope["path"] == "/health" or hmac.compare_digest(given, self._wanted):
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
    elif isinstance(error, OSError):  # of the machine: no path of the server's is told
        error = Refusal(
            507 if error.errno == errno.ENOSPC else 500, f"The server cannot do that now ({error.strerror})."
        )
    assert isinstance(error, Refusal)
    return JSONResponse(error.body(), error.status, CLOSE)


def _unknown_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    words = f"{request.method} {request.url.path[:200]}"
    text = f"There is no {words}; this server has /v1/files and /v1/batches."
    if request.url.path.startswith(OF_THE_MODEL):
        text += " The model itself answers at the deployment's own address: see `corral status`."
    if status == 405:
        text = f"{HTTPStatus(405).phrase}: {words}."
    return JSONResponse(Refusal(status, text).body(), status, CLOSE)


class _Api:
    """What each path does."""

    def __init__(self, store: Store, carrier: Carrier, largest_upload_bytes: int) -> None:
        self._store, self._carrier, self._largest = store, carrier, largest_upload_bytes

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
            about = await run_in_threadpool(self._store.keep_upload, identity, form["filename"], "batch", path)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return JSONResponse(about)

    async def files(self, request: Request) -> Response:
        wanted = request.query_params.get("purpose")
        found = await run_in_threadpool(self._store.files)
        return _page(request, [file for file in found if wanted in (None, file["purpose"])])

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
        await run_in_threadpool(self._store.file, file)
        window = str(body.get("completion_window", "24h"))[:80]
        batch = await run_in_threadpool(self._store.add_batch, file, endpoint, window, metadata)
        self._carrier.submit(batch["id"])
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
        return JSONResponse(await run_in_threadpool(self._carrier.cancel, identity))


async def _json(request: Request) -> dict[str, Any]:
    """The body as an object, within bounds of size, time and depth."""
    data = bytearray()
    async for piece in pieces_in_time(request.stream()):
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
    asked, after = request.query_params.get("limit", "20"), request.query_params.get("after")
    if not asked.isascii() or not asked.isdigit() or not 1 <= int(asked[:9]) <= LARGEST_PAGE:
        raise Refusal(400, f"limit is {asked[:80]!r}; it is a number from 1 to {LARGEST_PAGE}.")
    if request.query_params.get("order") == "asc":
        items = items[::-1]
    if after is not None:
        at = next((n for n, item in enumerate(items) if item["id"] == after), len(items))
        items = items[at + 1 :]
    page = items[: int(asked)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(items) > len(page)
    return JSONResponse({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})
