"""What runs in the background for a fleet: its keeper and its gateways, started here and ended with it.

A keeper may take the place of one on another machine. It starts a gateway when those of other machines are silent;
one that ran on this machine is started again here in any case, because clients know its address.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from corral import __version__
from corral.base.errors import CorralError
from corral.base.lock import Stillness, holder_of
from corral.base.processes import OWN_COMMAND, Identity, identify, process_namespace
from corral.base.record import load_json
from corral.deploy.deployment.events import append_event
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.lifecycle import deployments
from corral.serve.fleet.record import (
    SILENT_S,
    Fleet,
    FleetFolder,
    change_fleet,
    fleet_lock,
    held_gateways,
    read_fleet,
    write_fleet,
)

GATEWAY_PAUSE_S = 5.0  # between two starts of a gateway that ends at once
REPLACE_PAUSE_S = 60.0  # between two attempts to replace one of an earlier version
ENDING_S = 90.0  # a keeper finishes what it has begun
ELSEWHERE_S = 10.0  # for what runs on other machines to read that its fleet has ended
MOST_GATEWAYS = 8  # machines that are remembered


def ensure_keeper(folder: FleetFolder, until_served: bool = False) -> None:
    """Start the fleet's keeper in the background, unless one runs; or only until those in its jobs can work."""
    if holder_of(folder.keeper, SILENT_S) is None:
        limit = ["--until-served"] if until_served else []
        _spawn([*OWN_COMMAND, "fleet", "keep", *limit, folder.name], folder.keeper_log)


def ensure_gateway(folder: FleetFolder, say: Callable[[str], None], stands_by: bool = False) -> None:
    """Start the fleet's own gateway in the background, unless it runs; of a keeper that stands by only one of this
    machine that has ended."""
    _reap()
    own = _own_gateways(folder, read_fleet(folder))
    here = [one for one in own if one.is_here()]
    if running := [one for one in here if not one.is_gone()]:
        _replace_older(folder, running, say)
        return
    if not here and (_serve_elsewhere(folder, own) or stands_by):  # in this order: who stands by watches them as well
        return
    if time.monotonic() - _STARTED_S.get(folder.path, float("-inf")) < GATEWAY_PAUSE_S:
        return
    _STARTED_S[folder.path] = time.monotonic()
    with fleet_lock(folder):
        fleet = read_fleet(folder)
        own = _own_gateways(folder, fleet)
        if fleet.closed or any(one.is_here() and not one.is_gone() for one in own):
            return
        ended = next((f"the gateway (process {one.pid}) has ended; starting it again" for one in here), "")
        say(ended or "starting the gateway")
        argv = ["gateway", "--bind", fleet.host, "--route", fleet.route, "--while-open"]
        if fleet.port is not None:
            argv += ["--port", str(fleet.port)]
        process = _spawn([*OWN_COMMAND, *argv, fleet.name], folder.gateway_log)
        started = replace(identify(process.pid), namespace=process_namespace())
        others = [one for one in own if not one.is_here()]
        write_fleet(folder, replace(fleet, gateways=(*others, started)[-MOST_GATEWAYS:]))
        folder.own_gateway.unlink(missing_ok=True)


def _replace_older(folder: FleetFolder, running: Sequence[Identity], say: Callable[[str], None]) -> None:
    """Start the successor of a gateway of an earlier version, which takes over its listening socket."""
    older = [
        address
        for id, address in held_gateways(folder).items()
        if address.holder in running and _is_older(address.written_by) and folder.gateway_socket(id).exists()
    ]
    if not older or time.monotonic() - _STARTED_S.get(folder.path, float("-inf")) < REPLACE_PAUSE_S:
        return
    _STARTED_S[folder.path] = time.monotonic()
    pid = older[0].holder.pid if older[0].holder else 0
    version = older[0].written_by or "an earlier version"
    say(f"the gateway (process {pid}) is of Corral {version}; one of {__version__} takes its place")
    _spawn([*OWN_COMMAND, "gateway", "--take-over", "--while-open", folder.name], folder.gateway_log)


def _is_older(version: str) -> bool:
    """Whether a version was released before this one."""
    return _numbers(version) < _numbers(__version__)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"[0-9]{1,9}", version)[:3]]


def _own_gateways(folder: FleetFolder, fleet: Fleet) -> list[Identity]:
    """The gateways that keepers have started; one that an earlier version started is in a file of its own."""
    with contextlib.suppress(FileNotFoundError):
        return [*fleet.gateways, load_json(Identity, folder.own_gateway)]
    return list(fleet.gateways)


def _serve_elsewhere(folder: FleetFolder, own: Sequence[Identity]) -> bool:
    """Whether a gateway of another machine has written what it has to do lately, or that cannot be known now."""
    if not own:
        return False
    written: object = object()  # what cannot be read is new each time
    with contextlib.suppress(OSError):
        written = {path.name: path.stat().st_mtime_ns for path in folder.gateways.iterdir()}
    return _WRITTEN.setdefault(folder.path, Stillness()).of(written) <= SILENT_S


_STARTED_S: dict[Path, float] = {}  # when a gateway was started last, monotonic
_WRITTEN: dict[Path, Stillness] = {}  # the files of the gateways of other machines
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
    """End a fleet with its keeper, its gateways and all members; how each member ended, or why it did not."""
    fleet = change_fleet(folder, lambda one: replace(one, closed=one.closed or why))
    append_event(folder.events, "closed", text=why)
    _end_process(holder_of(folder.keeper, SILENT_S))
    for own in _own_gateways(folder, fleet):
        _end_process(own)
    _wait_until(lambda: not runs_elsewhere(folder), ELSEWHERE_S)
    for id in set(_gone_gateways(folder)):
        folder.gateway_load(id).unlink(missing_ok=True)
    names = [one.name for one in fleet.members if DeploymentFolder.of(one.name).record.is_file()]
    if not names:
        return []
    with ThreadPoolExecutor(min(16, len(names))) as pool:
        return list(zip(names, pool.map(_stopped, names), strict=True))


def runs_elsewhere(folder: FleetFolder) -> list[str]:
    """The keeper and the gateways of a fleet on other machines: they end when they read that it has ended."""
    keeper = holder_of(folder.keeper, SILENT_S)
    own = {one.pid: one.host for one in read_fleet(folder).gateways}
    gateways = [one.holder for one in held_gateways(folder).values() if one.machine and one.holder]
    found = [("the keeper", keeper)] if keeper and keeper.host != socket.gethostname() else []
    found += [("a gateway", one) for one in gateways if own.get(one.pid) == one.host]
    return [f"{what} on {one.host} (process {one.pid})" for what, one in found]


def _stopped(name: str) -> deployments.Status | CorralError:
    try:
        return deployments.stop(DeploymentFolder.of(name))
    except CorralError as error:
        return error


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
    _wait_until(process.is_gone, ENDING_S)


def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while not done() and time.monotonic() < until_s:
        _reap()
        time.sleep(0.05)
