"""What runs in the background for a fleet: its keeper and its gateway, started here and ended with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from corral.base.errors import CorralError
from corral.base.files import write_atomic
from corral.base.lock import holder_of
from corral.base.processes import Identity, identify
from corral.base.record import dump_json, load_json
from corral.deploy.deployment.events import append_event
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle import deployments
from corral.serve.fleet.record import FleetFolder, change_fleet, held_gateways, read_fleet

GATEWAY_PAUSE_S = 5.0  # between two starts of a gateway that ends at once
ENDING_S = 90.0  # a keeper finishes what it has begun


def ensure_keeper(folder: FleetFolder) -> None:
    """Start the fleet's keeper in the background, unless one runs."""
    if holder_of(folder.keeper) is None:
        _spawn([sys.executable, "-m", "corral", "fleet", "keep", folder.name], folder.keeper_log)


def ensure_gateway(folder: FleetFolder, say: Callable[[str], None]) -> None:
    """Start the fleet's own gateway in the background, unless it runs."""
    _reap()
    own = _own_gateway(folder)
    if own is not None and not own.is_gone():
        return
    with contextlib.suppress(OSError):
        if time.time() - folder.own_gateway.stat().st_mtime < GATEWAY_PAUSE_S:
            return
    fleet = read_fleet(folder)
    if fleet.closed:
        return
    say("starting the gateway" if own is None else f"the gateway (process {own.pid}) has ended; starting it again")
    argv = ["gateway", "--bind", fleet.host, "--route", fleet.route]
    if fleet.port is not None:
        argv += ["--port", str(fleet.port)]
    process = _spawn([sys.executable, "-m", "corral", *argv, fleet.name], folder.gateway_log)
    write_atomic(folder.own_gateway, dump_json(identify(process.pid)))


def _own_gateway(folder: FleetFolder) -> Identity | None:
    with contextlib.suppress(OSError, CorralError):
        return load_json(Identity, folder.own_gateway)
    return None


_STARTED: list[subprocess.Popen[bytes]] = []  # not waited for, but reaped


def _reap() -> None:
    _STARTED[:] = [process for process in _STARTED if process.poll() is None]


def _spawn(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one; its output goes to a file."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, close_fds=True
        )
    finally:
        os.close(output)
    _STARTED.append(process)
    return process


# The end


def end_fleet(folder: FleetFolder, why: str) -> list[tuple[str, deployments.Status | CorralError]]:
    """End a fleet with its keeper, its gateway and all members; how each member ended, or why it did not."""
    fleet = change_fleet(folder, lambda one: replace(one, closed=one.closed or why))
    append_event(folder.events, "closed", text=why)
    _end_process(holder_of(folder.keeper))
    _end_gateway(folder)
    names = [one.name for one in fleet.members if DeploymentFolder.of(one.name).record.is_file()]
    if not names:
        return []
    with ThreadPoolExecutor(min(16, len(names))) as pool:
        return list(zip(names, pool.map(_stopped, names), strict=True))


def _stopped(name: str) -> deployments.Status | CorralError:
    try:
        return deployments.stop(DeploymentFolder.of(name))
    except CorralError as error:
        return error


def _end_gateway(folder: FleetFolder) -> None:
    """End the gateway that the keeper started; others, which may serve more than this fleet, go on without it."""
    _end_process(_own_gateway(folder))
    for id in set(_gone_gateways(folder)):
        folder.gateway_load(id).unlink(missing_ok=True)


def _gone_gateways(folder: FleetFolder) -> list[str]:
    held = held_gateways(folder)
    return [path.name.removesuffix(".load.json") for path in folder.gateways.glob("*.load.json")
            if path.name.removesuffix(".load.json") not in held]  # fmt: skip


def _end_process(process: Identity | None) -> None:
    """Ask a process of this machine to end, and wait until it has."""
    if process is None or not process.is_here() or process.is_gone():
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.pid, signal.SIGTERM)
    until = time.monotonic() + ENDING_S
    while time.monotonic() < until and not process.is_gone():
        _reap()
        time.sleep(0.05)
