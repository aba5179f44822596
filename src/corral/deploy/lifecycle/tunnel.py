"""Bringing an endpoint to this machine: a background process that holds a port, and an ssh forward behind it.

The port is part of the deployment's endpoint. The process holds it for the tunnel's whole life, whatever happens to
ssh: no other user of the machine can take it between two connections and receive a key. It ends by itself when the
deployment has ended or another process took its place. Only while no process holds it (before the first tunnel, or
after this machine was restarted) can another program take the port; the endpoint then moves to a free one.

ssh listens on a socket file in a folder that only this user can enter, and comes and goes with the connection. While
ssh is not connected, connections to the port are reset at once: the client knows that its request was not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shlex
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from corral.base.errors import ConflictError, CorralError, UnreachableError
from corral.base.files import write_atomic
from corral.base.lock import exclusive_lock
from corral.base.processes import OWN_COMMAND, Identity, own_identity, port_refused, terminated_as_interrupted
from corral.base.record import dump_json, load_json
from corral.base.ssh import socket_folder
from corral.client.endpoint import Endpoint
from corral.client.fanout import backoff_s
from corral.deploy.deployment.events import last_state
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED
from corral.deploy.launch.render import server_url
from corral.deploy.lifecycle.deployments import Record, target_of
from corral.node.processes import end_with_parent
from corral.node.sockets import free_port


class NearEnd:
    """Relays connections to a port to ssh's socket, in both directions, from a thread of its own.

    After `lead_to`, new requests go through another socket, also those on connections that are kept open: a client
    that sends something after it was answered begins a new request. Running requests finish where they began.
    """

    def __init__(self, port: int, far: Path) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.far = far
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

    def lead_to(self, far: Path) -> None:
        """Send new requests through another socket."""
        self.far = far

    def uses(self, far: Path) -> bool:
        """Whether a connection goes through this socket, or new ones would."""
        return self.far == far or any(isinstance(end, _Near) and end.far == far for end in tuple(self._ends))

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await self._loop.create_server(lambda: _Near(self, self._ends), sock=self._listener)
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
        self.ended = False  # it will send nothing more

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
    """The client's side: nothing is read from it before ssh has accepted the connection."""

    def __init__(self, near: NearEnd, ends: set[_End]) -> None:
        super().__init__(ends)
        self._near_end = near
        self.far = near.far
        self.answered = False  # since the client last sent something

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.pause_reading()
        self._joining = asyncio.get_running_loop().create_task(self._join(self.transport))

    def data_received(self, data: bytes) -> None:
        begins, self.answered = self.answered, False
        if not begins or self.far == self._near_end.far or self.transport is None:
            super().data_received(data)
            return
        old, self.other = self.other, None
        if old is not None and old.transport is not None:
            old.other = None
            old.transport.close()
        self.far = self._near_end.far
        self.transport.pause_reading()
        self._joining = asyncio.get_running_loop().create_task(self._join(self.transport, data))

    async def _join(self, transport: asyncio.Transport, first: bytes = b"") -> None:
        far = _Far(self._ends)
        far.other = self
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: far, str(self.far))
        except OSError:
            _reset(transport)
            return
        if self.transport is None:  # the client left meanwhile
            if far.transport is not None:
                far.transport.abort()
            return
        self.other = far
        if first and far.transport is not None:
            far.transport.write(first)
        self.transport.resume_reading()


class _Far(_End):
    """ssh's side."""

    def data_received(self, data: bytes) -> None:
        if isinstance(self.other, _Near) and not data.startswith(
            b"HTTP/1.1 100"
        ):  # which asks for the request's body
            self.other.answered = True
        super().data_received(data)


def _reset(transport: asyncio.Transport) -> None:
    """Close a connection so that the client sees a refusal, not the end of an answer."""
    with contextlib.suppress(OSError):
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.4, 10.0
OPEN_S = 20.0
RECORD_S = 2.0  # within which a process that holds the port has written its record


def needs_tunnel(folder: DeploymentFolder) -> bool:
    """Whether the endpoint can be reached from here only through a tunnel."""
    return folder.launch.is_file() and target_of(load_json(Record, folder.record)).forward(folder) is not None


@dataclass(frozen=True)
class HeldTunnel:
    """Who holds a tunnel, and the socket file on which ssh listens while it is connected."""

    holder: Identity
    near: str


def _held(folder: DeploymentFolder) -> HeldTunnel | None:
    with contextlib.suppress(OSError, CorralError):
        held = load_json(HeldTunnel, folder.tunnel)
        return None if held.holder.is_gone() or not held.holder.is_here() else held
    return None


def tunnel_holder(folder: DeploymentFolder) -> Identity | None:
    """The process that holds the tunnel now."""
    held = _held(folder)
    return held.holder if held else None


