"""One class owns every file name of a deployment: `DeploymentFolder`, and `RankFolder` for each `rankN` in it.

Beside the files named here, a rank's folder has `rows-N.sock`, where batches on the same machine submit rows, and
`renewal.log` says what was done for successors. Names may hold spaces, quotes and other characters; folder names are
percent-encoded.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from corral.base.errors import NotFoundError, UsageError
from corral.base.files import changed_s, is_gone, make_private_dir, records_in, write_atomic
from corral.base.home import deployments_dir
from corral.base.record import nearest

LONGEST_NAME = 80
LONGEST_FOLDER_NAME = 200  # file systems allow 255 bytes, and locks and nodes add to it
SAFE = " +,=@"  # in a folder's name, besides letters and digits


def checked_name(name: str) -> str:
    """The name, if a deployment may have it."""
    if not name.strip() or len(name) > LONGEST_NAME:
        raise UsageError(f"{name!r} cannot name a deployment.", f"Use 1 to {LONGEST_NAME} characters.")
    if any(ord(character) < 32 or ord(character) == 127 for character in name):
        raise UsageError(f"{name!r} cannot name a deployment: it holds control characters.", "Use plain text.")
    try:
        length = len(quote(name, safe=SAFE))
    except UnicodeEncodeError:  # an argument that is not UTF-8
        raise UsageError(f"{name!r} cannot name a deployment: it is not text.", "Use plain text.") from None
    if length > LONGEST_FOLDER_NAME:
        raise UsageError(
            f"{name!r} cannot name a deployment: its folder's name would have {length} bytes.",
            f"Use a shorter name: at most {LONGEST_FOLDER_NAME} bytes, six or more for each non-ASCII character.",
        )
    return name


def folder_name(name: str) -> str:
    """What the folder of something with that name is called."""
    encoded = quote(checked_name(name), safe=SAFE)
    return "%2E" + encoded[1:] if encoded.startswith(".") else encoded  # not hidden, nor this folder or its parent


def set_aside(folder: Path) -> None:
    """Keep the last ended deployment or fleet of a name for reading, and only that one."""
    if folder.exists():
        old = folder.parent / ".ended" / folder.name
        make_private_dir(old.parent)
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)


class FileIn:
    """The path of a file in a folder, by its name: an attribute of the class that owns the folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: DeploymentFolder | RankFolder, owner: object) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class DeploymentFolder:
    """Paths of one deployment."""

    path: Path

    record = FileIn("deployment.json")  # what was requested: model, engine, target, times
    plan = FileIn("plan.json")  # the decision, with reasons
    staging = FileIn("staging.jsonl")  # the journal of the command that makes it
    launch = FileIn("launch.json")  # the very commands, environment and files of every rank
    endpoint = FileIn("endpoint.json")  # address, model name and where the key is (0600)
    key = FileIn("key")  # the key itself (0600)
    token = FileIn("token")  # by which the agents of several nodes, and Ray, know each other (0600)
    node_files = FileIn("node")  # the agent and the guard, as they were at launch
    started = FileIn("started")  # an agent may run somewhere: the folder stays until that is known to be over
    stop = FileIn("stop")  # asks a command that is still staging to give up
    differences = FileIn("differences.json")  # between the plan and what the engine reported
    tunnel = FileIn("tunnel.json")  # who holds the tunnel to the endpoint
    tunnel_log = FileIn("tunnel.log")
    job = FileIn("job.json")  # the batch job, on SLURM
    script = FileIn("job.sh")  # the batch script as it was submitted
    job_log = FileIn("job.log")  # its output
    proxy = FileIn("proxy.json")  # the port of `corral proxy`, and who holds it

    @classmethod
    def of(cls, name: str) -> DeploymentFolder:
        return cls(deployments_dir() / folder_name(name))

    @property
    def name(self) -> str:
        return unquote(self.path.name)

    def rank(self, rank: int) -> RankFolder:
        return RankFolder(self.path / f"rank{rank}")

    def ranks(self) -> list[RankFolder]:
        """The ranks that were launched, in order."""
        paths = [path for path in self.path.glob("rank*") if path.name[4:].isdigit()]
        return sorted(map(RankFolder, paths), key=lambda rank: rank.number)

    def known_rank(self, rank: int) -> RankFolder:
        """One of the ranks that were launched; before that, any."""
        known = [one.number for one in self.ranks()]
        if known and rank not in known:
            raise NotFoundError(f"{self.name!r} has no rank {rank}.", f"It has: {', '.join(map(str, known))}.")
        return self.rank(rank)

    def create(self, key: str = "") -> None:
        """Make the folder, with this key or a new one; that of an earlier deployment of the name is set aside."""
        make_private_dir(deployments_dir())
        self.set_aside()
        make_private_dir(self.path)
        write_atomic(self.key, (key or secrets.token_urlsafe(32)) + "\n")
        write_atomic(self.token, secrets.token_hex(32))

    def set_aside(self) -> None:
        set_aside(self.path)

    def delete(self) -> None:
        shutil.rmtree(self.path)


@dataclass(frozen=True)
class RankFolder:
    """Paths of one rank of a deployment."""

    path: Path

    spec = FileIn("spec.json")  # what the agent runs
    template = FileIn("template.json")  # the spec before the job runs: addresses and ports are still tokens
    address = FileIn("address.json")  # where the rank runs, and in which attempt of its job
    events = FileIn("events.jsonl")  # its journal
    log = FileIn("engine.log")  # the engine's own output
    agent_log = FileIn("agent.log")
    agent = FileIn("agent.json")  # the agent's process
    engine = FileIn("engine.json")  # the engine's process
    load = FileIn("load.jsonl")  # how many requests it had, and how long, every five minutes
    heartbeat = FileIn("heartbeat.json")
    stop = FileIn("stop")  # asks the agent to stop
    drain = FileIn("drain")  # asks for the end: no new requests; holds the seconds left for running ones

    @property
    def number(self) -> int:
        return int(self.path.name[4:])


def all_folders() -> list[DeploymentFolder]:
    """Every deployment of this home, oldest first."""
    records = sorted(records_in(deployments_dir(), "deployment.json"), key=changed_s)
    return [DeploymentFolder(record.parent) for record in records]


def open_folder(name: str) -> DeploymentFolder:
    """The folder of an existing deployment."""
    folder = DeploymentFolder.of(name)
    if is_gone(folder.record):
        known = [other.name for other in all_folders()]
        guesses = nearest(name, known) or known
        remedy = f"Known: {', '.join(guesses)}." if guesses else "There are none yet: `corral up` starts one."
        raise NotFoundError(f"no deployment is called {name!r}.", remedy)
    return folder
