"""Who starts processes on which nodes: the seam between a LaunchSpec and running agents.

A target only knows how to place the agent and start it; the agent does the rest, the same everywhere. A new target
is one new file and one row in `TARGETS`: its keys in profiles, its options of the command line, the files that it
ships and how its jobs are found are declared there and nowhere else. Targets never import each other. A target is
made from options (hosts, a partition), which are kept with the deployment, so that a later command finds the same
nodes again.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from corral.base.errors import UsageError
from corral.deploy.deployment.state import Reason, State
from corral.deploy.targets.keys import Flag, Shared, Size, only_said

if TYPE_CHECKING:
    from corral.base.ssh import Forward, Ssh
    from corral.deploy.deployment.folder import DeploymentFolder
    from corral.deploy.launch.links import Node, Ports
    from corral.deploy.launch.render import LaunchSpec, PlacedFile
    from corral.engines.runtimes.base import NodeCheck
    from corral.plan.contract import Plan
    from corral.plan.hardware.inventory import Inventory


Progress = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True)
class ChosenPorts:
    """Ports that were free when asked, and a word when one is not the one wanted."""

    ports: Ports
    note: str = ""


@dataclass(frozen=True)
class AgentsStatus:
    """What a target knows of the agents of a deployment; `alive` is None when it cannot be known from here.

    A target with states of its own (a queue) says them in `state`, `reason`, `text` and `remedy`; they hold while
    the agents have said nothing later.
    """

    alive: bool | None
    machine_restarted: bool = False
    where: str = ""
    state: State | None = None
    reason: Reason | None = None
    text: str = ""
    remedy: str = ""
    overrules: bool = False  # an end that the agents wrote too: the target caused it, or it is of an earlier attempt


@dataclass(frozen=True)
class Lease:
    """How long a deployment has its nodes; None: not known yet."""

    submitted_s: float
    started_s: float | None = None
    last_request_s: float | None = None  # from then on it drains

    @property
    def queue_s(self) -> float:
        """How long it waited for its nodes; 0 while it still does."""
        return max(0.0, self.started_s - self.submitted_s) if self.started_s else 0.0


@dataclass(frozen=True)
class OwnJob:
    """The job of a scheduler that this process runs in."""

    id: str
    attempt: str  # another one when the scheduler put the job back into its queue and started it again


class JobState(StrEnum):
    """Where a job of a scheduler stands; all but `running` are called as a deployment's states are."""

    QUEUED = State.QUEUED
    STARTING = State.STARTING
    RUNNING = "running"
    DRAINING = State.DRAINING
    STOPPED = State.STOPPED
    FAILED = State.FAILED
    UNKNOWN = State.UNKNOWN


@dataclass(frozen=True)
class JobStatus:
    """What a scheduler says of a job; `ended` is None when it cannot be asked."""

    state: JobState
    text: str
    remedy: str = ""
    ended: bool | None = False
    waiting: bool = False
    reason: Reason | None = None  # why it ended, or why it can never start; None: as it should, or not known


