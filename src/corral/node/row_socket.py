"""Rows for the engine without HTTP: a Unix socket inside vLLM's own API server process.

The guard opens it when the server starts, one for each API server process, in the folder that `CORRAL_ROW_SOCKETS`
names: only the deployment's owner can enter that folder, so no key is asked for. Who connects may send any number of
requests and gets the answers as they come, in any order:

    request   bytes of the body (4), number (4), bytes of the path (1), path, body; without a path: forget that number
    answer    bytes of the body (4), number (4), status (2), body

Completions and chats go straight to the objects that vLLM's own routes call. Where these are not as expected, and for
every request that they do not answer, the application itself is called as a web server would call it: refusals are
the server's own words. A connection that closes takes its requests with it.

Standard library only, and nothing of corral: the file is copied to where the engine runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from contextlib import suppress
from typing import Any, Callable, Dict, List, Optional, Tuple

REQUEST = struct.Struct(">IIB")
ANSWER = struct.Struct(">IIH")
LARGEST_BYTES = 256 << 20

SERVING = {
    "/v1/completions": ("openai_serving_completion", "create_completion"),
    "/v1/chat/completions": ("openai_serving_chat", "create_chat_completion"),
}
Answer = Tuple[int, bytes]


def sockets_in(folder: str) -> List[str]:
    """The names of the sockets of a folder, of living and of dead processes."""
    with suppress(OSError):
        return sorted(name for name in os.listdir(folder) if name.startswith("rows-") and name.endswith(".sock"))
    return []


def connected(folder: str, name: str) -> Optional[socket.socket]:
    """A connection to one of them; None where nobody listens."""
    made = socket.socket(socket.AF_UNIX)
    try:
        made.settimeout(5)
        at_short_name(folder, name, made.connect)
        made.setblocking(False)
    except OSError:
        made.close()
        return None
    return made


def at_short_name(folder: str, name: str, use: Callable[[str], None]) -> None:
    """Use a socket by a short name: the system takes no address of more than 107 bytes."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        short = f"/proc/self/fd/{opened}/{name}"
        use(short if os.path.isdir(f"/proc/self/fd/{opened}") else os.path.join(folder, name))
    finally:
        os.close(opened)


def _listening(folder: str) -> socket.socket:
    """A new socket of this process; those of dead ones go away."""
    for name in sockets_in(folder):
        other = connected(folder, name)
        if other is None:
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))
        else:
            other.close()
    made, name = socket.socket(socket.AF_UNIX), f"rows-{os.getpid()}.sock"
    at_short_name(folder, f".{name}", made.bind)
    os.chmod(os.path.join(folder, f".{name}"), 0o600)
    made.listen(64)
    os.rename(os.path.join(folder, f".{name}"), os.path.join(folder, name))  # there only once it answers
    return made


class RowSocket:
    """Answers rows by an application: `app` is called as a web server would, `owner` holds vLLM's own objects."""

    def __init__(self, app: Any, owner: Any, refusal: Callable[[str], Optional[Answer]]) -> None:
        self._app, self._owner, self._refusal = app, owner, refusal
        self._direct: Dict[str, Any] = {}
        self._server: Any = None

    async def listen(self, folder: str) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), sock=_listening(folder))

    async def close(self) -> None:
        """Take no more; an event loop that ends with a server still open may hang (uvloop)."""
        if self._server is not None:
            self._server.close()
            await asyncio.sleep(0)

    async def answer(self, path: str, body: bytes) -> Answer:
        return self._refusal(path) or await self._straight(path, body) or await self._through(path, body)

    async def _straight(self, path: str, body: bytes) -> Optional[Answer]:
        """By the object behind the route; None where it does not answer."""
        if path not in self._direct:
            self._direct[path] = _handler(getattr(self._owner, "state", None), path)
        if self._direct[path] is None:
            return None
        handler, kind = self._direct[path]
        try:
            request = kind.model_validate(json.loads(body))
            if getattr(request, "stream", None):
                return None
            found = await handler(request, None)
            if getattr(found, "error", None) is not None:
                return None
            return 200, found.model_dump_json().encode()
        except Exception:  # the application says what is wrong, in its own words
            return None

    async def _through(self, path: str, body: bytes) -> Answer:
        """By the application, as a web server would ask it."""
        asked = [{"type": "http.request", "body": body, "more_body": False}]
        status, parts = [500], []

        async def receive() -> Dict[str, Any]:
            return asked.pop() if asked else await _never()

        async def send(message: Dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            else:
                parts.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
                 "raw_path": path.encode(), "root_path": "", "query_string": b"", "scheme": "http",
                 "headers": headers, "client": None, "server": None, "state": {}, "app": self._owner}  # fmt: skip
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            said = {"message": f"{type(error).__name__}: {error}", "code": 500}
            return 500, json.dumps({"error": said}).encode()
        return status[0], b"".join(parts)


async def _never() -> Dict[str, Any]:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


def _handler(state: Any, path: str) -> Any:
    """The method behind a route and the type of its request, where both are as in the versions that we know."""
    owner, name = SERVING.get(path, ("", ""))
    method = getattr(getattr(state, owner, None), name, None) if owner else None
    if method is None:
        return None
    kind = getattr(method, "__annotations__", {}).get("request")
    if isinstance(kind, str):
        kind = getattr(method, "__globals__", {}).get(kind)
    return (method, kind) if hasattr(kind, "model_validate") else None


class _Connection(asyncio.Protocol):
    """One client and its requests under way."""

    def __init__(self, rows: RowSocket) -> None:
        self._rows = rows
        self._buffer = bytearray()
        self._tasks: Dict[int, Any] = {}
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Optional[Exception]) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    def data_received(self, data: bytes) -> None:
        buffer, at = self._buffer, 0
        buffer += data
        while len(buffer) - at >= REQUEST.size:
            length, number, named = REQUEST.unpack_from(buffer, at)
            if length > LARGEST_BYTES:
                self._transport.abort()
                return
            begin = at + REQUEST.size
            end = begin + named + length
            if len(buffer) < end:
                break
            self._begin(number, bytes(buffer[begin : begin + named]).decode(), bytes(buffer[begin + named : end]))
            at = end
        del buffer[:at]

    def _begin(self, number: int, path: str, body: bytes) -> None:
        if path:
            self._tasks[number] = asyncio.get_running_loop().create_task(self._answer(number, path, body))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, number: int, path: str, body: bytes) -> None:
        try:
            status, answer = await self._rows.answer(path, body)
            self._transport.write(ANSWER.pack(len(answer), number, status) + answer)
        finally:
            self._tasks.pop(number, None)
