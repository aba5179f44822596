"""Who starts processes on which nodes: the seam between a LaunchSpec and running agents.

A target knows how to place the agent and start it; the agent does the rest, the same everywhere. A new target is one
new file and one row in `TARGETS`, and writes the abstract members of `Target`. What else a target may do is in small
classes by what a caller needs, with defaults: `Declaration` (profiles and options), `Preflight` (checks), `NodeFiles`
(where files lie), `Access` (addresses). `Queue` is what a scheduler adds. Targets never import each other. A target
is made from options (hosts, a partition), which are kept with the deployment, so that a later command finds the same
nodes again.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast, runtime_checkable

from corral.base.bundle import bundle
from corral.base.errors import DataError
from corral.base.files import make_private_dir, write_atomic
from corral.base.home import home_dir
from corral.base.processes import OWN_COMMAND
from corral.base.record import from_json, to_json
from corral.base.ssh import Forward
from corral.base.untrusted import parse_json
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import Reason, State
from corral.deploy.launch.links import Node, Ports
from corral.deploy.launch.paste import as_shell
from corral.deploy.launch.render import LaunchSpec, server_url
from corral.deploy.targets.keys import Declaration, target_class

if TYPE_CHECKING:
    from corral.deploy.doctor.finding import Finding
    from corral.engines.runtimes.base import NodeCheck
    from corral.plan.contract import Plan
    from corral.plan.hardware.inventory import Inventory
    from corral.plan.models.store import ModelSource


Progress = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True)
class ChosenPorts:
    """Ports that were free when checked, and a note when the usual one was taken."""

    ports: Ports
    note: str = ""


@dataclass(frozen=True)
class AgentsStatus:
    """What a target knows of the agents of a deployment; `alive` is None when this machine cannot know it.

    A target with states of its own (a queue) reports them in `state`, `reason`, `text` and `remedy`; they hold until
    the agents report something later.
    """

    alive: bool | None
    machine_restarted: bool = False
    where: str = ""
    state: State | None = None
    reason: Reason | None = None
    text: str = ""
    remedy: str = ""
    overrules: bool = False  # also an end that the agents wrote: the target caused it, or an earlier attempt did


@dataclass(frozen=True)
class Lease:
    """How long a deployment holds its nodes; None: not known yet."""

    submitted_s: float
    started_s: float | None = None
    last_request_s: float | None = None  # from then on it drains
    requeued: bool = False  # it ran before: the time since its submission is not only waiting

    @property
    def queue_s(self) -> float | None:
        """How long it waited for its nodes; None while it still waits, or where that is not known."""
        return None if self.requeued or not self.started_s else max(0.0, self.started_s - self.submitted_s)


@dataclass(frozen=True)
class OwnJob:
    """The job of a scheduler that this process runs in."""

    id: str
    attempt: str  # another one when the scheduler put the job back into its queue and started it again


class JobState(StrEnum):
    """The state of a scheduler's job; all but `running` are also states of a deployment."""

    QUEUED = State.QUEUED
    STARTING = State.STARTING
    RUNNING = "running"
    DRAINING = State.DRAINING
    STOPPED = State.STOPPED
    FAILED = State.FAILED
    UNKNOWN = State.UNKNOWN


@dataclass(frozen=True)
class JobStatus:
    """A job as its scheduler reports it; `ended` is None when the scheduler does not answer."""

    state: JobState
    text: str
    remedy: str = ""
    ended: bool | None = False
    waiting: bool = False
    reason: Reason | None = None  # why it ended, or can never start; None: it ended as it should, or not known


# $@: paths; prints those that cannot be read
MISSING = 'for path; do [ -r "$path" ] || printf "%s\\n" "$path"; done'