class Target(Protocol):
    """What every target can do."""

    @property
    def name(self) -> str: ...

    def options(self) -> dict[str, object]:
        """What makes the same target again; kept in the deployment's record."""
        ...

    def prepare(self) -> list[str]:
        """Look at the nodes before anything is decided; refuse what cannot work. Things worth knowing."""
        ...

    def nodes(self) -> tuple[Node, ...]:
        """The nodes, head first."""
        ...

    def inventory(self) -> Inventory:
        """The hardware of the nodes."""
        ...

    def home(self) -> str:
        """Corral's home on the nodes."""
        ...

    def node_folder(self, folder: DeploymentFolder, launch_id: str) -> DeploymentFolder:
        """A deployment's folder as the nodes see it."""
        ...

    def default_bind(self, expose: bool = False) -> str:
        """The address a server listens on when the user names none: its own node only, or the cluster's network."""
        ...

    def choose_ports(self, bind: str, wanted: int | None, avoid: Collection[int] = ()) -> ChosenPorts:
        """Ports on the head node; none of those to `avoid`, which others are going to take."""
        ...

    def base_url(self, bind: str, ports: Ports) -> str:
        """Where this machine reaches the server; empty when that is known only once it runs."""
        ...

    def place(self, path: Path, progress: Progress) -> str:
        """Make sure that a folder of this machine is on every node; its path there."""
        ...

    def fetching_hosts(self) -> tuple[str, ...]:
        """Hosts that fetch a model of the hub themselves, instead of by way of this machine; empty: this one does."""
        ...

    def find_model(self, name: str, repo: str, at_least_bytes: int) -> str | None:
        """Where every node already has a model of the hub; None when they have not, or nobody looked."""
        ...

    def placed(self, path: Path) -> str:
        """Where the nodes will find a model of this machine; nothing is moved, and nobody new is asked."""
        ...

    def reach(self, node: str) -> tuple[str, ...]:
        """The words that bring a command to a node, for people; empty: none are needed."""
        ...

    def shell(self) -> Ssh:
        """The ssh that reaches its hosts."""
        ...

    def verify(self, checks: Sequence[NodeCheck]) -> None:
        """Ask every node what the runtime wants to know before a start; refuse nodes that lack it or differ."""
        ...

    def files(self) -> tuple[PlacedFile, ...]:
        """Files of Corral's that it needs on the nodes, beside those that every launch brings."""
        ...

    def start(self, spec: LaunchSpec, folder: DeploymentFolder) -> None:
        """Place the files and start one agent per node, such that they outlive this process."""
        ...

    def refresh(self, folder: DeploymentFolder) -> None:
        """Bring what the agents wrote since the last time into the folder on this machine."""
        ...

    def agents(self, folder: DeploymentFolder) -> AgentsStatus:
        """Whether the agents run."""
        ...

    def stop(self, folder: DeploymentFolder, launch_id: str, grace_s: float) -> bool:
        """Ask the agents to stop and wait; clean up behind agents that are gone. Whether nothing is left."""
        ...

    def forward(self, folder: DeploymentFolder) -> Forward | None:
        """The way by which the endpoint is brought to this machine; None when none is needed."""
        ...


class Declared:
    """What a target says of itself before one is made, and what most answer alike; each overrides what differs.

    `TABLE` is a dataclass of keys (see `deploy.targets.keys`): the table of a profile that has the target's name.
    `FLAGS` are its options of the command line, `VARIABLES` those of the environment. A flag names an option of the
    target, and so does a key, unless `from_profile` makes another of it.
    """

    TITLE: ClassVar[str] = ""  # for headings: SLURM, ssh
    TABLE: ClassVar[type | None] = None
    FLAGS: ClassVar[tuple[Flag, ...]] = ()
    VARIABLES: ClassVar[Mapping[str, str]] = {}  # variable -> key of the table
    DERIVED: ClassVar[Mapping[str, str]] = {}  # key -> the key that it may come from: hosts from a hosts file
    REQUIRED: ClassVar[tuple[str, ...]] = ()  # options without which none can be made
    NODES_KNOWN: ClassVar[bool] = True  # before it starts something

    @classmethod
    def completed(cls, table: Any, folder: Path, overruled: frozenset[str]) -> Any:  # noqa: ARG003
        """The table with what it names brought in; `folder` is where its profile lies.

        The keys in `overruled` are said by the environment, on top of what the files say.
        """
        return table

    @classmethod
    def from_profile(cls, table: Any, shared: Shared) -> dict[str, object]:  # noqa: ARG003
        """The options that a profile asks for; only what is said."""
        return only_said(vars(table)) if table is not None else {}

    @classmethod
    def count_nodes(cls, table: Any) -> int | None:  # noqa: ARG003
        """How many nodes the table speaks of."""
        return None

    @classmethod
    def contradictions(cls, table: Any, shared: Shared) -> Iterator[tuple[str, str, str]]:  # noqa: ARG003
        """(key, what it says, what another says) where two keys cannot both be meant."""
        return iter(())

    @classmethod
    def size(cls, options: Mapping[str, Any]) -> Size:  # noqa: ARG003
        """How much is asked for."""
        return Size()

    @classmethod
    def divisible(cls, options: Mapping[str, Any]) -> tuple[str, ...]:  # noqa: ARG003
        """The nodes that several deployments may be given parts of; empty: whoever gives the nodes divides them."""
        return ()

    @classmethod
    def only_on(cls, options: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, Any]:  # noqa: ARG003
        """The options for some of those nodes."""
        return dict(options)

    # what holds where the nodes see this machine's files, as here or on a shared file system

    def files(self) -> tuple[PlacedFile, ...]:
        return ()

    def fetching_hosts(self) -> tuple[str, ...]:
        return ()

    def find_model(self, name: str, repo: str, at_least_bytes: int) -> str | None:
        return None

    def placed(self, path: Path) -> str:
        return str(path)

    def reach(self, node: str) -> tuple[str, ...]:
        return ()

    def shell(self) -> Ssh:
        from corral.base.ssh import Ssh

        return Ssh()


