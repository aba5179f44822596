"""A deployment and its successors: `NAME`, `NAME~2`, `NAME~3`, …, one after the other under one name and one key.

The list is a file in the first one's folder. A name is written into it before the deployment is made, so that a
successor that was begun is always known, and `corral down NAME` ends all of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace

from corral.base.errors import ConflictError, CorralError, NotFoundError, UsageError
from corral.base.files import write_atomic
from corral.base.lock import FileLock, exclusive_lock, wait_notice
from corral.base.record import dump_json, load_json
from corral.deploy.deployment.fleet import living_fleets
from corral.deploy.deployment.folder import DeploymentFolder, all_folders, chain_of, open_folder
from corral.deploy.deployment.state import ENDED, State
from corral.deploy.lifecycle import deployments

OLD_LOCK_S = 900.0  # a submission takes seconds


@dataclass(frozen=True)
class Chain:
    """What follows a deployment."""

    successors: tuple[str, ...] = ()
    max_jobs: int | None = None  # of the whole chain; None: without end
    closed: str = ""  # why nothing more will follow; empty while something may


@dataclass(frozen=True)
class ChainMember:
    """One deployment of a chain, as far as it could be asked."""

    folder: DeploymentFolder
    status: deployments.Status | None  # None: it could not be asked
    text: str = ""
    stamp: tuple[int, int] = (0, 0)  # of its record: another deployment of the same name has another

    @property
    def state(self) -> State:
        return self.status.state if self.status else State.UNKNOWN


def read_chain(folder: DeploymentFolder) -> Chain:
    """The chain that a deployment begins; an empty one when nothing follows it."""
    try:
        return load_json(Chain, folder.successors)
    except FileNotFoundError:
        return Chain()


def write_chain(folder: DeploymentFolder, chain: Chain) -> None:
    write_atomic(folder.successors, dump_json(chain))


def successor_name(name: str, number: int) -> str:
    """The name of the number-th of a chain; the first has the chain's own."""
    return name if number == 1 else f"{name}~{number}"


def members(folder: DeploymentFolder) -> list[DeploymentFolder]:
    """All of a chain, oldest first."""
    return [folder, *map(DeploymentFolder.of, read_chain(folder).successors)]


def first_of(name: str) -> str:
    """The deployment that a name belongs to: `NAME` of `NAME~2`, if NAME has such a successor."""
    first = DeploymentFolder.of(chain_of(name))
    return first.name if first.record.is_file() and name in read_chain(first).successors else name


def all_standings(folder: DeploymentFolder, known: dict[str, ChainMember] | None = None) -> list[ChainMember]:
    """How each of a chain stands; those that are `known` to have ended are not asked again."""
    return [_standing(member, (known or {}).get(member.name)) for member in members(folder)]


def _standing(member: DeploymentFolder, before: ChainMember | None = None) -> ChainMember:
    try:
        record = member.record.stat()
        stamp = (record.st_ino, record.st_mtime_ns)
        if before is not None and before.state in ENDED and before.stamp == stamp:
            return before
        return ChainMember(member, deployments.status(member), stamp=stamp)
    except (CorralError, OSError) as error:
        return ChainMember(member, None, str(error))


def newest_ready(folder: DeploymentFolder) -> ChainMember | None:
    """The newest of a chain that is ready; None when none is."""
    return next((one for one in map(_standing, reversed(members(folder))) if one.state is State.READY), None)


def all_chains() -> list[DeploymentFolder]:
    """The first of every chain: deployments that succeed no other."""
    return [folder for folder in all_folders() if first_of(folder.name) == folder.name]


def living_chains() -> dict[str, list[ChainMember]]:
    """By the name of its first: those of every chain that have not ended, where there are any."""
    chains = {first.name: [one for one in all_standings(first) if one.state not in ENDED] for first in all_chains()}
    return {name: chain for name, chain in chains.items() if chain}


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
    if not folder.successors.exists():
        return []
    with chain_lock(folder):
        chain = read_chain(folder)
        if not chain.closed:
            write_chain(folder, replace(chain, closed=why))
    found = [DeploymentFolder.of(name) for name in reversed(chain.successors)]
    return [one for one in found if one.record.is_file()]


def refuse_living_chain(name: str) -> None:
    """A name is not free while successors live under it."""
    folder = DeploymentFolder.of(name)
    for one in all_standings(folder)[1:] if folder.successors.exists() else []:
        if one.folder.record.is_file() and one.state not in ENDED:
            raise ConflictError(
                f"{one.folder.name!r} follows {name!r} and is {one.state}.",
                f"Use it, end all of them (`corral down {shlex.quote(name)}`), or choose another name.",
            )


def chain_lock(folder: DeploymentFolder, say: Callable[[str], None] | None = None) -> FileLock:
    """Only its holder changes a chain. A holder on a node that is gone cannot be asked: its lock grows old."""
    return exclusive_lock(
        folder.successors_lock, wait_notice(f"what follows {folder.name}", say), silent_s=OLD_LOCK_S
    )
