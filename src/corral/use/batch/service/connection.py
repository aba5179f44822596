"""One connection to the batch service: uvicorn's, with bounds that it leaves to a proxy in front of it."""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from corral.client.http1.reading import LARGEST_HEAD_BYTES
from corral.client.http1.writing import response
from corral.use.batch.service.refusal import Refusal

HEAD_S = 20.0  # from the start of a connection, or of a request, to the end of its head
MOST_CONNECTIONS = 512


class Connection(HttpToolsProtocol):
    """Ends connections that say nothing, that never end a head, and those beyond the number that is served."""

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