def ensure_tunnel(folder: DeploymentFolder) -> None:
    """Open the tunnel in the background unless it is open or none is needed; returns when ssh is connected."""
    if not needs_tunnel(folder) or tunnel_holder(folder):
        return
    log = os.open(folder.tunnel_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        process = subprocess.Popen(
            [*OWN_COMMAND, "tunnel", folder.name],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
        )  # fmt: skip
    finally:
        os.close(log)
    if opened(folder, lambda: process.poll() is not None):
        return
    lines = folder.tunnel_log.read_text(errors="replace").strip().splitlines()
    messages = [line.removeprefix("corral: ") for line in lines if not line.lstrip().startswith("→")]  # no remedies
    last = messages[-1] if messages else "ssh said nothing"
    raise UnreachableError(
        f"the tunnel to {folder.name!r} did not open: {last}", f"`corral tunnel {folder.name}` shows why."
    )


def opened(folder: DeploymentFolder, has_ended: Callable[[], bool]) -> bool:
    """Wait for the tunnel of a process that may end, or of another that took the port just before it."""
    now = time.monotonic()
    deadline, ended_s = now + OPEN_S, math.inf
    while now < deadline:
        if _open(folder):
            return True
        if ended_s == math.inf and has_ended():
            ended_s = now
        if now - ended_s > RECORD_S and tunnel_holder(folder) is None:
            return False
        time.sleep(0.1)
        now = time.monotonic()
    return False


def _open(folder: DeploymentFolder) -> bool:
    held = _held(folder)
    if held is None:
        return False
    return accepts(Path(held.near))


def accepts(near: Path) -> bool:
    """Whether ssh listens on a socket."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        probe.connect(str(near))
        return True
    return False


def hold_tunnel(folder: DeploymentFolder, say: Callable[[str], None]) -> None:
    """Keep the forward open until the deployment ends; ssh is started again whenever it ends."""
    forward = target_of(load_json(Record, folder.record)).forward(folder)
    if forward is None:
        say("no tunnel is needed: the endpoint can be reached from here")
        return
    near = near_socket()
    with contextlib.ExitStack() as held:
        with exclusive_lock(folder.path / ".tunnel.lock", say):  # of two at once, one is refused
            if holder := tunnel_holder(folder):
                raise ConflictError(
                    f"process {holder.pid} holds the tunnel to {folder.name!r}.",
                    f"Use it, or close it: `corral tunnel {shlex.quote(folder.name)} --close`.",
                )
            try:
                held.enter_context(near_end(forward.port, near))
            except ConflictError as refused:
                held.enter_context(near_end(_move(folder, refused, say), near))
            write_atomic(folder.tunnel, dump_json(HeldTunnel(own_identity(), str(near))))
            mine = folder.tunnel.read_text()
        hold_forward(forward.command(near), say, lambda: _wanted(folder, mine))
        with contextlib.suppress(OSError):
            if folder.tunnel.read_text() == mine:
                folder.tunnel.unlink()


def _move(folder: DeploymentFolder, refused: ConflictError, say: Callable[[str], None]) -> int:
    """Another port for the endpoint, whose own was taken while no tunnel was open."""
    port = free_port("127.0.0.1")
    endpoint = replace(load_json(Endpoint, folder.endpoint), base_url=server_url("127.0.0.1", port))
    write_atomic(folder.endpoint, dump_json(endpoint))
    say(f"{refused.message} The endpoint is {endpoint.base_url} now.")
    return port


def near_socket(number: int = 0) -> Path:
    return socket_folder() / (f"near-{os.getpid()}-{number}" if number else f"near-{os.getpid()}")


@contextlib.contextmanager
def near_end(port: int, near: Path) -> Iterator[NearEnd]:
    """Hold the port; leaves no socket file behind."""
    try:
        held = NearEnd(port, near)
    except OSError as error:
        remedy = "Leave the port out and a free one is chosen, or end what holds it."
        raise port_refused(port, "this machine", error, remedy) from None
    try:
        with held:
            yield held
    finally:
        near.unlink(missing_ok=True)


def hold_forward(
    command: Sequence[str],
    say: Callable[[str], None],
    wanted: Callable[[], bool],
    refused: Callable[[], None] = lambda: None,
) -> None:
    """Run ssh while it is wanted, again whenever it ends; the pauses grow while it ends soon.

    `refused` is called when ssh reports a connection that it could not forward: nobody listens at the far end.
    """
    failures = 0
    with terminated_as_interrupted():  # so that ssh never outlives it
        while wanted():
            began, reported = time.monotonic(), 0
            with _forwarding(command) as process:
                while process.ssh.poll() is None and wanted():
                    time.sleep(0.5)
                    if (size := os.fstat(process.log).st_size) > reported:
                        reported = size
                        refused()
            if wanted():
                failures = 0 if time.monotonic() - began > 30 else failures + 1
                pause = backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
                say(f"the connection ended ({process.last_line}); again in {pause:.1f} s")
                time.sleep(pause)


@dataclass
class _Forwarding:
    """ssh while it forwards, and its messages; these go to a file, because a full pipe would stop it."""

    ssh: subprocess.Popen[bytes]
    log: int  # the file's descriptor
    last_line: str = "no message"


@contextlib.contextmanager
def _forwarding(command: Sequence[str]) -> Iterator[_Forwarding]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=log,
            preexec_fn=partial(_not_outliving, os.getpid()),
        )
        forwarding = _Forwarding(process, log.fileno())
        try:
            yield forwarding
        finally:
            process.terminate()
            process.wait()
            log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
            forwarding.last_line = lines[-1] if lines else "no message"


def _not_outliving(parent: int) -> None:
    """In the new process: end with the tunnel, also when the tunnel is killed, or was killed before this call."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _wanted(folder: DeploymentFolder, mine: str) -> bool:
    """Whether this process still holds the tunnel of a deployment that has not ended."""
    try:
        if Path(folder.tunnel).read_text() != mine or not folder.record.is_file():
            return False
    except OSError:
        return False
    last = last_state(folder.rank(0).events)
    return last is None or last.get("state") not in ENDED


def close_tunnel(folder: DeploymentFolder) -> None:
    """End the tunnel, if one is held."""
    holder = tunnel_holder(folder)
    with contextlib.suppress(OSError):
        folder.tunnel.unlink()
    if holder:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(holder.pid, signal.SIGTERM)
