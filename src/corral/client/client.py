"""One timed request to an endpoint, streamed or not -> Reply. Built for load: thousands at once, cheaply.

A client keeps a pool of connections and reuses them. `send` hands back a future without making a task, for load
generators; `request` awaits it; `stream` gives the pieces as they come; `request_sync` and `stream_sync` are the same
for code without an event loop, over one background thread. Every failure is one of `corral.client.errors`.

Time limits: `stall_s` is how long a server may be silent, `timeout_s` how long the whole answer may take (none by
default).

A request on a connection that had been idle and turns out to be closed is sent once more on a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from corral.client.endpoint import Endpoint
from corral.client.errors import error_from_status
from corral.client.pool import Page, Pool, PoolLimits
from corral.client.reply import Choice, Piece, Reply, Timing, Token, Usage, read_piece
from corral.client.wire import Exchange

__all__ = ["CHAT", "COMPLETIONS", "Choice", "Client", "Page", "Piece", "Reply", "Timing", "Token", "Usage", "run",
           "wait"]  # fmt: skip

T = TypeVar("T")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = "application/json"
_now = time.monotonic_ns
_encode = msgspec.json.Encoder().encode


class Client:
    """Sends requests to one endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        connections: int = 1024,
        stall_s: float = 600.0,
        timeout_s: float | None = None,
        connect_s: float = 10.0,
    ) -> None:
        self.endpoint = endpoint
        self.limits = PoolLimits(connections, stall_s, timeout_s, connect_s)
        self._heads: dict[str, bytes] = {}
        self._pools: dict[int, Pool] = {}

    def __repr__(self) -> str:
        return f"Client({self.endpoint.base_url!r}, {self.endpoint.model!r})"

    # For programs with an event loop

    def send(
        self,
        path: str,
        body: Mapping[str, Any] | bytes,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        on_event: Callable[[bytes, int], None] | None = None,
    ) -> asyncio.Future[Reply]:
        """Send a request now; the future brings its Reply or its RequestError.

        A mapping gets the endpoint's model unless it names one; bytes are sent as they are. `on_event` is called with
        the data and the time of every streamed event.
        """
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._submit(future, path, body, timeout_s, request_id, on_event)
        return future

    async def request(
        self,
        path: str,
        body: Mapping[str, Any] | bytes,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        on_event: Callable[[bytes, int], None] | None = None,
    ) -> Reply:
        """Send a request and wait for its whole answer; cancelling closes the connection."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        exchange = self._submit(future, path, body, timeout_s, request_id, on_event)
        try:
            return await future
        except asyncio.CancelledError:
            self._pool().abandon(exchange)
            raise

    async def stream(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> AsyncIterator[Piece | Reply]:
        """The pieces of a streamed answer as they come, and at the end the Reply; failures are raised."""
        pieces: deque[Piece] = deque()
        news = asyncio.Event()

        def add(event: bytes, at_ns: int) -> None:
            pieces.extend(read_piece(event, at_ns))
            news.set()

        whole = {**body, "stream": True}
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: news.set())
        exchange = self._submit(future, path, whole, timeout_s, "", add)
        try:
            while True:
                while pieces:
                    yield pieces.popleft()
                if future.done():
                    break
                await news.wait()
                news.clear()
            yield future.result()
        finally:
            if not future.done():
                future.cancel()
                self._pool().abandon(exchange)

    async def page(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Page:
        """GET a path (or POST a body to it); the answer is returned whatever its status."""
        future: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        head = self._head(path, "GET" if body is None else "POST", b"" if body is None else (raw := _encode(body)))
        exchange = Exchange(head, b"" if body is None else raw, future, _now())
        exchange.page = True
        self._limit(exchange, timeout_s)
        self._pool().start(exchange)
        try:
            return await future
        except asyncio.CancelledError:
            self._pool().abandon(exchange)
            raise

    def post(self, path: str, body: Mapping[str, Any] | bytes, content_type: str = JSON) -> asyncio.Future[Page]:
        """Send a body (none: GET) to a path whose answer is no completion; every status but 200 is an error."""
        answer: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        page: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        raw = self._body(body)
        exchange = Exchange(self._head(path, "POST" if raw else "GET", raw, kind=content_type), raw, page, _now())
        exchange.page = True
        self._limit(exchange, None)
        page.add_done_callback(lambda done: self._pass_on(done, answer))
        self._pool().start(exchange)
        return answer

    def _pass_on(self, page: asyncio.Future[Page], answer: asyncio.Future[Page]) -> None:
        if answer.done() or page.cancelled():
            return
        if (error := page.exception()) is not None:
            answer.set_exception(error)
        elif (result := page.result()).status == 200:
            answer.set_result(result)
        else:
            answer.set_exception(error_from_status(result.status, result.body, None, self.endpoint.root))

    async def models(self) -> list[str]:
        """The names the server serves."""
        page = await self.page("/v1/models", timeout_s=self.limits.timeout_s or 30)
        if page.status != 200:
            raise error_from_status(page.status, page.body, None, self.endpoint.root)
        return [card["id"] for card in page.json()["data"]]

    async def close(self) -> None:
        """Close all connections of the running loop; requests under way fail."""
        pool = self._pools.pop(id(asyncio.get_running_loop()), None)
        if pool is not None:
            await pool.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # For programs without an event loop

    def request_sync(
        self, path: str, body: Mapping[str, Any] | bytes, *, timeout_s: float | None = None, request_id: str = ""
    ) -> Reply:
        """Like `request`, for code without an event loop; Ctrl-C closes the connection."""
        return _background().call(self.request(path, body, timeout_s=timeout_s, request_id=request_id))

    def page_sync(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Page:
        return _background().call(self.page(path, body, timeout_s=timeout_s))

    def models_sync(self) -> list[str]:
        return _background().call(self.models())

    def stream_sync(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> Iterator[Piece | Reply]:
        """Like `stream`, for code without an event loop; leaving the loop early closes the connection."""
        inbox: queue.SimpleQueue[Piece | Reply | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async with contextlib.aclosing(self.stream(path, body, timeout_s=timeout_s)) as pieces:  # type: ignore[type-var]
                    async for piece in pieces:
                        inbox.put(piece)
                inbox.put(None)
            except BaseException as error:
                inbox.put(error)
                raise

        running = _background().start(pump())
        try:
            while (item := inbox.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            running.cancel()

    def close_sync(self) -> None:
        _background().call(self.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_sync()

    # Inside

    def _body(self, body: Mapping[str, Any] | bytes) -> bytes:
        if isinstance(body, bytes):
            return body
        return _encode(body if "model" in body else {"model": self.endpoint.model, **body})

    def _head(self, path: str, method: str, body: bytes, request_id: str = "", kind: str = JSON) -> bytes:
        name = f"{method} {path} {kind}"
        head = self._heads.get(name)
        if head is None:
            parts = urlsplit(self.endpoint.root)
            lines = [f"{method} {parts.path}{path} HTTP/1.1", f"host: {parts.netloc}", "accept: */*"]
            key = self.endpoint.key()
            if key:
                lines.append(f"authorization: Bearer {key}")
            lines += ["user-agent: corral", f"content-type: {kind}", "content-length: "]
            head = self._heads[name] = "\r\n".join(lines).encode()
        if request_id:
            return b"%b%d\r\nx-request-id: %b\r\n\r\n" % (head, len(body), request_id.encode())
        return b"%b%d\r\n\r\n" % (head, len(body))

    def _submit(
        self,
        future: asyncio.Future[Reply],
        path: str,
        fields: Mapping[str, Any] | bytes,
        timeout_s: float | None,
        request_id: str,
        on_event: Callable[[bytes, int], None] | None,
    ) -> Exchange:
        body = self._body(fields)
        exchange = Exchange(self._head(path, "POST", body, request_id), body, future, _now())
        exchange.on_event = on_event
        if not isinstance(fields, bytes):
            exchange.top = fields.get("top_logprobs" if fields.get("logprobs") is True else "logprobs")
        self._limit(exchange, timeout_s)
        self._pool().start(exchange)
        return exchange

    def _limit(self, exchange: Exchange, timeout_s: float | None) -> None:
        limit = timeout_s or self.limits.timeout_s
        if limit:
            exchange.deadline_ns = exchange.asked_ns + int(limit * 1e9)

    def _pool(self) -> Pool:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(id(loop))
        if pool is None or pool.loop is not loop:
            pool = self._pools[id(loop)] = Pool(self.endpoint, self.limits, self._heads.clear)
        return pool

    def forget_key(self) -> None:
        """Read the key file again for the next request: a server that came back may have another key."""
        self._heads.clear()


class _Background:
    """One event loop in a daemon thread, for the synchronous methods."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        threading.Thread(target=self.loop.run_forever, name="corral-client", daemon=True).start()

    def start(self, work: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: close the connection, then leave
            raise


_background_lock = threading.Lock()
_background_loop: _Background | None = None


def _forget_background() -> None:
    """A forked child has the loop, but not its thread."""
    global _background_loop
    _background_loop = None


os.register_at_fork(after_in_child=_forget_background)


def _background() -> _Background:
    global _background_loop
    with _background_lock:
        if _background_loop is None:
            _background_loop = _Background()
        return _background_loop


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the fastest event loop there is."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(main)


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on the background loop, from code without one; Ctrl-C cancels it."""
    return _background().call(work)
