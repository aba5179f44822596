"""One class owns every file name of a deployment.

    <name>/
      deployment.json     what was asked: model, engine, target, times
      plan.json           the decision, with reasons
      staging.jsonl       what is done before the start: engine, model, how far; as a journal
      launch.json         the very commands, environment and files of every rank
      endpoint.json       address, model name and where the key is (0600)
      key                 the key itself (0600)
      token               by which the agents of several nodes, and Ray, know each other (0600)
      job.json            the batch job, on SLURM; job.sh is its script, job.log its output
      node/               the agent and the guard, as they were at launch
      renewal.log         what was done so that another job follows this one, where it is renewed
      proxy.json          the port of `corral proxy`, and who holds it
      rank0/spec.json     what the agent of rank 0 runs
      rank0/events.jsonl  its journal; rank0/heartbeat.json, agent.json, engine.json, stop beside it
      rank0/engine.log    the engine's own words
      rank0/load.jsonl    how many requests it had, and how long, every five minutes
      rank0/rows-N.sock   where batches on the same machine hand it rows

Names may hold spaces, quotes and other characters; folder names are made safe by percent-encoding.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from corral.base.errors import NotFoundError, UsageError
from corral.base.files import make_private_dir, write_atomic
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
    except UnicodeEncodeError:  # an argument that is no UTF-8
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
    return (
        "%2E" + encoded[1:] if encoded.startswith(".") else encoded
    )  # neither hidden, nor this folder or its parent


def set_aside(folder: Path) -> None:
    """Keep the last ended deployment or fleet of a name for reading, and only that one."""
    if folder.exists():
        old = folder.parent / ".ended" / folder.name
        make_private_dir(old.parent)
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)


@dataclass(frozen=True)
class DeploymentFolder:
    """Paths of one deployment."""

    path: Path

    @classmethod
    def of(cls, name: str) -> DeploymentFolder:
        return cls(deployments_dir() / folder_name(name))

    @property
    def name(self) -> str:
        return unquote(self.path.name)

    @property
    def record(self) -> Path:
        return self.path / "deployment.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def staging(self) -> Path:
        """The journal of the command that makes it."""
        return self.path / "staging.jsonl"

    @property
    def launch(self) -> Path:
        return self.path / "launch.json"

    @property
    def endpoint(self) -> Path:
        return self.path / "endpoint.json"

    @property
    def key(self) -> Path:
        return self.path / "key"

    @property
    def token(self) -> Path:
        """What the agents of several nodes, and Ray, know each other by."""
        return self.path / "token"

    @property
    def started(self) -> Path:
        """An agent may run somewhere: the folder must not go away before that is known to be over."""
        return self.path / "started"

    @property
    def tunnel(self) -> Path:
        """Who holds the tunnel to the endpoint."""
        return self.path / "tunnel.json"

    @property
    def tunnel_log(self) -> Path:
        return self.path / "tunnel.log"

    @property
    def proxy(self) -> Path:
        """The port of the proxy in front of it, and who holds it."""
        return self.path / "proxy.json"

    @property
    def differences(self) -> Path:
        return self.path / "differences.json"

    @property
    def stop(self) -> Path:
        """Asks a command that is still staging to give up."""
        return self.path / "stop"

    @property
    def job(self) -> Path:
        """The batch job that runs it, where one does."""
        return self.path / "job.json"

    @property
    def script(self) -> Path:
        """The batch script as it was submitted."""
        return self.path / "job.sh"

    @property
    def job_log(self) -> Path:
        return self.path / "job.log"

    @property
    def node_files(self) -> Path:
        return self.path / "node"

    def rank(self, rank: int) -> RankFolder:
        return RankFolder(self.path / f"rank{rank}")

    def ranks(self) -> list[RankFolder]:
        """The ranks that were launched, in order."""
        found = [path for path in self.path.glob("rank*") if path.name[4:].isdigit()]
        return [RankFolder(path) for path in sorted(found, key=lambda path: int(path.name[4:]))]

    def known_rank(self, rank: int) -> RankFolder:
        """One of the ranks that were launched; before that, any."""
        known = [one.number for one in self.ranks()]
        if known and rank not in known:
            raise NotFoundError(f"{self.name!r} has no rank {rank}.", f"It has: {', '.join(map(str, known))}.")
        return self.rank(rank)

    def create(self) -> None:
        """Make the folder anew; what an earlier deployment of the name left is set aside."""
        make_private_dir(deployments_dir())
        self.set_aside()
        make_private_dir(self.path)
        write_atomic(self.key, secrets.token_urlsafe(32) + "\n")
        write_atomic(self.token, secrets.token_hex(32))

    def set_aside(self) -> None:
        set_aside(self.path)

    def delete(self) -> None:
        shutil.rmtree(self.path)


@dataclass(frozen=True)
class RankFolder:
    """Paths of one rank of a deployment."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name[4:])

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "engine.log"

    @property
    def agent_log(self) -> Path:
        return self.path / "agent.log"

    @property
    def agent(self) -> Path:
        return self.path / "agent.json"

    @property
    def engine(self) -> Path:
        return self.path / "engine.json"

    @property
    def load(self) -> Path:
        """What the server was asked: counters, a line every few minutes."""
        return self.path / "load.jsonl"

    @property
    def heartbeat(self) -> Path:
        return self.path / "heartbeat.json"

    @property
    def stop(self) -> Path:
        return self.path / "stop"

    @property
    def drain(self) -> Path:
        """Asks for the end: no new requests, running ones finish; holds the seconds that are left for it."""
        return self.path / "drain"

    @property
    def template(self) -> Path:
        """The spec before the job runs: addresses and ports are still tokens."""
        return self.path / "template.json"

    @property
    def address(self) -> Path:
        """Where the rank found itself, and in which attempt of its job."""
        return self.path / "address.json"


def all_folders() -> list[DeploymentFolder]:
    """Every deployment of this home, oldest first."""
    records = list(deployments_dir().glob("*/deployment.json"))
    records = [record for record in records if not record.parent.name.startswith(".")]
    return [DeploymentFolder(record.parent) for record in sorted(records, key=lambda path: path.stat().st_mtime)]


def open_folder(name: str) -> DeploymentFolder:
    """The folder of an existing deployment."""
    folder = DeploymentFolder.of(name)
    if not folder.record.is_file():
        known = [other.name for other in all_folders()]
        guesses = nearest(name, known) or known
        remedy = f"Known: {', '.join(guesses)}." if guesses else "There are none yet: `corral up` starts one."
        raise NotFoundError(f"no deployment is called {name!r}.", remedy)
    return folder
