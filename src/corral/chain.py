"""A deployment and its successors: `NAME`, `NAME~2`, `NAME~3`, …, one after the other under one name and one key.

The list is a file in the first one's folder. A name is written into it before the deployment is made, so that a
successor that was begun is always known, and `corral down NAME` ends all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from corral import deployment
from corral.errors import CorralError
from corral.files import write_atomic
from corral.folder import DeploymentFolder
from corral.record import dump_json, load_json
from corral.state import ENDED, State

__all__ = [
    "Chain",
    "Standing",
    "all_standings",
    "close_chain",
    "members",
    "read_chain",
    "successor_name",
    "write_chain",
]


@dataclass(frozen=True)
class Chain:
    """What follows a deployment."""

    successors: tuple[str, ...] = ()
    max_jobs: int | None = None  # of the whole chain; None: without end
    closed: str = ""  # why nothing more will follow; empty while something may


@dataclass(frozen=True)
class Standing:
    """One deployment of a chain, as far as it could be asked."""

    folder: DeploymentFolder
    status: deployment.Status | None  # None: it could not be asked
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


def all_standings(folder: DeploymentFolder, known: dict[str, Standing] | None = None) -> list[Standing]:
    """How each of a chain stands; those that are `known` to have ended are not asked again."""
    found = []
    for member in members(folder):
        before = (known or {}).get(member.name)
        try:
            record = member.record.stat()
            stamp = (record.st_ino, record.st_mtime_ns)
            if before is not None and before.state in ENDED and before.stamp == stamp:
                found.append(before)
                continue
            found.append(Standing(member, deployment.status(member), stamp=stamp))
        except (CorralError, OSError) as error:
            text = error.message if isinstance(error, CorralError) else str(error)
            found.append(Standing(member, None, text))
    return found


def close_chain(folder: DeploymentFolder, why: str) -> list[DeploymentFolder]:
    """Let nothing more follow; the successors, newest first."""
    chain = read_chain(folder)
    if folder.successors.exists() and not chain.closed:
        write_chain(folder, replace(chain, closed=why))
    return [DeploymentFolder.of(name) for name in reversed(chain.successors)]
