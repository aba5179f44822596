"""The near end of a tunnel: a port of this machine that Corral holds itself, whatever happens to ssh.

ssh listens on a socket file in a folder that only this user can enter, and comes and goes with the connection. The
port is held for the tunnel's whole life, so no other user of the machine can take it between two connections and be
given a key. While ssh is away, connections to the port are closed at once: their request has gone nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from pathlib import Path
from types import TracebackType
from typing import Self, cast


class NearEnd:
    """Passes on what comes to a port, in both directions, from a thread of its own."""

    def __init__(self, port: int, far: Path) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self._far = str(far)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ends: set[_End] = set()
        self._thread = threading.Thread(target=self._run, name="corral-near-end", daemon=True)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await self._loop.create_server(lambda: _Near(self._far, self._ends), sock=self._listener)
        await self._stop.wait()
        self._loop.remove_reader(self._listener)  # a server that closes while it accepts loses connections' sockets
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=1)
        server.close()
        for end in list(self._ends):
            if end.transport is not None:
                end.transport.abort()
        await asyncio.sleep(0)  # transports close their sockets in the loop's next round


class _End(asyncio.Protocol):
    """One side of a connection; what it reads goes to the other side."""

    def __init__(self, ends: set[_End]) -> None:
        self._ends = ends
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None
        self.ended = False  # it will say nothing more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._ends.add(self)
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        self.ended = True
        other = self.other
        if other is None or other.ended or other.transport is None:
            return False
        with contextlib.suppress(OSError, RuntimeError):
            other.transport.write_eof()
        return True  # the answer may still be on its way

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ends.discard(self)
        self.transport = None
        other, self.other = self.other, None
        if other is not None and other.transport is not None:
            other.transport.abort() if exc else other.transport.close()


class _Near(_End):
    """The side of a client: nothing is read of it before ssh has taken the connection."""

    def __init__(self, far: str, ends: set[_End]) -> None:
        super().__init__(ends)
        self._far = far

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.pause_reading()
        self._joining = asyncio.get_running_loop().create_task(self._join(self.transport))

    async def _join(self, transport: asyncio.Transport) -> None:
        far = _End(self._ends)
        far.other = self
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: far, self._far)
        except OSError:
            _reset(transport)
            return
        if self.transport is None:  # the client left meanwhile
            if far.transport is not None:
                far.transport.abort()
            return
        self.other = far
        self.transport.resume_reading()


def _reset(transport: asyncio.Transport) -> None:
    """Close a connection so that the client sees that it was refused, and not that an answer ended."""
    with contextlib.suppress(OSError):
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