@runtime_checkable
class Queue(Protocol):
    """What a target that hands jobs to a scheduler can do besides."""

    def check(self, plan: Plan) -> None:
        """Refuse, before anything is queued, a plan that cannot work there."""
        ...

    def script(self, spec: LaunchSpec, folder: DeploymentFolder) -> str:
        """The batch script that `start` submits. Pure."""
        ...

    def templates(self, spec: LaunchSpec, folder: DeploymentFolder) -> dict[Path, str]:
        """What the agents are given, by file, one for each rank; tokens stand for what is found on the nodes."""
        ...

    def sizes(self) -> tuple[int, ...]:
        """Numbers of nodes that may be tried when the user named none; empty when one was named."""
        ...

    def resized(self, nodes: int) -> Target:
        """The same target with another number of nodes."""
        ...

    def job_of(self, folder: DeploymentFolder) -> str:
        """The name of the deployment's job in the queue."""
        ...

    def hand_on(self, folder: DeploymentFolder, current: str) -> str:
        """Queue the same job once more, to start when the current one is over; its name."""
        ...

    def with_renewal(self, options: Mapping[str, object]) -> dict[str, object]:
        """Options for a job that sees to its own successors."""
        ...

    def with_runner(self, options: Mapping[str, object], runner: Sequence[str]) -> dict[str, object]:
        """Options for a job that runs a command beside the model and ends with it."""
        ...

    def own_job(self, environ: Mapping[str, str]) -> OwnJob:
        """The job that a process with this environment runs in."""
        ...

    def is_placed(self, folder: DeploymentFolder, own: OwnJob) -> bool:
        """Whether the address in the folder is of this attempt of the job."""
        ...

    def job_status(self, id: str) -> JobStatus:
        """How a job stands, also one that has ended."""
        ...

    def cancel_job(self, id: str) -> None:
        """Take a job out of the queue, or end it."""
        ...

    def lease(self, folder: DeploymentFolder) -> Lease | None:
        """How long the nodes are held; None when nothing was submitted, or nobody knows any more."""
        ...


TARGETS = {
    "local": "corral.deploy.targets.local:LocalTarget",
    "ssh": "corral.deploy.targets.ssh:SshTarget",
    "slurm": "corral.deploy.targets.slurm:SlurmTarget",
}


def target_class(name: str) -> type[Declared]:
    """What declares itself under this name in `TARGETS`."""
    if name not in TARGETS:
        raise UsageError(f"there is no target {name!r}.", f"Known: {', '.join(TARGETS)}.")
    module, _, attribute = TARGETS[name].partition(":")
    found: type[Declared] = getattr(importlib.import_module(module), attribute)
    return found


def target_tables() -> dict[str, type]:
    """The tables of profiles that belong to a target, by the target's name."""
    return _tables(tuple(TARGETS))


@functools.cache
def _tables(names: tuple[str, ...]) -> dict[str, type]:
    return {name: table for name in names if (table := target_class(name).TABLE) is not None}


def load_target(name: str, options: Mapping[str, object] | None = None) -> Target:
    """A target by name, with its options checked."""
    made: Any = target_class(name)
    found: Target = made.from_options(options or {})
    return found