class Preflight:
    """Checks before anything starts; each raises what cannot work."""

    def prepare(self) -> list[str]:
        """Inspect the nodes before anything is decided; returns notes for the user."""
        return []

    def check(self, plan: Plan) -> None:
        """Refuse a plan that the target cannot run, before anything is installed or fetched."""

    def missing(self, paths: Sequence[str]) -> dict[str, str]:
        """Which of these paths cannot be read, each with the node; none where no node can be asked now."""
        return {path: "this machine" for path in paths if not os.access(path, os.R_OK)}

    def verify(self, checks: Sequence[NodeCheck]) -> None:
        """Run the runtime's checks on every node; refuse nodes that lack it or differ."""


class NodeFiles:
    """Where files lie on the nodes. The defaults hold where the nodes see this machine's files."""

    def home(self) -> str:
        """Corral's home on the nodes."""
        return str(home_dir())

    def node_folder(self, folder: DeploymentFolder, launch_id: str) -> DeploymentFolder:
        """A deployment's folder as the nodes see it."""
        return folder

    def place(self, path: Path, progress: Progress) -> str:
        """Make sure that a folder of this machine is on every node; its path there."""
        return str(path)

    def may_have(self, folder: str) -> bool:
        """Whether the nodes have a folder, as far as this machine sees; they are not asked."""
        return not Path(self.home()).is_dir() or Path(folder).is_dir()

    def placed(self, path: Path) -> str:
        """Where `place` would put a folder; moves nothing."""
        return str(path)

    def find_model(self, source: ModelSource, least_bytes: int) -> str | None:
        """Where every node already has a model of the hub; None when one of them lacks it."""
        return None

    def fetch_model(self, source: ModelSource, progress: Progress) -> str | None:
        """Let the nodes fetch a model of the hub themselves; its path there. None: this machine fetches it."""
        return None

    def pull_command(self, reference: str, folder: str) -> list[str]:
        """The command that brings a model into this folder of the nodes."""
        return [*OWN_COMMAND, "pull", reference, "--to", folder]

    def on_each(self, argv: Sequence[str]) -> list[list[str]]:
        """A command as this machine runs it on every node."""
        return [list(argv)]

    def refresh(self, folder: DeploymentFolder) -> None:
        """Bring what the agents wrote since the last time into the folder on this machine."""


class Access:
    """How servers on the nodes are reached. The defaults hold for this machine."""

    def default_bind(self, expose: bool = False) -> str:
        """The address a server listens on when the user names none: its own node only, or the cluster's network."""
        return "0.0.0.0" if expose else "127.0.0.1"  # noqa: S104 - asked for by the user

    def base_url(self, bind: str, ports: Ports) -> str:
        """Where this machine reaches the server; empty when that is known only once it runs."""
        return server_url(bind, ports.serve)

    def forward(self, folder: DeploymentFolder) -> Forward | None:
        """The ssh forward that brings the endpoint to this machine; None when none is needed."""
        return None

    def paste(self, spec: LaunchSpec, folder: DeploymentFolder, first: Sequence[str]) -> str:
        """The launch as commands to paste, after those in `first`."""
        return as_shell(spec, {}, first)


@dataclass(frozen=True)
class NoOptions:
    """The options of a target that has none."""


