"""An ASGI application served by uvicorn in a thread of its own, with the bounds that uvicorn leaves to a proxy.

The batch service and the console run in it. Refusals have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from corral.base.errors import ConflictError
from corral.client.http1 import LARGEST_HEAD_BYTES, response
from corral.serve.errors import error_body

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


HEAD_S = 20.0  # from the start of a connection, or of a request, to the end of its head
MOST_CONNECTIONS = 512


class Connection(HttpToolsProtocol):
    """Ends connections that send nothing, that never end a head, and those beyond the most that are served."""

    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = -1  # of a head that is being read; -1: none

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._deadline = self.loop.call_later(HEAD_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes >= 0:
            self._head_bytes += len(data)
            if self._head_bytes > LARGEST_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(Refusal(431, "The request's headers are too long."))

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(400, "This is not a valid HTTP request."))

    def _refuse(self, refusal: Refusal) -> None:
        body = json.dumps(refusal.body()).encode()
        self.transport.write(response(refusal.status, body, extra=b"connection: close\r\n"))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._head_bytes = -1
        if self.parser.should_upgrade():
            raise ValueError("no other protocol is spoken here")  # otherwise its body would be read as a request
        super().on_headers_complete()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


IDLE_S = 30  # a connection between two requests


class Hosted:
    """Listens at once, so that a port that is taken is known first; answers once it was started."""

    def __init__(self, bind: str, port: int, name: str, ending_s: int) -> None:
        self._socket = listen(bind, port)
        self._name, self._ending_s = name, ending_s
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def start(self, app: Any) -> None:
        self._server = uvicorn.Server(
            uvicorn.Config(
                app, http=Connection, ws="none", lifespan="off", log_config=None, log_level="critical",
                access_log=False, server_header=False, date_header=False, timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=self._ending_s,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._serve, args=(self._server,), name=self._name, daemon=True)
        self._thread.start()

    def _serve(self, server: uvicorn.Server) -> None:
        asyncio.run(server.serve(sockets=[self._socket]))

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
