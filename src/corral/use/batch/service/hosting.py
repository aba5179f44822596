"""An ASGI application served by uvicorn in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import uvicorn

from corral.base.errors import ConflictError
from corral.use.batch.service.connection import Connection

IDLE_S = 30  # a connection between two requests


class Hosted:
    """Listens from the beginning, so that a port that is taken is known first; answers once it was started."""

    def __init__(self, bind: str, port: int, name: str, ending_s: int) -> None:
        self._socket = listen(bind, port)
        self._name, self._ending_s = name, ending_s
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        found: int = self._socket.getsockname()[1]
        return found

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
        """Answers under way have `ending_s` to end."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(self._ending_s + 5)
        self._socket.close()


def listen(bind: str, port: int) -> socket.socket:
    """From now on connections are accepted, if only answered once the service runs."""
    try:
        return socket.create_server(
            (bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET, backlog=512
        )
    except OSError as error:
        raise ConflictError(
            f"cannot listen on {bind}:{port}: {error.strerror}.", "Choose another --port; 0 takes any free one."
        ) from error
