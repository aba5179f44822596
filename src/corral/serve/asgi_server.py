"""An ASGI application served by uvicorn in a thread of its own, with the bounds that uvicorn leaves to a proxy.

The batch service and the console run in it. Refusals have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import threading
import time
from collections.abc import Hashable
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from corral.base.errors import ConflictError
from corral.client.errors import error_body
from corral.client.http1 import LARGEST_HEAD_BYTES, is_chunked, of_last_head, response
from corral.serve.connections import SWEEP_S, ConnectionPhase, ConnectionProgress, ConnectionTable, ServerLimits

_PATH = re.compile(r"(?<![\w:/.~-])/(?:[^\s/'\"`]+/)+")


class Refusal(Exception):  # noqa: N818 - an answer, not an error of ours
    """Ends a request with a status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return error_body(str(self), kind)


def without_paths(text: str) -> str:
    """A text for clients: without the folders of the server's files, only their names."""
    return _PATH.sub("…/", text)


_SHOWN = "corral.key_shown"  # the extension of a scope by which its connection is told


def note_key(scope: Any) -> None:
    """A request has shown a key, or a cookie, that is known: its connection need not make room for others."""
    if (tell := scope.get("extensions", {}).get(_SHOWN)) is not None:
        tell()


class Connection(HttpToolsProtocol):
    """A connection within the limits of `serve.connections`."""

    def __init__(self, *given: Any, table: ConnectionTable[Connection], **named: Any) -> None:
        super().__init__(*given, **named)
        self._table, self._head_bytes = table, -1  # of a head that is being read; -1: none
        self._in_body = False
        self.address, self.owner = "", cast("Hashable", None)
        self.progress = ConnectionProgress(time.monotonic())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self._table.add(self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.discard(self)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: what it asked for is still answered; one that has left is noticed at that."""
        waits = self.cycle is not None and not self._in_body and not self.cycle.response_complete
        if waits:
            self.cycle.keep_alive = False
        return waits

    def data_received(self, data: bytes) -> None:
        self.progress.received(len(data))
        super().data_received(data)
        if self._head_bytes >= 0:
            self._head_bytes += len(data) if self._head_bytes else of_last_head(data)
            if self._head_bytes > LARGEST_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(Refusal(431, "The request's headers are too long."))

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(400, "This is not a valid HTTP request."))

    def _refuse(self, refusal: Refusal) -> None:
        body = json.dumps(refusal.body()).encode()
        self.transport.write(response(refusal.status, body, extra=b"connection: close\r\n"))
        self.transport.close()

    # called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_SHOWN: self._note_key}  # type: ignore[dict-item]
        self._head_bytes = 0
        self._enter(ConnectionPhase.HEAD)

    def on_headers_complete(self) -> None:
        self._head_bytes = -1
        if self.parser.should_upgrade():
            raise ValueError("no other protocol is spoken here")  # otherwise its body would be read as a request
        is_chunked(self.headers)  # refuses other codings
        self._in_body = True
        self._enter(ConnectionPhase.BODY)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._enter(ConnectionPhase.ANSWER)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The rest of a body that nobody reads has to advance all the same."""
        self._enter(ConnectionPhase.BODY if self._in_body else ConnectionPhase.IDLE)
        super().on_response_complete()
        if self.pipeline:  # what was sent ahead comes first: otherwise it grows without bound
            self.flow.pause_reading()

    def _enter(self, phase: ConnectionPhase) -> None:
        self.progress.enter(phase, time.monotonic())

    # called by the server

    def _note_key(self) -> None:
        self._table.show_key(self, "the owner's")

    def end_for_room(self) -> None:
        self.transport.abort()

    def sweep(self, now_s: float) -> None:
        progress, transport = self.progress, self.transport
        if transport.is_closing() and progress.phase is not ConnectionPhase.CLOSING:
            self._enter(ConnectionPhase.CLOSING)
        if self.flow.read_paused:  # the application is slow, not the client
            self._enter(progress.phase)
        unread_bytes = transport.get_write_buffer_size()
        if not progress.is_stuck(self._table.limits, now_s, unread_bytes):
            return
        waits = progress.phase is ConnectionPhase.BODY and not self.cycle.response_started
        if waits and not unread_bytes:
            self._refuse(Refusal(408, "The request did not arrive in time."))
        else:
            transport.abort()


class Hosted:
    """Listens at once, so that a port that is taken is known first; answers once it was started."""

    def __init__(self, bind: str, port: int, name: str, ending_s: int, limits: ServerLimits) -> None:
        self._socket = listen(bind, port)
        self.connections: ConnectionTable[Connection] = ConnectionTable(limits)
        self._name, self._ending_s = name, ending_s
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def start(self, app: Any) -> None:
        http: Any = partial(Connection, table=self.connections)
        idle_s = math.ceil(self.connections.limits.idle_s)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app, http=http, ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
                server_header=False, date_header=False, timeout_keep_alive=idle_s,
                timeout_graceful_shutdown=self._ending_s,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._serve, args=(self._server,), name=self._name, daemon=True)
        self._thread.start()

    def _serve(self, server: uvicorn.Server) -> None:
        asyncio.run(self._serve_and_sweep(server))

    async def _serve_and_sweep(self, server: uvicorn.Server) -> None:
        sweeper = asyncio.ensure_future(self._sweep())
        try:
            await server.serve(sockets=[self._socket])
        finally:
            sweeper.cancel()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.connections.sweep(time.monotonic())

    def close(self) -> None:
        """Stop; answers under way have `ending_s` to end."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(self._ending_s + 5)
        self._socket.close()


def listen(bind: str, port: int) -> socket.socket:
    """A socket that accepts connections; they are answered once the service runs."""
    try:
        return socket.create_server(
            (bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET, backlog=512
        )
    except OSError as error:
        raise ConflictError(
            f"cannot listen on {bind}:{port}: {error.strerror}.", "Choose another --port; 0 takes any free one."
        ) from error
