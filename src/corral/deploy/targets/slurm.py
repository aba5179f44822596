"""A SLURM cluster: one batch job per deployment, one agent per node, all files on the shared file system.

Which nodes there will be is known only once the job runs; until then addresses and ports are tokens, which
`node/slurm_start.py` replaces on the nodes. What SLURM says of the job and what the agents wrote are put together by
`deployment`; a controller that does not answer leaves the job unknown, never failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from corral.base.bundle import bundle
from corral.base.errors import CorralError, DoesNotFitError, EngineError, UnreachableError, UsageError
from corral.base.files import make_private_dir, write_atomic
from corral.base.home import home_dir
from corral.base.record import dump_json, load_json, to_json
from corral.base.shell import run
from corral.base.ssh import Forward
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.deployment.state import Reason, State
from corral.deploy.launch.links import Node, Ports
from corral.deploy.launch.render import LaunchSpec, PlacedFile, agent_spec
from corral.deploy.slurm import commands
from corral.deploy.slurm.commands import SlurmJob
from corral.deploy.slurm.options import SlurmOptions
from corral.deploy.slurm.preflight import Allocation, find_allocation, refuse_lacking, refuse_unseen
from corral.deploy.slurm.script import BatchJob, batch_script
from corral.deploy.slurm.states import standing
from corral.deploy.targets.base import (
    AgentsStatus,
    ChosenPorts,
    Declared,
    JobState,
    JobStatus,
    Lease,
    OwnJob,
    Progress,
)
from corral.deploy.targets.keys import Flag, Shared, Size, at_least, key, number, one_word, only_said, time_limit
from corral.deploy.targets.slurm_job import (
    Submitted,
    agents_of,
    clear_up,
    forgotten,
    has_lost_a_node,
    is_over,
    look,
    submitted_job,
    unasked,
)
from corral.plan.hardware.inventory import Inventory, parse_gpus

if TYPE_CHECKING:
    from corral.engines.runtimes.base import NodeCheck
    from corral.plan.contract import Plan


DEFAULT_TIME_S = 4 * 3600.0  # where neither the user nor the partition says how long
END_PATIENCE_S = 90.0  # for a cancelled job: KillWait and epilogues
LOST_PATIENCE_S = 5.0  # for one that has lost a node: SLURM ends it once the node answers, or is given up
SIGNAL_EARLY_S = 60.0  # by so much SLURM may send a signal before its time, says sbatch's manual
SIZES = (2, 3, 4, 8, 16)


def _sbatch(value: Mapping[str, object]) -> str:
    for name, given in value.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            return f"names of #SBATCH options without dashes in front; {name!r} is not one"
        if not isinstance(given, (str, int, bool)) or (isinstance(given, str) and not given.isprintable()):
            return f"text, numbers or true; {name} is {given!r}"
    return ""


@dataclass(frozen=True)
class SlurmKeys:
    """[slurm]: what the batch job asks for."""

    partition: str | None = key("`--partition`", None, one_word, "gpu")
    account: str | None = key("`--account`", None, one_word, "my_lab")
    qos: str | None = key("`--qos`", None, one_word, "normal")
    reservation: str | None = key("`--reservation`", None, one_word, "course")
    constraint: str | None = key("`--constraint`", None, one_word, "h100")
    exclusive: bool | None = key("`--exclusive`: whole nodes", None, None, True)
    mem: str | int | None = key("`--mem` per node; 0 is all of it", None, None, 0)
    gpus_per_node: int | None = key("`--gpus-per-node` (default: from hardware.gpus)", None, at_least(0, 128), 4)
    cpus_per_task: int | None = key("`--cpus-per-task`", None, at_least(1), 16)
    time: str | None = key("`--time`: the time limit of the job", None, time_limit, "4:00:00")
    nodes: int | None = key("`--nodes` (default: hardware.nodes, or 1)", None, at_least(1, 4096), 1)
    signal_s: int | None = key("seconds before the time limit at which draining begins", None, at_least(1), 120)
    job_name: str | None = key("`--job-name` (default: `corral-NAME`)", None, one_word, "llama")
    output: str | None = key(
        "`--output` (default: `job.log` in the deployment's folder)", None, one_word, "%x.%j.out"
    )
    error: str | None = key("`--error` (default: with the output)", None, one_word, "%x.%j.err")
    modules: tuple[str, ...] = key("modules that the job loads before anything else", (), None, ["cuda"])
    extra: Mapping[str, str | int | bool] = key(
        "other #SBATCH options, passed on as they stand", {}, _sbatch, {"mail-type": "END"}
    )


@dataclass
class SlurmTarget(Declared):
    """Hands deployments to SLURM."""

    TITLE: ClassVar[str] = "SLURM"
    TABLE: ClassVar[type] = SlurmKeys
    FLAGS: ClassVar[tuple[Flag, ...]] = (
        Flag("--time", "time", "How long the job may run.", "H:MM:SS"),
        Flag("--account", "account", "The account it is charged to."),
        Flag("--partition", "partition", "The partition (default: the cluster's, or one with GPUs)."),
        Flag("--nodes", "nodes", "Nodes (default: as many as the model needs).", least=1),
        Flag("--interface", "interface", "Network interface between the nodes (default: found).", "NAME"),
        Flag("--slurm", "", "Any other option of sbatch, or of the slurm target; repeatable.", "KEY=VALUE"),
    )
    VARIABLES: ClassVar[Mapping[str, str]] = {"CORRAL_PARTITION": "partition", "CORRAL_ACCOUNT": "account"}
    NODES_KNOWN: ClassVar[bool] = False

    given: SlurmOptions
    name: str = field(default="slurm", init=False)
    _allocation: Allocation | None = field(default=None, init=False)

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> SlurmTarget:
        return cls(SlurmOptions.read(options).facts())

    @classmethod
    def from_profile(cls, table: SlurmKeys, shared: Shared) -> dict[str, object]:
        return only_said({
            **vars(table),
            "modules": list(table.modules),
            "extra": dict(table.extra),
            "nodes": table.nodes or shared.hardware.nodes,
            "hardware": only_said(vars(shared.hardware)),
            "interface": shared.network.interface,
            "hca": shared.network.hca,
            "max_jobs": shared.limits.max_jobs,
            **vars(shared.storage),
        })  # fmt: skip

    @classmethod
    def count_nodes(cls, table: SlurmKeys) -> int | None:
        return table.nodes

    @classmethod
    def contradictions(cls, table: SlurmKeys, shared: Shared) -> Iterator[tuple[str, str, str]]:
        named = parse_gpus(shared.hardware.gpus) if shared.hardware.gpus else None
        if named and (table.gpus_per_node or 0) > named.gpus_per_node:
            said = f"slurm.gpus_per_node is {table.gpus_per_node}"
            yield "gpus_per_node", said, f"a node has {shared.hardware.gpus}"
        limit = shared.limits.max_time
        if limit and table.time and (commands.seconds(table.time) or 0) > (commands.seconds(limit) or 0):
            yield "time", f"slurm.time is {table.time}", f"limits.max_time is {limit}"

    @classmethod
    def size(cls, options: Mapping[str, Any]) -> Size:
        gpus = options.get("hardware", {}).get("gpus")
        per_node = number(options.get("gpus_per_node", parse_gpus(gpus).gpus_per_node if gpus else 0))
        return Size(
            number(options.get("nodes")) or 1, per_node, commands.seconds(str(options.get("time", "0"))) or 0.0
        )

    def options(self) -> dict[str, object]:
        said = {one.name: getattr(self.given, one.name) for one in fields(SlurmOptions)}
        defaults = SlurmOptions()
        return {name: to_json(value) for name, value in said.items() if value != getattr(defaults, name)}

    def prepare(self) -> list[str]:
        if shutil.which("srun"):
            refuse_unseen(home_dir(), self._where())
        return []

    def _where(self) -> list[str]:
        """The options that lead to the job's partition."""
        names = ("partition", "account", "qos", "reservation", "constraint")
        said = {name: str(getattr(self.given, name)) for name in names}
        return [f"--{name}={value}" for name, value in said.items() if value]

    # what is known before

    def nodes(self) -> tuple[Node, ...]:
        count = self.given.nodes or 1
        return tuple(Node(f"rank{rank}", f"@ADDRESS{rank}@", self._network(rank, count)) for rank in range(count))

    def _network(self, rank: int, count: int) -> dict[str, str]:
        """Named here, so that they also enter containers; their values are found on the nodes."""
        found = {"NCCL_IB_HCA": self.given.hca} if self.given.hca else {}
        if count > 1:
            if not self.given.hca:
                found |= {"NCCL_IB_HCA": f"=@HCA{rank}@", "NCCL_IB_DISABLE": "@NO_RDMA@"}
            found |= {"NCCL_SOCKET_IFNAME": f"=@INTERFACE{rank}@", "GLOO_SOCKET_IFNAME": f"@INTERFACE{rank}@"}
        return found

    def inventory(self) -> Inventory:
        return self._found().inventory

    def _found(self) -> Allocation:
        if self._allocation is None:
            self._allocation = find_allocation(self.given)
        return self._allocation

    def home(self) -> str:
        if not self.given.home:
            return str(home_dir())
        home = Path(os.path.expandvars(self.given.home)).expanduser()  # the file system is shared with the nodes
        if not home.is_absolute():
            raise UsageError(f"Corral's home on the nodes cannot be {self.given.home!r}.", "Give an absolute path.")
        return str(home)

    def node_folder(self, folder: DeploymentFolder, launch_id: str) -> DeploymentFolder:
        return folder

    def files(self) -> tuple[PlacedFile, ...]:
        return (PlacedFile("node/slurm_start.py", "slurm_start.py"),)

    def verify(self, checks: Sequence[NodeCheck]) -> None:
        """The nodes are known only once the job runs; but what lies on the shared file system can be asked here."""
        for check in checks:
            if not check.details.get("shared"):
                continue
            try:
                done = run(check.argv, timeout_s=check.timeout_s)
            except CorralError:  # a program that only the nodes have
                continue
            if done.code == 1 and check.details["refusal"] in done.last_line:
                raise EngineError(f"{check.what}: {done.last_line}", check.remedy)
        if any(check.light for check in checks):
            refuse_lacking(checks, self._where())

    def default_bind(self, expose: bool = False) -> str:
        return "0.0.0.0"  # noqa: S104 - users sit on the login node; every path needs the key

    def choose_ports(self, bind: str, wanted: int | None, avoid: Collection[int] = ()) -> ChosenPorts:
        return ChosenPorts(Ports(wanted or 0))

    def base_url(self, bind: str, ports: Ports) -> str:
        return ""

    def place(self, path: Path, progress: Progress) -> str:
        return str(path)  # the file system is shared

    def forward(self, folder: DeploymentFolder) -> Forward | None:
        return None

    # the queue's own (targets.base.Queue)

    def sizes(self) -> tuple[int, ...]:
        return () if self.given.nodes else SIZES

    def resized(self, nodes: int) -> SlurmTarget:
        return SlurmTarget(replace(self.given, nodes=nodes))

    def time_s(self) -> float | None:
        """How long the job may run: as asked, or as the partition gives, or four hours where it gives no end."""
        partition = self._found().partition
        if self.given.time_s:
            return self.given.time_s
        if partition and partition.default_time_s:
            return partition.default_time_s
        limit = partition.max_time_s if partition else None
        return min(limit, DEFAULT_TIME_S) if limit else DEFAULT_TIME_S

    def check(self, plan: Plan) -> None:
        time_s, partition = self.time_s() or 0.0, self._found().partition
        if partition and partition.max_time_s and time_s > partition.max_time_s:
            most = _words(partition.max_time_s)
            raise DoesNotFitError(
                f"partition {partition.name} gives a job {most}, and {_words(time_s)} were requested.",
                "Ask for less with --time, or name another --partition.",
            )
        if partition and partition.max_nodes and (self.given.nodes or 1) > partition.max_nodes:
            raise DoesNotFitError(
                f"partition {partition.name} gives a job {partition.max_nodes} nodes, not {self.given.nodes}.",
                "Ask for fewer with --nodes, or name another --partition.",
            )
        load_s = plan.speed.load_s or 0.0
        if load_s + self.given.signal_s >= time_s:
            raise DoesNotFitError(
                f"loading takes about {_words(load_s)}, and the job has {_words(time_s)}, of which the last "
                f"{_words(self.given.signal_s)} are for draining: it would end before it answers.",
                "Ask for more with --time.",
                load_s=load_s,
                time_s=time_s,
            )

        if shutil.which("sbatch"):  # a dry run from a profile's facts needs no cluster
            with contextlib.suppress(UnreachableError):
                commands.refuse_unknown(batch_script(self._job("test", "test", "/nonexistent")))

    def script(self, spec: LaunchSpec, folder: DeploymentFolder) -> str:
        title = f"{spec.model} with vLLM {spec.engine} on {self._found().inventory.label}"
        return batch_script(self._job(spec.deployment, title, str(folder.path)))

    def _job(self, deployment: str, title: str, folder: str) -> BatchJob:
        given, found = self.given, self._found()
        inventory, shape = found.inventory, found.shape
        gpus = inventory.gpus_per_node if inventory.gpu else 0
        whole = given.exclusive or shape is None or not gpus or gpus == shape.gpus
        cpus = given.cpus_per_task or (inventory.cpu_cores if shape else None)
        mem = given.mem or ("" if shape is None else "0" if whole else f"{inventory.host_memory_bytes >> 20}M")
        return BatchJob(
            deployment=deployment,
            title=title,
            folder=folder,
            nodes=given.nodes or 1,
            partition=given.partition or (found.partition.name if found.partition else ""),
            account=given.account,
            qos=given.qos,
            reservation=given.reservation,
            constraint=given.constraint,
            gpus_per_node=gpus,
            cpus_per_task=cpus,
            mem=mem,
            exclusive=given.exclusive,
            time_s=self.time_s(),
            signal_s=given.signal_s,
            requeue=given.requeue,
            job_name=given.job_name,
            output=given.output,
            error=given.error,
            modules=given.modules,
            python=given.python,
            runner=given.runner,
            extra=given.extra,
            renewer=_renewer(deployment) if given.renew else "",
        )

    # the job

    def start(self, spec: LaunchSpec, folder: DeploymentFolder) -> None:
        make_private_dir(folder.node_files)
        for file in spec.files:
            write_atomic(folder.node_files / file.name, bundle(file.resource))
        for rank in spec.ranks:
            make_private_dir(folder.rank(rank.rank).path)
        for path, text in self.templates(spec, folder).items():
            write_atomic(path, text)
        write_atomic(folder.script, spec.script or self.script(spec, folder), 0o700)
        id = commands.submit(folder.script)
        try:
            write_atomic(folder.job, dump_json(Submitted(id, time.time(), self.time_s())))
        except BaseException:  # a job that nobody knows of could never be stopped again
            folder.job.unlink(missing_ok=True)
            commands.cancel(id)
            raise

    def templates(self, spec: LaunchSpec, folder: DeploymentFolder) -> dict[Path, str]:
        return {
            folder.rank(rank.rank).template: dump_json(
                {**agent_spec(spec, rank, folder), "interface": self.given.interface}
            )
            for rank in spec.ranks
        }

    def job_of(self, folder: DeploymentFolder) -> str:
        """The number of the deployment's job."""
        submitted = submitted_job(folder)
        return submitted.id if submitted else ""

    def hand_on(self, folder: DeploymentFolder, current: str) -> str:
        """Submit the same job once more, to start when the current one is over; its number."""
        id = commands.submit(folder.script, f"--dependency=afterany:{current}")
        write_atomic(folder.job, dump_json(Submitted(id, time.time(), self.given.time_s)))
        return id

    def with_renewal(self, options: Mapping[str, object]) -> dict[str, object]:
        return {**options, "renew": True}

    def with_runner(self, options: Mapping[str, object], runner: Sequence[str]) -> dict[str, object]:
        return {"requeue": True, **options, "runner": list(runner)}

    def own_job(self, environ: Mapping[str, str]) -> OwnJob:
        id = environ.get("SLURM_JOB_ID", "")
        return OwnJob(id, f"{id}.{environ.get('SLURM_RESTART_COUNT', '0')}")

    def is_placed(self, folder: DeploymentFolder, own: OwnJob) -> bool:
        with contextlib.suppress(CorralError, OSError):
            meeting: dict[str, Any] = load_json(dict, folder.path / "rendezvous.json")
            return bool(meeting.get("attempt") == own.attempt)
        return False

    def job_status(self, id: str) -> JobStatus:
        try:
            job = commands.find_job(id)
        except CorralError as error:  # it cannot be asked: nothing is known, and nothing has failed
            return JobStatus(JobState.UNKNOWN, error.message, error.remedy, None)
        if job is None:
            text = f"job {id} is over, and SLURM no longer knows how it ended"
            return JobStatus(JobState.STOPPED, text, ended=True, reason=Reason.JOB_FORGOTTEN)
        if job.state == "COMPLETED":
            return JobStatus(JobState.STOPPED, f"job {id} has ended", ended=True)
        if job.state == "RUNNING":
            return JobStatus(JobState.RUNNING, f"job {id} runs on {job.nodes}")
        said = standing(job)
        waiting = said.state is State.QUEUED
        return JobStatus(JobState(said.state), said.text, said.remedy, said.ended, waiting, said.reason)

    def cancel_job(self, id: str) -> None:
        commands.cancel(id)

    def refresh(self, folder: DeploymentFolder) -> None:
        pass  # the agents write into this very folder

    def agents(self, folder: DeploymentFolder) -> AgentsStatus:
        submitted = submitted_job(folder)
        if submitted is None:
            return AgentsStatus(False)
        try:
            job = look(folder, submitted)
        except CorralError as error:
            return unasked(folder, submitted, error)
        if job is None:
            return forgotten(submitted)
        if job != submitted.last and (submitted.last is None or job.state != submitted.last.state):
            with contextlib.suppress(OSError):
                write_atomic(folder.job, dump_json(replace(submitted, last=job)))
                if standing(job).ended:
                    clear_up(folder, job)
        return agents_of(folder, submitted, job, own_output=bool(self.given.output))

    def lease(self, folder: DeploymentFolder) -> Lease | None:
        submitted = submitted_job(folder)
        job = look(folder, submitted) if submitted else None
        if submitted is None or job is None:
            return None
        if standing(job).state is State.QUEUED:  # what SLURM expects is no promise
            return Lease(submitted.submitted_s)
        ends_s = job.end_s or (job.start_s + submitted.time_s if job.start_s and submitted.time_s else None)
        drains_s = ends_s - self.given.signal_s - SIGNAL_EARLY_S if ends_s else None
        return Lease(submitted.submitted_s, job.start_s, drains_s)

    def stop(self, folder: DeploymentFolder, launch_id: str, grace_s: float) -> bool:
        submitted = submitted_job(folder)
        if submitted is None:
            return True
        for rank in folder.ranks():
            rank.stop.touch(mode=0o600)
        job = look(folder, submitted, commands.PATIENCE_S)
        if job is None or standing(job).ended:
            return True
        write_atomic(folder.job, dump_json(replace(submitted, stop_asked=True)))

        def lost() -> bool:
            return has_lost_a_node(folder, job)

        if standing(job).state is not State.QUEUED and not lost():  # the agents take their engines down and say so
            commands.cancel(submitted.id, "TERM")
            if is_over(submitted.id, grace_s + 20, lost):
                return True
        commands.cancel(submitted.id)
        if is_over(submitted.id, LOST_PATIENCE_S if lost() else END_PATIENCE_S):
            return True
        if lost():
            raise _not_ended(job)
        return False


def _not_ended(job: SlurmJob) -> UnreachableError:
    return UnreachableError(
        f"job {job.id} on {job.nodes} is cancelled, but a node does not answer, so what runs there may go on.",
        "All else was stopped; an agent that is cut off ends its engine by itself within seconds, and SLURM ends the"
        " job when the node is back or given up. Run the same `corral down` again then.",
    )


def _renewer(deployment: str) -> str:
    """The command that submits what follows a job; the nodes share this machine's files, and so this Python."""
    home = f"CORRAL_HOME={shlex.quote(str(home_dir()))}"
    return f"{home} {shlex.join([sys.executable, '-m', 'corral', 'renew', deployment])}"


def _words(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