class Target(Declaration, Preflight, NodeFiles, Access, ABC):
    """Starts one agent per node, says how the agents are, and stops them.

    A new target writes the abstract members; whatever else differs from the defaults it overrides.
    """

    name: ClassVar[str]
    OPTIONS: ClassVar[type] = NoOptions  # a dataclass, which is kept in the deployment's record

    def __init__(self, chosen: Any) -> None:
        self.chosen = chosen  # its options

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """A target from its options, which are checked."""
        return cls(from_json(cls.OPTIONS, dict(options), f"the {cls.name} target"))

    def options(self) -> dict[str, object]:
        """What makes the same target again."""
        options: dict[str, object] = to_json(self.chosen)
        return options

    @abstractmethod
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, head first."""

    @abstractmethod
    def inventory(self) -> Inventory:
        """The hardware of the nodes."""

    @abstractmethod
    def choose_ports(self, bind: str, wanted: int | None, avoid: Collection[int] = ()) -> ChosenPorts:
        """Ports on the head node, none of those in `avoid`; the one that is wanted, or a refusal that names its
        owner.
        """

    @abstractmethod
    def start(self, spec: LaunchSpec, folder: DeploymentFolder) -> None:
        """Place the files and start one agent per node, such that they outlive this process."""

    @abstractmethod
    def agents(self, folder: DeploymentFolder) -> AgentsStatus:
        """Whether the agents run."""

    @abstractmethod
    def stop(self, folder: DeploymentFolder, launch_id: str, grace_s: float) -> bool:
        """Stop the agents and wait; clean up after agents that are gone. Whether nothing is left."""

    @classmethod
    def orphans(cls, owned: Collection[str]) -> Iterator[Finding]:  # noqa: ARG003
        """What a scheduler has of launches that are not `owned`, and of no other home either."""
        return iter(())

    # what a scheduler may change besides

    def script(self, spec: LaunchSpec, folder: DeploymentFolder) -> str:
        """The batch script that `start` submits; empty without a scheduler. Pure."""
        return ""

    def larger(self) -> Iterator[Target]:
        """The same target with more nodes, to try where a model does not fit; none when their number is fixed."""
        return iter(())


@runtime_checkable
class Queue(Protocol):
    """What a target that submits jobs to a scheduler can do besides."""

    def job_of(self, folder: DeploymentFolder) -> str:
        """The id of the deployment's job, also of one that was submitted and never recorded; empty without one.

        Raises while the scheduler cannot be asked for a job that may be there.
        """
        ...

    def job_status(self, id: str) -> JobStatus:
        """The status of a job, also of one that has ended."""
        ...

    def cancel_job(self, id: str) -> None:
        """Take a job out of the queue, or end it."""
        ...

    def submit_successor(self, folder: DeploymentFolder, current: str) -> str:
        """Submit the same job once more, to start when the current one is over; its id."""
        ...

    def lease(self, folder: DeploymentFolder) -> Lease | None:
        """How long the nodes are held; None when nothing was submitted, or the scheduler has forgotten the job."""
        ...

    def own_job(self, environ: Mapping[str, str]) -> OwnJob:
        """The job that a process with this environment runs in."""
        ...

    def is_placed(self, folder: DeploymentFolder, own: OwnJob) -> bool:
        """Whether the address in the folder is of this attempt of the job."""
        ...

    def with_renewal(self, options: Mapping[str, object]) -> dict[str, object]:
        """Options for a job that submits its own successors."""
        ...

    def with_keeper(self, options: Mapping[str, object]) -> dict[str, object]:
        """Options for a job of a fleet in which a keeper of the fleet stands by."""
        ...

    def with_runner(self, options: Mapping[str, object], runner: Sequence[str]) -> dict[str, object]:
        """Options for a job that runs a command beside the model and ends with it."""
        ...


def launch_id_of(folder: DeploymentFolder) -> str:
    """The launch id of a deployment, which is on disk before anything is started; empty where it cannot be read."""
    with contextlib.suppress(OSError, DataError, KeyError, TypeError):
        launch_id = parse_json(folder.launch.read_bytes(), str(folder.launch))["launch_id"]
        return launch_id if isinstance(launch_id, str) else ""
    return ""


def is_of_launch(folder: DeploymentFolder, launch_id: str) -> bool:
    """Whether a folder, of any home, is that of a launch; raises where that cannot be read."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return f'"{launch_id}"'.encode() in folder.record.read_bytes()
    return False


def write_node_files(spec: LaunchSpec, folder: DeploymentFolder) -> None:
    """Write the files of a launch into a folder that the nodes see, and make the folders of its ranks."""
    make_private_dir(folder.node_files)
    for file in spec.files:
        write_atomic(folder.node_files / file.name, bundle(file.resource))
    for rank in spec.ranks:
        make_private_dir(folder.rank(rank.rank).path)


def load_target(name: str, options: Mapping[str, object] | None = None) -> Target:
    """A target by name, with its options checked."""
    loaded = cast("type[Target]", target_class(name))
    return loaded.from_options(options or {})
