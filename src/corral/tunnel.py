"""Bringing an endpoint to this machine: a background process that holds an ssh forward open, and opens it again.

The near end's port is part of the deployment's endpoint, so it never changes while the deployment lives, whatever
happens to the connection. The process ends by itself when the deployment has ended or another took its place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from corral.deployment import Record, target_of
from corral.errors import CorralError, UnreachableError
from corral.events import read_events
from corral.files import write_atomic
from corral.folder import DeploymentFolder
from corral.processes import Identity, own_identity
from corral.record import dump_json, load_json

__all__ = ["close_tunnel", "ensure_tunnel", "hold_tunnel", "needs_tunnel", "tunnel_holder"]

PAUSES_S = (0.2, 1, 2, 5, 10)
OPEN_S = 20.0


def needs_tunnel(folder: DeploymentFolder) -> bool:
    """Whether the endpoint can be reached from here only through a tunnel."""
    return folder.launch.is_file() and target_of(load_json(Record, folder.record)).forward(folder) is not None


def tunnel_holder(folder: DeploymentFolder) -> Identity | None:
    """The process that holds the tunnel now."""
    with contextlib.suppress(OSError, CorralError):
        holder = load_json(Identity, folder.tunnel)
        return None if holder.is_gone() or not holder.is_here() else holder
    return None


def ensure_tunnel(folder: DeploymentFolder) -> None:
    """Open the tunnel in the background unless it is open or none is needed; returns when the near end accepts."""
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
    deadline = time.monotonic() + OPEN_S
    while time.monotonic() < deadline:
        if _open(folder):
            return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    words = folder.tunnel_log.read_text(errors="replace").strip().splitlines()
    said = words[-1] if words else "ssh said nothing"
    raise UnreachableError(
        f"the tunnel to {folder.name!r} did not open: {said}", f"`corral tunnel {folder.name}` tries."
    )


def _open(folder: DeploymentFolder) -> bool:
    import socket
    from urllib.parse import urlsplit

    from corral.endpoint import Endpoint

    if tunnel_holder(folder) is None:
        return False
    address = urlsplit(load_json(Endpoint, folder.endpoint).base_url)
    with contextlib.suppress(OSError), socket.create_connection((address.hostname or "", address.port or 0), 1):
        return True
    return False


def hold_tunnel(folder: DeploymentFolder, say: Callable[[str], None]) -> None:
    """Keep the forward open until the deployment ends; ssh is started again whenever it ends."""
    command = target_of(load_json(Record, folder.record)).forward(folder)
    if command is None:
        say("no tunnel is needed: the endpoint can be reached from here")
        return
    write_atomic(folder.tunnel, dump_json(own_identity()))
    mine = folder.tunnel.read_text()
    failures = 0
    with _ended_on_signals():
        while _wanted(folder, mine):
            began = time.monotonic()
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
            try:
                while process.poll() is None and _wanted(folder, mine):
                    time.sleep(0.5)
            finally:
                process.terminate()
                said = process.communicate()[1].decode("utf-8", "replace").strip()
            if _wanted(folder, mine):
                failures = 0 if time.monotonic() - began > 30 else failures + 1
                pause = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
                say(f"the connection ended ({said.splitlines()[-1] if said else 'no word'}); again in {pause:g} s")
                time.sleep(pause)
    with contextlib.suppress(OSError):
        if folder.tunnel.read_text() == mine:
            folder.tunnel.unlink()


@contextlib.contextmanager
def _ended_on_signals() -> Iterator[None]:
    """TERM ends the loop as Ctrl-C does, so that ssh never outlives it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wanted(folder: DeploymentFolder, mine: str) -> bool:
    """Whether this process still holds the tunnel of a deployment that has not ended."""
    try:
        if Path(folder.tunnel).read_text() != mine or not folder.record.is_file():
            return False
    except OSError:
        return False
    states = [event.get("state") for event in read_events(folder.rank(0).events) if event.kind == "state"]
    return not states or states[-1] not in ("stopped", "failed")


def close_tunnel(folder: DeploymentFolder) -> None:
    """End the tunnel, if one is held."""
    holder = tunnel_holder(folder)
    with contextlib.suppress(OSError):
        folder.tunnel.unlink()
    if holder:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(holder.pid, signal.SIGTERM)
