"""One timed request to an endpoint, streamed or not -> Reply. Built for load: thousands at once, cheaply.

A client keeps a pool of connections and reuses them. `send` hands back a future without making a task, for load
generators; `request` awaits it; `stream` gives the pieces as they come; `request_sync` and `stream_sync` are the same
for code without an event loop, over one background thread. Every failure is one of `corral.request_errors`.

Time limits: `stall_s` is how long a server may be silent, `timeout_s` how long the whole answer may take (none by
default). Both are swept every few hundredths of their length, so that a request costs no timer of its own.

A request on a connection that had been idle and turns out to be closed is sent once more on a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import ssl
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from corral.endpoint import Endpoint
from corral.reply import Assembly, Choice, Piece, Reply, Timing, Token, Usage, read_piece, read_reply
from corral.request_errors import (
    KeyRefusedError,
    RequestError,
    ServerGoneError,
    TimedOutError,
    error_from_status,
)
from corral.wire import Exchange, Wire

__all__ = ["Choice", "Client", "Page", "Piece", "Reply", "Timing", "Token", "Usage", "run", "wait"]

T = TypeVar("T")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_now = time.monotonic_ns
_encode = msgspec.json.Encoder().encode
_STALE_NS = 1_000_000_000  # idle for this long: the server may have closed it
_IDLE_NS = 60_000_000_000
_SLICE = 32  # events decoded in one go


class Page(msgspec.Struct, frozen=True):
    """An answer that is not a completion: health, metrics, a list of models."""

    status: int
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


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
        self.connections = connections
        self.stall_s, self.timeout_s, self.connect_s = stall_s, timeout_s, connect_s
        self._heads: dict[str, bytes] = {}
        self._pools: dict[int, _Pool] = {}

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
        """Send a request and wait for its whole answer; cancelling closes its connection."""
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

        def take(event: bytes, at_ns: int) -> None:
            pieces.extend(read_piece(event, at_ns))
            news.set()

        whole = {**body, "stream": True}
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: news.set())
        exchange = self._submit(future, path, whole, timeout_s, "", take)
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
        """GET a path (or POST a body to it) and take what comes, whatever its status."""
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

    async def models(self) -> list[str]:
        """The names the server serves."""
        page = await self.page("/v1/models", timeout_s=self.timeout_s or 30)
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

    # For programs without one

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

    def _head(self, path: str, method: str, body: bytes, request_id: str = "") -> bytes:
        name = f"{method} {path}"
        head = self._heads.get(name)
        if head is None:
            parts = urlsplit(self.endpoint.root)
            lines = [f"{method} {parts.path}{path} HTTP/1.1", f"host: {parts.netloc}", "accept: */*"]
            key = self.endpoint.key()
            if key:
                lines.append(f"authorization: Bearer {key}")
            lines += ["user-agent: corral", "content-type: application/json", "content-length: "]
            head = self._heads[name] = "\r\n".join(lines).encode()
        if request_id:
            return b"%b%d\r\nx-request-id: %b\r\n\r\n" % (head, len(body), request_id.encode())
        return b"%b%d\r\n\r\n" % (head, len(body))

    def _submit(
        self,
        future: asyncio.Future[Reply],
        path: str,
        given: Mapping[str, Any] | bytes,
        timeout_s: float | None,
        request_id: str,
        on_event: Callable[[bytes, int], None] | None,
    ) -> Exchange:
        body = self._body(given)
        exchange = Exchange(self._head(path, "POST", body, request_id), body, future, _now())
        exchange.on_event = on_event
        if not isinstance(given, bytes):
            exchange.top = given.get("top_logprobs" if given.get("logprobs") is True else "logprobs")
        self._limit(exchange, timeout_s)
        self._pool().start(exchange)
        return exchange

    def _limit(self, exchange: Exchange, timeout_s: float | None) -> None:
        limit = timeout_s or self.timeout_s
        if limit:
            exchange.deadline_ns = exchange.asked_ns + int(limit * 1e9)

    def _pool(self) -> _Pool:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(id(loop))
        if pool is None or pool.loop is not loop:
            _raise_file_limit(self.connections + 256)
            pool = self._pools[id(loop)] = _Pool(self, loop)
        return pool

    def forget_key(self) -> None:
        """Read the key file again for the next request (the server refused what was read before)."""
        self._heads.clear()


class _Pool:
    """The connections of one client in one event loop."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self.client, self.loop = client, loop
        parts = urlsplit(client.endpoint.root)
        self.where = client.endpoint.root
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: list[Wire] = []
        self._busy: set[Wire] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: deque[Exchange] = deque()
        self._assemblies: deque[tuple[Exchange, Assembly]] = deque()
        self._addresses: list[Any] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._tick_s = max(0.02, min(client.stall_s, client.timeout_s or client.stall_s, 10.0) / 20)
        self._closed = False

    def start(self, exchange: Exchange) -> None:
        """Give a request to a free connection, a new one, or the queue."""
        wire = self._take_idle()
        if wire is not None:
            wire.reused = True
            self._busy.add(wire)
            wire.begin(exchange)
        elif len(self._busy) + len(self._opening) < self.client.connections:
            task = self.loop.create_task(self._open(exchange))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            self._waiting.append(exchange)
        if exchange.deadline_ns:
            left_s = (exchange.deadline_ns - exchange.asked_ns) / 1e9
            self._tick_s = min(self._tick_s, max(0.02, left_s / 20))
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(self._tick_s, self._sweep)

    def abandon(self, exchange: Exchange) -> None:
        """Forget a request that nobody waits for any more."""
        for wire in self._busy:
            if wire.exchange is exchange:
                self._busy.discard(wire)
                wire.abandon()
                self._next()
                return
        with contextlib.suppress(ValueError):
            self._waiting.remove(exchange)

    async def close(self) -> None:
        self._closed = True
        while self._assemblies:
            self._assemble()
        if self._sweeper:
            self._sweeper.cancel()
        for exchange in self._waiting:
            self._settle(exchange, ServerGoneError("The client was closed.", "Open a new one."))
        self._waiting.clear()
        for task in list(self._opening):
            task.cancel()
        for wire in [*self._busy, *self._idle]:
            carried = wire.exchange
            wire.abandon()
            if carried is not None:
                self._settle(carried, ServerGoneError("The client was closed.", "Open a new one."))
        self._busy.clear()
        self._idle.clear()
        await asyncio.gather(*self._opening, return_exceptions=True)
        await asyncio.sleep(0)  # transports close their sockets in the loop's next round

    # Called by connections

    def finished(self, wire: Wire, exchange: Exchange, keep: bool) -> None:
        self._busy.discard(wire)
        if keep and not self._closed:
            wire.idle_since_ns = exchange.last_ns
            waiting = self._take_waiting()
            if waiting is not None:
                wire.reused = True
                self._busy.add(wire)
                wire.begin(waiting)
            else:
                self._idle.append(wire)
        elif wire.transport is not None:
            wire.transport.close()
            self._next()
        if exchange.future.done():
            return
        if exchange.page:
            exchange.future.set_result(Page(exchange.status, b"".join(exchange.parts)))
        elif exchange.status != 200:
            self._settle(exchange, self._refusal(exchange))
        elif len(exchange.events) > _SLICE:
            self._assemblies.append((exchange, Assembly(exchange, self.where)))
            if len(self._assemblies) == 1:
                self.loop.call_soon(self._assemble)
        else:
            try:
                reply = read_reply(exchange, self.where)
            except RequestError as error:
                self._settle(exchange, error)
            else:
                exchange.future.set_result(reply)

    def _assemble(self) -> None:
        """Decode a slice of a long stream; then let the loop read what has arrived, so that its time is right."""
        if not self._assemblies:
            return
        exchange, assembly = self._assemblies[0]
        try:
            if exchange.future.done():
                self._assemblies.popleft()
            elif assembly.step(_SLICE):
                self._assemblies.popleft()
                exchange.future.set_result(assembly.reply())
        except RequestError as error:
            if self._assemblies and self._assemblies[0][0] is exchange:
                self._assemblies.popleft()
            self._settle(exchange, error)
        if self._assemblies:
            self.loop.call_soon(self._assemble)

    def failed(self, wire: Wire, exchange: Exchange, error: RequestError) -> None:
        self._busy.discard(wire)
        stale = wire.reused and exchange.sent_ns - wire.idle_since_ns > _STALE_NS
        if isinstance(error, ServerGoneError) and stale and not exchange.again and not self._closed:
            exchange.again = True
            self.start(exchange)
            return
        self._settle(exchange, error)
        self._next()

    def lost(self, wire: Wire) -> None:
        with contextlib.suppress(ValueError):
            self._idle.remove(wire)

    # Inside

    def _settle(self, exchange: Exchange, error: BaseException) -> None:
        if not exchange.future.done():
            exchange.future.set_exception(error)

    def _refusal(self, exchange: Exchange) -> RequestError:
        body = b"".join([*exchange.parts, *exchange.events])
        model = self.client.endpoint.model
        error = error_from_status(exchange.status, body, exchange.retry_after, self.where, model)
        if isinstance(error, KeyRefusedError):
            self.client.forget_key()
        return error

    def _take_idle(self) -> Wire | None:
        while self._idle:
            wire = self._idle.pop()
            if wire.transport is not None and not wire.transport.is_closing():
                return wire
        return None

    def _take_waiting(self) -> Exchange | None:
        while self._waiting:
            exchange = self._waiting.popleft()
            if not exchange.future.done():
                return exchange
        return None

    def _next(self) -> None:
        """A connection went away: whoever waits may open another."""
        waiting = self._take_waiting()
        if waiting is not None and not self._closed:
            self.start(waiting)

    async def _open(self, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(self.client.connect_s):
                wire = await self._connect()
        except TimeoutError:
            self._settle(exchange, TimedOutError(
                f"{self.where} did not accept a connection within {self.client.connect_s:g} s.",
                "Check the address and the network.",
            ))  # fmt: skip
        except ssl.SSLError as error:
            self._settle(exchange, ServerGoneError(f"No TLS connection to {self.where}: {error.reason}.",
                                                   "Check the address and its certificate."))  # fmt: skip
        except OSError as error:
            self._addresses = []
            self._settle(exchange, ServerGoneError(
                f"{self.where} cannot be reached: {error.strerror or error}.", "Is the server running?"
            ))  # fmt: skip
        except asyncio.CancelledError:
            self._settle(exchange, ServerGoneError("The client was closed.", "Open a new one."))
            raise
        else:
            if exchange.future.done():
                taken = self._take_waiting()
                if taken is None:
                    wire.idle_since_ns = _now()
                    self._idle.append(wire)
                    return
                exchange = taken
            self._busy.add(wire)
            wire.begin(exchange)
            return
        if not self._closed:
            self.loop.call_soon(self._next)

    async def _connect(self) -> Wire:
        if not self._addresses:
            found = await self.loop.getaddrinfo(self._host, self._port, type=1)
            self._addresses = [address for *_, address in found]
        failure: OSError | None = None
        for address in list(self._addresses):
            try:
                _, wire = await self.loop.create_connection(
                    lambda: Wire(self), address[0], address[1],
                    ssl=self._tls, server_hostname=self._host if self._tls else None,
                )  # fmt: skip
                return wire
            except ssl.SSLError:
                raise
            except OSError as error:
                failure = error
        raise failure or OSError("no address")

    def _sweep(self) -> None:
        """Fail what is too late, forget what nobody waits for, close what was idle for long."""
        self._sweeper = None
        now = _now()
        stall_ns = int(self.client.stall_s * 1e9)
        for wire in list(self._busy):
            exchange = wire.exchange
            if exchange is None:
                continue
            if exchange.future.done():
                self.abandon(exchange)
            elif exchange.deadline_ns and now > exchange.deadline_ns:
                self._expire(
                    wire, exchange, f"did not finish within {(exchange.deadline_ns - exchange.asked_ns) / 1e9:g} s"
                )
            elif now - wire.active_ns > stall_ns:
                self._expire(wire, exchange, f"sent nothing for {self.client.stall_s:g} s")
        for exchange in [e for e in self._waiting if e.deadline_ns and now > e.deadline_ns]:
            self._settle(
                exchange, TimedOutError(f"No connection to {self.where} became free in time.", "Raise `connections`.")
            )
        for wire in [w for w in self._idle if now - w.idle_since_ns > _IDLE_NS]:
            self._idle.remove(wire)
            wire.abandon()
        if self._busy or self._waiting or self._opening or self._idle:
            self._sweeper = self.loop.call_later(self._tick_s, self._sweep)

    def _expire(self, wire: Wire, exchange: Exchange, why: str) -> None:
        self._busy.discard(wire)
        wire.abandon()
        exchange.last_ns = _now()
        self._settle(
            exchange, TimedOutError(f"{self.where} {why}.", "Is it overloaded? Allow more time, or ask for less.")
        )
        self._next()


class _Background:
    """One event loop in a daemon thread, for the sync face."""

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


def _raise_file_limit(wanted: int) -> None:
    """Each connection is an open file: lift the soft limit as far as the hard one allows."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on the background loop, from code without one; Ctrl-C cancels it."""
    return _background().call(work)
