"""Bringing an endpoint to this machine: a background process that holds a port, and an ssh forward behind it.

The near end's port is part of the deployment's endpoint, so it never changes while the deployment lives, whatever
happens to the connection, and the process never lets go of it (`near_end`). It ends by itself when the deployment has
ended or another process took its place.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from corral.base.errors import CorralError, UnreachableError
from corral.base.files import write_atomic
from corral.base.interruption import terminated_as_interrupted
from corral.base.processes import Identity, own_identity, port_refused
from corral.base.record import dump_json, load_json
from corral.base.ssh import socket_folder
from corral.client.retry import backoff_s
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import ENDED
from corral.deploy.lifecycle.deployments import Record, target_of
from corral.deploy.lifecycle.near_end import NearEnd
from corral.node.agent.processes import end_with_parent

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.4, 10.0
OPEN_S = 20.0
TOLD_S = 2.0  # after which whoever has the port has said so


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
            [sys.executable, "-m", "corral", "tunnel", folder.name],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
        )  # fmt: skip
    finally:
        os.close(log)
    if opened(folder, lambda: process.poll() is not None):
        return
    lines = folder.tunnel_log.read_text(errors="replace").strip().splitlines()
    words = [line.removeprefix("corral: ") for line in lines if not line.lstrip().startswith("→")]  # no remedies
    said = words[-1] if words else "ssh said nothing"
    raise UnreachableError(
        f"the tunnel to {folder.name!r} did not open: {said}", f"`corral tunnel {folder.name}` shows why."
    )


def opened(folder: DeploymentFolder, has_ended: Callable[[], bool]) -> bool:
    """Wait for the tunnel: that of a process that may end, or of another that took the port a moment before it."""
    now = time.monotonic()
    deadline, ended_s = now + OPEN_S, math.inf
    while now < deadline:
        if _open(folder):
            return True
        if ended_s == math.inf and has_ended():
            ended_s = now
        if now - ended_s > TOLD_S and tunnel_holder(folder) is None:
            return False
        time.sleep(0.1)
        now = time.monotonic()
    return False


def _open(folder: DeploymentFolder) -> bool:
    held = _held(folder)
    if held is None:
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        probe.connect(held.near)
        return True
    return False


def hold_tunnel(folder: DeploymentFolder, say: Callable[[str], None]) -> None:
    """Keep the forward open until the deployment ends; ssh is started again whenever it ends."""
    forward = target_of(load_json(Record, folder.record)).forward(folder)
    if forward is None:
        say("no tunnel is needed: the endpoint can be reached from here")
        return
    near = near_socket()
    with near_end(forward.port, near):  # before anybody is told of it: two at once are one and a refusal
        write_atomic(folder.tunnel, dump_json(HeldTunnel(own_identity(), str(near))))
        mine = folder.tunnel.read_text()
        hold_forward(forward.command(near), say, lambda: _wanted(folder, mine))
        with contextlib.suppress(OSError):
            if folder.tunnel.read_text() == mine:
                folder.tunnel.unlink()


def near_socket() -> Path:
    return socket_folder() / f"near-{os.getpid()}"


@contextlib.contextmanager
def near_end(port: int, near: Path) -> Iterator[NearEnd]:
    """The port, held; and no socket file left behind."""
    try:
        held = NearEnd(port, near)
    except OSError as error:
        remedy = "It is the deployment's port here: end what holds it, or start the deployment again."
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

    `refused` is called when ssh says that it could not pass a connection on: nobody listens at the far end.
    """
    failures = 0
    with terminated_as_interrupted():  # so that ssh never outlives it
        while wanted():
            began, heard = time.monotonic(), 0
            with _forwarding(command) as process:
                while process.ssh.poll() is None and wanted():
                    time.sleep(0.5)
                    if (size := process.said_bytes()) > heard:
                        heard = size
                        refused()
            if wanted():
                failures = 0 if time.monotonic() - began > 30 else failures + 1
                pause = backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
                say(f"the connection ended ({process.last_words}); again in {pause:.1f} s")
                time.sleep(pause)


@dataclass
class _Forwarding:
    """ssh while it forwards, and what it says; that goes to a file, because a full pipe would stop it."""

    ssh: subprocess.Popen[bytes]
    log: int  # the file's descriptor
    last_words: str = "no word"

    def said_bytes(self) -> int:
        return os.fstat(self.log).st_size


@contextlib.contextmanager
def _forwarding(command: Sequence[str]) -> Iterator[_Forwarding]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=log,
            preexec_fn=partial(_not_outliving, os.getpid()),
        )
        found = _Forwarding(process, log.fileno())
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
            log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
            found.last_words = lines[-1] if lines else "no word"


def _not_outliving(parent: int) -> None:
    """In the new process: end with the tunnel, also when that is killed, or was before this was said."""
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
    states = [event.get("state") for event in read_events(folder.rank(0).events) if event.kind == "state"]
    return not states or states[-1] not in ENDED


def close_tunnel(folder: DeploymentFolder) -> None:
    """End the tunnel, if one is held."""
    holder = tunnel_holder(folder)
    with contextlib.suppress(OSError):
        folder.tunnel.unlink()
    if holder:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(holder.pid, signal.SIGTERM)
