"""The fake server as a thread (for tests) and as a process (for the command line)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from corral.base.errors import ConflictError, UsageError
from corral.fake import words
from corral.fake.app import App, FakeOptions
from corral.fake.connection import FakeConnection
from corral.fake.faults import parse_fault
from corral.fake.pace import Pace


class FakeServer:
    """The server in a thread of its own, for tests: `with FakeServer(FakeOptions(…)) as server: server.url`."""

    def __init__(self, options: FakeOptions | None = None) -> None:
        self.options = options or FakeOptions()
        self.url = ""
        self.died: int | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="corral-fake-server", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self.app: App | None = None

    def __enter__(self) -> FakeServer:
        self._thread.start()
        self._ready.wait()
        if self._failure:
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop serving; connections are closed, the log is complete."""
        if self._loop and self._stop and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def flush(self) -> None:
        """Bring the log on disk up to date."""
        self._call(lambda app: app.log.flush())

    def set_faults(self, *faults: str) -> None:
        """Replace the faults in force."""
        parsed = [parse_fault(f) for f in faults]
        self._call(lambda app: app.book.set(parsed))

    def set_pace(self, pace: Pace) -> None:
        """Change the pace for tokens still to come."""

        def change(app: App) -> None:
            app.engine.pace = pace

        self._call(change)

    def _call(self, what: Callable[[App], None]) -> None:
        """Run a function inside the server's loop, and wait for its end."""
        app, done = self.app, threading.Event()
        assert self._loop is not None
        assert app is not None

        def work() -> None:
            what(app)
            done.set()

        self._loop.call_soon_threadsafe(work)
        done.wait(5)

    def _main(self) -> None:
        try:
            _run(self.options, self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()

        def ready(app: App, url: str) -> None:
            self.app, self.url = app, url
            self._ready.set()

        self.died = await serve(self.options, self._stop, ready)


async def serve(options: FakeOptions, stop: asyncio.Event, ready: Callable[[App, str], None]) -> int | None:
    """Serve until `stop` is set or a `die` fault strikes; the latter's exit code is returned."""
    loop = asyncio.get_running_loop()
    death: list[int] = []

    def die(code: int) -> None:
        death.append(code)
        stop.set()

    app = App(options, loop, die)
    words.tape()  # built now: it would delay the first token of the first request
    listener = _listen(options)
    host, port = listener.getsockname()[:2]
    server = await loop.create_server(lambda: FakeConnection(app), sock=listener, backlog=4096)
    flapping = asyncio.create_task(_flap(app, server, (host, port)))
    flushing = asyncio.create_task(_flush(app))
    ready(app, f"http://{host}:{port}")
    try:
        await stop.wait()
    finally:
        for task in (flapping, flushing):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            server = await flapping
        server.close()
        for connection in list(app.connections):
            connection.reset()
        await asyncio.sleep(0)
        app.engine.close()
        app.log.close()
    return death[0] if death else None


def _listen(options: FakeOptions, port: int | None = None) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port if port is None else port))
        listener.listen(4096)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConflictError(
            f"the fake server cannot listen on {options.host}:{options.port}: {error.strerror}.",
            "Choose another port, or 0 for any free one.",
        ) from error
    return listener


async def _flush(app: App) -> None:
    while True:
        await asyncio.sleep(0.2)
        app.log.flush()


async def _flap(app: App, server: asyncio.Server, address: tuple[str, int]) -> asyncio.Server:
    """Stop listening for a while, again and again, as long as a `flap` fault is set; returns the open server."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            fault = app.book.of_kind("flap")
            if fault is None:
                await asyncio.sleep(0.05)
                continue
            await asyncio.sleep(max(0.0, fault.period - fault.down))
            server.close()
            for connection in list(app.connections):
                connection.reset()
            await asyncio.sleep(fault.down)
            listener = _listen(app.options, address[1])
            server = await loop.create_server(lambda: FakeConnection(app), sock=listener, backlog=4096)
    return server


def _run(options: FakeOptions, main: Any) -> Any:
    factory = None
    if options.uvloop:
        with contextlib.suppress(ImportError):
            import uvloop

            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def run(options: FakeOptions, until_eof: bool = False) -> int:
    """Serve in this process until a signal, or until standard input ends; returns the exit code."""
    if options.key_file and not options.key_file.is_file():
        raise UsageError(f"there is no key file {options.key_file}.", "Create it with mode 0600.")

    async def main() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        codes = {signal.SIGTERM: 0, signal.SIGINT: 130}
        code = [0]

        def leave(signal_: signal.Signals) -> None:
            code[0] = codes[signal_]
            stop.set()

        for name in codes:
            loop.add_signal_handler(name, leave, name)
        if until_eof:

            def read() -> None:
                if not os.read(0, 4096):
                    loop.remove_reader(0)
                    stop.set()

            loop.add_reader(0, read)

        def ready(_: App, url: str) -> None:
            gc.collect()
            gc.freeze()  # a full collection would delay all requests
            print(json.dumps({"url": url, "pid": os.getpid(), "model": options.model}), flush=True)  # noqa: T201

        died = await serve(options, stop, ready)
        if died is not None:
            os._exit(died)
        return code[0]

    return int(_run(options, main()))
