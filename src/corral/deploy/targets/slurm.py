"""A SLURM cluster: one batch job per deployment, one agent per node, all files on the shared file system.

Which nodes there will be is known only once the job runs; until then addresses and ports are tokens, which
`node/slurm_start.py` replaces on the nodes. `slurm_job` follows the job once it is submitted.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from corral.base.errors import CorralError, DoesNotFitError, EngineError, UnreachableError, UsageError
from corral.base.files import write_atomic
from corral.base.home import home_dir
from corral.base.processes import OWN_COMMAND
from corral.base.record import dump_json, to_json
from corral.base.shell import run
from corral.base.wording import duration, time_limit_s, time_limit_text
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.launch.links import Node, Ports
from corral.deploy.launch.paste import as_batch
from corral.deploy.launch.render import LaunchSpec, PlacedFile, agent_spec
from corral.deploy.slurm import commands
from corral.deploy.slurm.options import SlurmOptions
from corral.deploy.slurm.preflight import Allocation, find_allocation, on_a_node, refuse_lacking, refuse_unseen
from corral.deploy.slurm.script import BatchJob, batch_script
from corral.deploy.targets.base import MISSING, ChosenPorts, Target, write_node_files
from corral.deploy.targets.keys import Flag, Shared, Size, at_least, key, number, one_word, only_set, time_limit
from corral.deploy.targets.slurm_job import SlurmJobs, Submitted, orphan_jobs, submit
from corral.plan.hardware.inventory import Inventory, parse_gpus

if TYPE_CHECKING:
    from corral.deploy.doctor.finding import Finding
    from corral.engines.runtimes.base import NodeCheck
    from corral.plan.contract import Plan


DEFAULT_TIME_S = 4 * 3600.0  # where neither the user nor the partition says how long
SIZES = (2, 3, 4, 8, 16)


def _sbatch(value: Mapping[str, object]) -> str:
    for name, item in value.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            return f"names of #SBATCH options without dashes in front; {name!r} is not one"
        if not isinstance(item, (str, int, bool)) or (isinstance(item, str) and not item.isprintable()):
            return f"text, numbers or true; {name} is {item!r}"
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
        "other #SBATCH options, passed on as they are", {}, _sbatch, {"mail-type": "END"}
    )


class SlurmTarget(SlurmJobs, Target):
    """Submits deployments to SLURM."""

    name = "slurm"
    TITLE = "SLURM"
    TABLE = SlurmKeys
    OPTIONS = SlurmOptions
    FLAGS = (
        Flag("--time", "time", "How long the job may run.", "H:MM:SS"),
        Flag("--account", "account", "The account it is charged to."),
        Flag("--partition", "partition", "The partition (default: the cluster's, or one with GPUs)."),
        Flag("--nodes", "nodes", "Nodes (default: as many as the model needs).", least=1),
        Flag("--interface", "interface", "Network interface between the nodes (default: found).", "NAME"),
        Flag("--slurm", "", "Any other option of sbatch, or of the slurm target; repeatable.", "KEY[=VALUE]"),
    )
    VARIABLES: ClassVar[Mapping[str, str]] = {"CORRAL_PARTITION": "partition", "CORRAL_ACCOUNT": "account"}
    NODES_KNOWN = False
    FILES = (PlacedFile("node/slurm_start.py", "slurm_start.py"),)

    def __init__(self, chosen: SlurmOptions) -> None:
        super().__init__(chosen)
        self._allocation: Allocation | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        return cls(SlurmOptions.read(options).facts())

    @classmethod
    def from_profile(cls, table: SlurmKeys, shared: Shared) -> dict[str, object]:
        return only_set({
            **vars(table),
            "modules": list(table.modules),
            "extra": dict(table.extra),
            "nodes": table.nodes or shared.hardware.nodes,
            "hardware": only_set(vars(shared.hardware)),
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
            text = f"slurm.gpus_per_node is {table.gpus_per_node}"
            yield "gpus_per_node", text, f"a node has {shared.hardware.gpus}"
        limit = shared.limits.max_time
        if limit and table.time and (time_limit_s(table.time) or 0) > (time_limit_s(limit) or 0):
            yield "time", f"slurm.time is {table.time}", f"limits.max_time is {limit}"

    @classmethod
    def size(cls, options: Mapping[str, Any]) -> Size:
        gpus = options.get("hardware", {}).get("gpus")
        per_node = number(options.get("gpus_per_node", parse_gpus(gpus).gpus_per_node if gpus else 0))
        return Size(number(options.get("nodes")) or 1, per_node, time_limit_s(str(options.get("time", "0"))) or 0.0)

    @classmethod
    def orphans(cls, owned: Collection[str]) -> Iterator[Finding]:
        return orphan_jobs(owned) if shutil.which("squeue") else iter(())

    def options(self) -> dict[str, object]:
        defaults = vars(SlurmOptions())
        return {name: to_json(value) for name, value in vars(self.chosen).items() if value != defaults[name]}

    def prepare(self) -> list[str]:
        if shutil.which("srun"):
            refuse_unseen(home_dir(), self._partition_options())
        return []

    def _partition_options(self) -> list[str]:
        """The options of `srun` that lead to the job's nodes."""
        names = ("partition", "account", "qos", "reservation", "constraint")
        return [f"--{name}={value}" for name in names if (value := getattr(self.chosen, name))]

    # what is known before

    def nodes(self) -> tuple[Node, ...]:
        count = self.chosen.nodes or 1
        return tuple(Node(f"rank{rank}", f"@ADDRESS{rank}@", self._network(rank, count)) for rank in range(count))

    def _network(self, rank: int, count: int) -> dict[str, str]:
        """Network variables by name, so that they also enter containers; their values are found on the nodes."""
        env = {"NCCL_IB_HCA": self.chosen.hca} if self.chosen.hca else {}
        if count > 1:
            if not self.chosen.hca:
                env |= {"NCCL_IB_HCA": f"=@HCA{rank}@", "NCCL_IB_DISABLE": "@NO_RDMA@"}
            env |= {"NCCL_SOCKET_IFNAME": f"=@INTERFACE{rank}@", "GLOO_SOCKET_IFNAME": f"@INTERFACE{rank}@"}
        return env

    def inventory(self) -> Inventory:
        return self._allocated().inventory

    def _allocated(self) -> Allocation:
        if self._allocation is None:
            self._allocation = find_allocation(self.chosen)
        return self._allocation

    def home(self) -> str:
        if not self.chosen.home:
            return str(home_dir())
        home = Path(os.path.expandvars(self.chosen.home)).expanduser()  # the file system is shared with the nodes
        if not home.is_absolute():
            raise UsageError(f"Corral's home on the nodes cannot be {self.chosen.home!r}.", "Give an absolute path.")
        return str(home)

    def missing(self, paths: Sequence[str]) -> dict[str, str]:
        """What this machine lacks, a node may have: it is asked where one is free."""
        lacking = list(super().missing(paths))
        if not lacking or not shutil.which("srun"):
            return {}
        done = on_a_node(["sh", "-c", MISSING, "corral-paths", *lacking], self._partition_options())
        return {path: "a node" for path in (done.stdout.splitlines() if done else ()) if path in lacking}

    def verify(self, checks: Sequence[NodeCheck]) -> None:
        """The nodes are known only once the job runs; what lies on the shared file system can be checked here."""
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
            refuse_lacking(checks, self._partition_options())

    def default_bind(self, expose: bool = False) -> str:
        return "0.0.0.0"  # noqa: S104 - users sit on the login node; every path needs the key

    def choose_ports(self, bind: str, wanted: int | None, avoid: Collection[int] = ()) -> ChosenPorts:
        return ChosenPorts(Ports(wanted or 0))

    def base_url(self, bind: str, ports: Ports) -> str:
        return ""

    # the job

    def larger(self) -> Iterator[SlurmTarget]:
        for nodes in () if self.chosen.nodes else SIZES:
            yield SlurmTarget(replace(self.chosen, nodes=nodes))

    def time_s(self) -> float:
        """How long the job may run: as requested, else the partition's default, else four hours or its limit."""
        partition = self._allocated().partition
        if self.chosen.time_s:
            return self.chosen.time_s
        if partition and partition.default_time_s:
            return partition.default_time_s
        limit = partition.max_time_s if partition else None
        return min(limit, DEFAULT_TIME_S) if limit else DEFAULT_TIME_S

    def check(self, plan: Plan) -> None:
        time_s, partition = self.time_s(), self._allocated().partition
        if partition and partition.max_time_s and time_s > partition.max_time_s:
            most = duration(partition.max_time_s)
            raise DoesNotFitError(
                f"partition {partition.name} gives a job {most}, and {duration(time_s)} were requested.",
                "Ask for less with --time, or name another --partition.",
            )
        if partition and partition.max_nodes and (self.chosen.nodes or 1) > partition.max_nodes:
            raise DoesNotFitError(
                f"partition {partition.name} gives a job {partition.max_nodes} nodes, not {self.chosen.nodes}.",
                "Ask for fewer with --nodes, or name another --partition.",
            )
        load_s = plan.speed.load_s or 0.0
        if load_s + self.chosen.signal_s >= time_s:
            raise DoesNotFitError(
                f"loading takes about {duration(load_s)}, and the job has {duration(time_s)}, of which the last "
                f"{duration(self.chosen.signal_s)} are for draining: it would end before it answers.",
                "Ask for more with --time.",
                load_s=load_s,
                time_s=time_s,
            )

        if shutil.which("sbatch"):  # a dry run from a profile's facts needs no cluster
            with contextlib.suppress(UnreachableError):
                commands.refuse_unknown(batch_script(self._job("test", "test", "/nonexistent")))

    def script(self, spec: LaunchSpec, folder: DeploymentFolder) -> str:
        title = f"{spec.model} with vLLM {spec.engine} on {self._allocated().inventory.label}"
        return batch_script(self._job(spec.deployment, title, str(folder.path)))

    def _job(self, deployment: str, title: str, folder: str) -> BatchJob:
        options, allocation = self.chosen, self._allocated()
        inventory, shape = allocation.inventory, allocation.shape
        gpus = inventory.gpus_per_node if inventory.gpu else 0
        whole = options.exclusive or shape is None or not gpus or gpus == shape.gpus
        memory = "" if shape is None else "0" if whole else f"{inventory.host_memory_bytes >> 20}M"
        settled = replace(
            options,
            partition=options.partition or (allocation.partition.name if allocation.partition else ""),
            gpus_per_node=gpus,
            cpus_per_task=options.cpus_per_task or (inventory.cpu_cores if shape else None),
            mem=options.mem or memory,
            time=time_limit_text(self.time_s()),
        )
        return BatchJob(deployment, title, folder, settled, _renewer(deployment, options), options.renew)

    def start(self, spec: LaunchSpec, folder: DeploymentFolder) -> None:
        write_node_files(spec, folder)
        for path, text in self._templates(spec, folder).items():
            write_atomic(path, text)
        write_atomic(folder.script, spec.script or self.script(spec, folder), 0o700)
        time_s = self.time_s()
        folder.started.touch(mode=0o600)  # from now on a job may be there, and SLURM is asked for it
        try:
            write_atomic(folder.job, dump_json(Submitted(submit(folder), time.time(), time_s)))
        except BaseException as error:
            refused = isinstance(error, CorralError) and error.details.get("queued") is False
            if refused or _cancelled(spec.launch_id):
                folder.job.unlink(missing_ok=True)
                folder.started.unlink(missing_ok=True)
            raise

    def paste(self, spec: LaunchSpec, folder: DeploymentFolder, first: Sequence[str]) -> str:
        return as_batch(spec, folder.script, self._templates(spec, folder), first)

    def _templates(self, spec: LaunchSpec, folder: DeploymentFolder) -> dict[Path, str]:
        """The agents' specs by file, one for each rank; tokens stand for what is found on the nodes."""
        return {
            folder.rank(rank.rank).template: dump_json(
                {**agent_spec(spec, rank, folder), "interface": self.chosen.interface}
            )
            for rank in spec.ranks
        }


def _cancelled(launch_id: str) -> bool:
    """Cancel whatever was queued for a launch; false where SLURM does not answer: then its record has to stay."""
    commands.forget_answers()
    try:
        for id in commands.jobs_of_launch(launch_id, None, commands.PATIENCE_S):
            commands.cancel(id)
    except CorralError:
        return False
    return True


def _renewer(deployment: str, options: SlurmOptions) -> str:
    """The command that submits the successor of a job, or that stands by as the keeper of its fleet.

    The nodes share this machine's file system, and so this Python.
    """
    home = f"CORRAL_HOME={shlex.quote(str(home_dir()))}"
    words = ["renew"] if options.renew else ["fleet", "keep", "--in-job"] if options.keeper else []
    return f"{home} {shlex.join([*OWN_COMMAND, *words, deployment])}" if words else ""
