"""Bringing an endpoint to this machine: a background process that holds a port, and an ssh forward behind it.

The near end's port is part of the deployment's endpoint, so it never changes while the deployment lives, whatever
happens to the connection, and the process never lets go of it (`near_end`). It ends by itself when the deployment has
ended or another process took its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
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
from urllib.parse import urlsplit

from corral.client.endpoint import Endpoint
from corral.client.retry import backoff_s
from corral.deployment.events import read_events
from corral.deployment.folder import DeploymentFolder
from corral.deployment.state import ENDED
from corral.errors import ConflictError, CorralError, NotFoundError, UnreachableError
from corral.files import make_private_dir, write_atomic
from corral.home import home_dir
from corral.interruption import terminated_as_interrupted
from corral.lifecycle.deployments import Record, target_of
from corral.lifecycle.near_end import NearEnd
from corral.node.agent.processes import end_with_parent
from corral.node.ports import free_port
from corral.processes import Identity, own_identity, port_refused
from corral.record import dump_json, from_json, load_json
from corral.ssh import Forward, Ssh, socket_folder

__all__ = [
    "Distant",
    "close_tunnel",
    "ensure_tunnel",
    "find_distant",
    "hold_distant",
    "hold_tunnel",
    "needs_tunnel",
    "tunnel_holder",
]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.4, 10.0
OPEN_S = 20.0


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
    near = _near_socket()
    with _near_end(forward.port, near):  # before anybody is told of it: two at once are one and a refusal
        write_atomic(folder.tunnel, dump_json(HeldTunnel(own_identity(), str(near))))
        mine = folder.tunnel.read_text()
        _hold(forward.command(near), say, lambda: _wanted(folder, mine))
        with contextlib.suppress(OSError):
            if folder.tunnel.read_text() == mine:
                folder.tunnel.unlink()


def _near_socket() -> Path:
    return socket_folder() / f"near-{os.getpid()}"


@contextlib.contextmanager
def _near_end(port: int, near: Path) -> Iterator[NearEnd]:
    """The port, held; and no socket file left behind."""
    try:
        held = NearEnd(port, near)
    except OSError as error:
        remedy = "It is the deployment's port here: end what holds it, or bring the deployment up anew."
        raise port_refused(port, "this machine", error, remedy) from None
    try:
        with held:
            yield held
    finally:
        near.unlink(missing_ok=True)


def _hold(command: Sequence[str], say: Callable[[str], None], wanted: Callable[[], bool]) -> None:
    """Run ssh while it is wanted, again whenever it ends; the pauses grow while it ends soon."""
    failures = 0
    with terminated_as_interrupted():  # so that ssh never outlives it
        while wanted():
            began = time.monotonic()
            with _forwarding(command) as (process, words):
                while process.poll() is None and wanted():
                    time.sleep(0.5)
            if wanted():
                failures = 0 if time.monotonic() - began > 30 else failures + 1
                pause = backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
                say(f"the connection ended ({words()}); again in {pause:.1f} s")
                time.sleep(pause)


@contextlib.contextmanager
def _forwarding(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """ssh while it forwards, and its last words; they go to a file, because a full pipe would stop it."""
    with tempfile.TemporaryFile() as log:
        last = ["no word"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=log,
            preexec_fn=partial(_not_outliving, os.getpid()),
        )
        try:
            yield process, lambda: last[0]
        finally:
            process.terminate()
            process.wait()
            log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
            last[0] = lines[-1] if lines else "no word"


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


@dataclass(frozen=True)
class Distant:
    """A deployment of another machine's home, reached through that machine."""

    through: str  # the host whose `corral` knows the deployment: a login node
    endpoint: Endpoint  # as that host reaches it
    local_port: int
    key_file: Path  # the key, brought here

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.local_port}/v1"

    @property
    def forward(self) -> Forward:
        far = urlsplit(self.endpoint.base_url)
        host = f"[{far.hostname}]" if ":" in (far.hostname or "") else far.hostname
        return Forward(self.local_port, f"{host}:{far.port}", self.through)


def find_distant(name: str, through: str, program: Sequence[str], port: int | None) -> Distant:
    """Ask the other machine's `corral` where the deployment is, and bring its key here."""
    ssh = Ssh()
    done = ssh.run(through, [*program, "status", name, "--json"], timeout_s=60)
    try:
        found = json.loads(done.stdout)
        endpoint = from_json(Endpoint, found["endpoint"]) if found.get("endpoint") else None
    except (ValueError, KeyError, TypeError):
        words = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()
        raise UnreachableError(
            f"`{shlex.join(program)}` on {through} did not say where {name!r} is: {words[-1]}",
            "Name the command as it is called there: --corral /path/to/corral.",
        ) from None
    if endpoint is None or endpoint.key_file is None:
        raise NotFoundError(f"{name!r} on {through} is {found['state']}: {found['text'] or 'no endpoint yet'}.",
                            f"Wait for it there: corral wait {shlex.quote(name)}")  # fmt: skip
    key = ssh.run(through, ["cat", endpoint.key_file], timeout_s=30, check=True).stdout
    folder = home_dir() / "distant" / f"{through}-{DeploymentFolder.of(name).path.name}"
    make_private_dir(folder)
    write_atomic(folder / "key", key)
    near = free_port("127.0.0.1", first=port or 0)
    if port and near != port:
        raise ConflictError(f"port {port} of this machine is taken.", "Leave --port out and a free one is chosen.")
    return Distant(through, endpoint, near, folder / "key")


def hold_distant(distant: Distant, say: Callable[[str], None]) -> None:
    """Keep the forward open until interrupted."""
    near = _near_socket()
    with _near_end(distant.local_port, near):
        _hold(distant.forward.command(near), say, lambda: True)
