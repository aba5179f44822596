"""A deployment and its successors: `NAME`, `NAME~2`, `NAME~3`, …, one after the other under one name and one key.

They are a fleet of one (`serve.fleet.record`) that is kept: its record lies in the first one's folder. A name is
written into it before the deployment is made, so that a successor that was begun is always known, and
`corral down NAME` ends all of them. A chain that an earlier version started has `successors.json` in its place.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from pathlib import Path

from corral.base.errors import ConflictError, CorralError, NotFoundError, UsageError
from corral.base.lock import FileLock, exclusive_lock, wait_notice
from corral.base.record import load_json, save_record
from corral.deploy.deployment.events import append_event
from corral.deploy.deployment.folder import DeploymentFolder, all_folders, open_folder
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.lifecycle import deployments
from corral.serve.fleet.record import (
    OLD_LOCK_S,
    Fleet,
    FleetFolder,
    FleetMember,
    change_fleet,
    living_fleets,
    read_fleet,
    refuse_fleet_name,
    write_fleet,
)

ADOPTED = "kept by a newer version of Corral"  # why an earlier version submits nothing more


@dataclass(frozen=True)
class DeploymentReading:
    """A deployment, as far as it could be asked."""

    folder: DeploymentFolder
    status: deployments.Status | None  # None: it could not be asked
    text: str = ""  # why not
    stamp: tuple[int, int] = (0, 0)  # of its record: another deployment of the same name has another

    @property
    def state(self) -> State:
        return self.status.state if self.status else State.UNKNOWN


def read_chain(folder: DeploymentFolder) -> Fleet | None:
    """The chain that a deployment begins; None when nothing follows it."""
    try:
        return read_fleet(FleetFolder(folder.path))
    except FileNotFoundError:
        return _read_old_chain(folder)


def open_chain(folder: DeploymentFolder) -> FleetFolder:
    """The chain that a deployment belongs to, with a record that can be changed."""
    first = DeploymentFolder.of(first_of(folder.name))
    if not FleetFolder(first.path).record.is_file():
        _adopt_old_chain(first)
    return FleetFolder(first.path)


def chain_of(name: str) -> str:
    """The name that a chain goes by: `NAME` of `NAME~2`."""
    return re.sub(r"~\d+$", "", name)


def successor_name(name: str, number: int) -> str:
    """The name of the number-th of a chain; the first has the chain's own."""
    return name if number == 1 else f"{name}~{number}"


def members(folder: DeploymentFolder) -> list[DeploymentFolder]:
    """All of a chain, oldest first; a deployment that nothing follows is alone."""
    chain = read_chain(folder)
    return [DeploymentFolder.of(one.name) for one in chain.members] if chain else [folder]


def first_of(name: str) -> str:
    """The deployment that a name belongs to: `NAME` of `NAME~2`, if NAME has such a successor."""
    first = DeploymentFolder.of(chain_of(name))
    if first.name == name or not first.record.is_file():
        return name
    chain = read_chain(first)
    return first.name if chain and chain.member(name) else name


def read_members(folder: DeploymentFolder) -> list[DeploymentReading]:
    """The status of each of a chain, oldest first."""
    return read_deployments(members(folder))


def read_deployments(folders: Sequence[DeploymentFolder]) -> list[DeploymentReading]:
    """Their statuses, asked at once."""
    with ThreadPoolExecutor(deployments.AT_ONCE) as workers:
        return [
            task.result() for task in [workers.submit(copy_context().run, read_deployment, one) for one in folders]
        ]


def read_deployment(folder: DeploymentFolder, before: DeploymentReading | None = None) -> DeploymentReading:
    """The status of a deployment; one that had ended `before` is not asked again."""
    try:
        record = folder.record.stat()
        stamp = (record.st_ino, record.st_mtime_ns)
        if before is not None and before.state in ENDED and before.stamp == stamp:
            return before
        return DeploymentReading(folder, deployments.status(folder), stamp=stamp)
    except (CorralError, OSError) as error:
        return DeploymentReading(folder, None, str(error))


def newest_ready(folder: DeploymentFolder) -> DeploymentReading | None:
    """The newest of a chain that is ready; None when none is."""
    return next((one for one in map(read_deployment, reversed(members(folder))) if one.state is State.READY), None)


def all_chains() -> list[DeploymentFolder]:
    """The first of every chain: deployments that succeed no other."""
    return [folder for folder in all_folders() if first_of(folder.name) == folder.name]


