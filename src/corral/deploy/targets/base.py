"""Who starts processes on which nodes: the seam between a LaunchSpec and running agents.

A target only knows how to place the agent and start it; the agent does the rest, the same everywhere. A new target
is one new file and one row in `TARGETS`: its keys in profiles, its options of the command line, the files that it
ships and how its jobs are found are declared there and nowhere else. Targets never import each other. A target is
made from options (hosts, a partition), which are kept with the deployment, so that a later command finds the same
nodes again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from corral.deploy.deployment.state import Reason, State
from corral.deploy.targets.keys import TARGETS as TARGETS
from corral.deploy.targets.keys import Declared as Declared
from corral.deploy.targets.keys import target_class as target_class
from corral.deploy.targets.keys import target_tables as target_tables

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


def load_target(name: str, options: Mapping[str, object] | None = None) -> Target:
    """A target by name, with its options checked."""
    made: Any = target_class(name)
    found: Target = made.from_options(options or {})
    return found