def living_chains() -> dict[str, list[DeploymentReading]]:
    """By the name of its first: those of every chain that have not ended, where there are any."""
    chains = {first.name: members(first) for first in all_chains()}
    found = {one.folder: one for one in read_deployments([one for chain in chains.values() for one in chain])}
    living = {name: [found[one] for one in chain if found[one].state not in ENDED] for name, chain in chains.items()}
    return {name: chain for name, chain in living.items() if chain}


def choose_folder(name: str | None) -> DeploymentFolder:
    """The deployment of that name; without a name the only one there is, or the only one that has not ended."""
    if name is not None:
        return open_folder(name)
    members = {member.name for fleet in living_fleets() for member in fleet.members}
    folders = [folder for folder in all_chains() if folder.name not in members]
    if members and not folders:
        names = ", ".join(fleet.name for fleet in living_fleets())
        raise UsageError(f"there are only members of fleets ({names}).", "Give the name of the one you mean.")
    if not folders:
        raise NotFoundError("there is no deployment yet.", "Start one: corral up MODEL.")
    if len(folders) > 1:
        living = living_chains()
        folders = [one for one in folders if one.name in living] or folders
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders)
        raise UsageError(f"there are {len(folders)} deployments: {names}.", "Give the name of the one you mean.")
    return folders[0]


def close_chain(folder: DeploymentFolder, why: str) -> list[DeploymentFolder]:
    """Let nothing more follow; the successors that there are, newest first."""
    if FleetFolder(folder.path).record.is_file():
        chain = change_fleet(FleetFolder(folder.path), lambda one: replace(one, closed=one.closed or why))
        append_event(FleetFolder(folder.path).events, "closed", text=why)
    elif (old := _close_old_chain(folder, why)) is not None:
        chain = old
    else:
        return []
    successors = [DeploymentFolder.of(one.name) for one in reversed(chain.members[1:])]
    return [one for one in successors if one.record.is_file()]


def refuse_held_name(name: str) -> None:
    """Raise where a fleet has that name, or where successors of an ended deployment of that name still run."""
    refuse_fleet_name(name)
    folder = DeploymentFolder.of(name)
    if read_chain(folder) is None:
        return
    for one in read_members(folder)[1:]:
        if one.folder.record.is_file() and one.state not in ENDED:
            raise ConflictError(
                f"{one.folder.name!r} follows {name!r} and is {one.state}.",
                f"Use it, end all of them (`corral down {shlex.quote(name)}`), or choose another name.",
            )


# Chains of earlier versions


@dataclass(frozen=True)
class OldChain:
    """What `successors.json` holds."""

    successors: tuple[str, ...] = ()
    max_jobs: int | None = None
    closed: str = ""


def _old_file(folder: DeploymentFolder) -> Path:
    return folder.path / "successors.json"


def _read_old_chain(folder: DeploymentFolder) -> Fleet | None:
    try:
        old = load_json(OldChain, _old_file(folder))
    except FileNotFoundError:
        return None
    jobs = tuple(FleetMember(name) for name in (folder.name, *old.successors))
    return Fleet(folder.name, "", 1, 1, 1, 0.0, jobs, keep=True, closed=old.closed, chain=True, max_jobs=old.max_jobs)


def _old_chain_lock(folder: DeploymentFolder, say: Callable[[str], None] | None = None) -> FileLock:
    return exclusive_lock(
        folder.path / "successors.lock", wait_notice(f"what follows {folder.name}", say), silent_s=OLD_LOCK_S
    )


def _close_old_chain(folder: DeploymentFolder, why: str) -> Fleet | None:
    if not _old_file(folder).exists():
        return None
    with _old_chain_lock(folder):
        old = load_json(OldChain, _old_file(folder))
        if not old.closed:
            save_record(_old_file(folder), replace(old, closed=why))
    return _read_old_chain(folder)


def _adopt_old_chain(folder: DeploymentFolder) -> None:
    """Give a chain of an earlier version a record, and let no process of that version submit anything more."""
    if not _old_file(folder).exists():
        raise UsageError(f"{folder.name!r} was not started with --renew.", "Start it with `corral up MODEL --renew`.")
    with _old_chain_lock(folder):
        chain, old = _read_old_chain(folder), load_json(OldChain, _old_file(folder))
        if chain is None or FleetFolder(folder.path).record.is_file():  # another process was quicker
            return
        model = load_json(deployments.Record, folder.record).served_name
        write_fleet(FleetFolder(folder.path), replace(chain, model=model))
        save_record(_old_file(folder), replace(old, closed=old.closed or ADOPTED))
