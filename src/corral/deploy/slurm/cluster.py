"""What a SLURM cluster has: partitions, the shapes of their nodes, kinds of GPU, limits, what is idle now.

Read from `scontrol show partition` and `scontrol show node`, whose text form is the same in every version.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from corral.base.errors import DoesNotFitError, NotFoundError, UsageError
from corral.base.record import nearest
from corral.base.wording import time_limit_s
from corral.deploy.slurm.commands import LOGIN_NODE, ask
from corral.plan.hardware.inventory import GIB, Gpu, Inventory, find_gpu

MIB = 1 << 20
# a node in one of these states starts no job, now or soon
CLOSED = ("DOWN", "DRAIN", "FAIL", "INVAL", "MAINT", "NOT_RESPONDING", "POWERING_DOWN", "UNKNOWN", "FUTURE")


@dataclass(frozen=True)
class NodeShape:
    """Equal nodes of a partition, counted."""

    gpu: str  # as GRES names it; empty without GPUs, or where GRES has no types
    gpus: int  # per node
    cpus: int
    memory_mib: int
    features: tuple[str, ...]
    nodes: int = 0
    usable_nodes: int = 0  # not down, not drained
    idle_nodes: int = 0
    idle_gpus: int = 0  # also on nodes that are partly in use


@dataclass(frozen=True)
class Partition:
    name: str
    default: bool
    open: bool
    max_time_s: float | None  # None: no limit
    default_time_s: float | None
    max_nodes: int | None
    accounts: tuple[str, ...]  # allowed; empty: all
    shapes: tuple[NodeShape, ...]  # most nodes first

    @property
    def gpus(self) -> int:
        return sum(shape.gpus * shape.nodes for shape in self.shapes)

    @property
    def idle_gpus(self) -> int:
        return sum(shape.idle_gpus for shape in self.shapes)


@dataclass(frozen=True)
class Want:
    """The nodes that a job asks for; Corral chooses what is empty."""

    partition: str = ""
    gpus_per_node: int | None = None  # 0: CPUs only
    gpu: str = ""  # kind of GPU, where GRES does not say it or nodes differ
    gpu_memory_gib: float | None = None
    constraint: str = ""
    nodes: int = 1
    cpus_per_task: int | None = None
    memory_mib: int | None = None
    link: str = "ib-ndr"


@dataclass(frozen=True)
class Cluster:
    partitions: tuple[Partition, ...]

    def partition(self, name: str, gpus: bool = True) -> Partition:
        """The partition of that name; without one SLURM's default, unless only others have GPUs."""
        if name:
            for partition in self.partitions:
                if partition.name == name:
                    return partition
            names = [partition.name for partition in self.partitions]
            guesses = nearest(name, names) or names
            raise NotFoundError(f"there is no partition {name!r}.", f"Known: {', '.join(guesses)}.")
        return self._ranked(gpus)[0]

    def _ranked(self, gpus: bool) -> list[Partition]:
        """All partitions, the most likely choice first."""
        if not self.partitions:
            raise NotFoundError(
                "you do not have access to any partition of this cluster.", "`sinfo` lists them; ask for access."
            )

        def rank(one: Partition) -> tuple[bool, bool, bool, int]:
            return one.open, not gpus or one.gpus > 0, one.default, one.idle_gpus

        return sorted(self.partitions, key=rank, reverse=True)

    def shape(self, want: Want) -> tuple[Partition, NodeShape]:
        """The partition and its nodes that fit; without a name, the first partition that has such nodes."""
        if want.partition:
            return _shape(self.partition(want.partition), want)
        refusals = []
        for partition in self._ranked(want.gpus_per_node != 0):
            try:
                return _shape(partition, want)
            except DoesNotFitError as error:
                refusals.append(error)
        raise refusals[0]

    def inventory(self, want: Want) -> tuple[Partition, NodeShape, Inventory]:
        """The hardware that a plan may use, on the nodes that fit."""
        partition, shape = self.shape(want)
        gpus = shape.gpus if want.gpus_per_node is None else want.gpus_per_node
        share = gpus / shape.gpus if gpus and shape.gpus else 1.0
        cores = want.cpus_per_task or max(1, int(shape.cpus * share))
        memory = (want.memory_mib or int(shape.memory_mib * share)) * MIB
        note = shortage(partition, shape, want)
        base = Inventory(None, 1, want.nodes, 0, cores, memory, memory, want.link, "slurm", note=note)
        if not gpus:
            return partition, shape, base
        kind, gpu_bytes = gpu_of(want.gpu or shape.gpu, want.gpu_memory_gib, partition.name)
        return partition, shape, replace(base, gpu=kind, gpus_per_node=gpus, memory_bytes_per_gpu=gpu_bytes)


def _shape(partition: Partition, want: Want) -> tuple[Partition, NodeShape]:
    """The nodes of a partition that fit, those that are free first."""
    fitting = [shape for shape in partition.shapes if _fits(shape, want)]
    if not fitting:
        has = "; ".join(_label(shape) for shape in partition.shapes) or "no nodes"
        raise DoesNotFitError(
            f"partition {partition.name} has no node with {_wanted(want)}; it has {has}.",
            "`corral slurm partitions` shows all of them.",
        )
    enough = [shape for shape in [*fitting, *_alike(fitting)] if shape.nodes >= want.nodes]
    if not enough:
        most = max(shape.nodes for shape in [*fitting, *_alike(fitting)])
        raise DoesNotFitError(
            f"partition {partition.name} has {most} node{'s' * (most != 1)} with {_wanted(want)}; "
            f"{want.nodes} were requested.",
            "Ask for fewer with --nodes, or name another --partition.",
        )

    def rank(one: NodeShape) -> tuple[bool, bool, bool, int, int]:
        return one.gpus > 0, one.usable_nodes >= want.nodes, one.idle_nodes >= want.nodes, one.gpus, one.usable_nodes

    return partition, max(enough, key=rank)


def _alike(shapes: list[NodeShape]) -> list[NodeShape]:
    """Nodes with the same GPUs as one group with the least of their CPUs and memory: one job may mix them."""
    groups: dict[tuple[str, int], list[NodeShape]] = {}
    for shape in shapes:
        groups.setdefault((shape.gpu, shape.gpus), []).append(shape)
    return [reduce(_together, group) for group in groups.values() if len(group) > 1]


def _together(one: NodeShape, other: NodeShape) -> NodeShape:
    return NodeShape(
        one.gpu, one.gpus, min(one.cpus, other.cpus), min(one.memory_mib, other.memory_mib),
        tuple(feature for feature in one.features if feature in other.features),
        one.nodes + other.nodes, one.usable_nodes + other.usable_nodes,
        one.idle_nodes + other.idle_nodes, one.idle_gpus + other.idle_gpus,
    )  # fmt: skip


def shortage(partition: Partition, shape: NodeShape, want: Want) -> str:
    """A note that a job will wait for nodes that are down or drained; empty when enough are up."""
    if shape.usable_nodes >= want.nodes:
        return ""
    return (
        f"partition {partition.name} has {shape.usable_nodes} of {shape.nodes} such nodes up, and {want.nodes} were "
        "requested: the job waits in the queue until the others are back (`sinfo -R` says why they are not)"
    )


def gpu_of(name: str, memory_gib: float | None, partition: str) -> tuple[str, int]:
    """The kind and memory of the GPU that GRES, or the user, calls so."""
    known = _known(name)
    if known and not memory_gib:
        return known.kind, known.memory_bytes
    if memory_gib:
        return gpu_kind(name), int(memory_gib * GIB)
    problem = f"calls its GPUs {name!r}, which Corral does not know" if name else "does not say which GPUs it has"
    raise UsageError(
        f"partition {partition} {problem}.",
        "Name the kind (--slurm gpu=H100) or its memory (--slurm gpu_memory_gib=80).",
    )


def gpu_kind(name: str) -> str:
    """The kind of GPU that GRES calls so, for people."""
    known = _known(name)
    return known.kind if known else name or "GPU"


def _known(name: str) -> Gpu | None:
    """By type (`h100`), or by the name that SLURM's autodetection makes of the driver's: nvidia_h100_80gb_hbm3."""
    for form in (name, name.replace("_", " "), name.replace("_", "-"), name.replace("nvidia_", "")):
        try:
            return find_gpu(form)
        except UsageError:
            continue
    return None


def _fits(shape: NodeShape, want: Want) -> bool:
    if want.gpus_per_node and shape.gpus < want.gpus_per_node:
        return False
    if want.gpu and shape.gpu and (want.gpus_per_node is None or want.gpus_per_node):
        wanted, has = _known(want.gpu), _known(shape.gpu)
        if want.gpu.lower() != shape.gpu.lower() and has is not None and wanted != has:
            return False  # where GRES has a name of its own for it, the user's name counts
    plain = re.fullmatch(r"[\w.-]+", want.constraint)
    if plain and want.constraint not in shape.features:
        return False
    return shape.cpus >= (want.cpus_per_task or 1) and shape.memory_mib >= (want.memory_mib or 0)


def _wanted(want: Want) -> str:
    parts = [f"{want.gpus_per_node or ''} {want.gpu or 'GPUs'}".strip()] if want.gpus_per_node or want.gpu else []
    parts += [f"feature {want.constraint}"] if want.constraint else []
    parts += [f"{want.cpus_per_task} CPUs"] if want.cpus_per_task else []
    parts += [f"{want.memory_mib} MiB"] if want.memory_mib else []
    return ", ".join(parts) or "anything"


def _label(shape: NodeShape) -> str:
    gpus = f"{shape.gpus} × {shape.gpu or 'GPU'}, " if shape.gpus else ""
    return f"{shape.nodes} × ({gpus}{shape.cpus} CPUs, {shape.memory_mib / 1024:.0f} GiB)"


# ------------------------------------------------------------------------------------------------------------ reading
def discover() -> Cluster:
    """Ask SLURM what it has."""
    partitions = ask(["scontrol", "--oneliner", "show", "partition"]).or_raise(
        "SLURM's partitions could not be read", LOGIN_NODE
    )
    nodes = ask(["scontrol", "--oneliner", "--detail", "show", "node"]).or_raise(
        "SLURM's nodes could not be read", LOGIN_NODE
    )
    return read_cluster(partitions.stdout, nodes.stdout)


def read_cluster(partitions: str, nodes: str) -> Cluster:
    """The cluster from what `scontrol` printed."""
    rows = [_fields(line) for line in nodes.splitlines() if line.startswith("NodeName=")]
    read = []
    for line in partitions.splitlines():
        if line.startswith("PartitionName="):
            values = _fields(line)
            name = values["PartitionName"]
            members = [row for row in rows if name in row.get("Partitions", "").split(",")]
            read.append(_partition(values, members))
    return Cluster(tuple(read))


def _fields(line: str) -> dict[str, str]:
    """`A=b C=d e F=g` as a table; values may hold spaces and equals signs."""
    return {match[1]: match[2].strip() for match in re.finditer(r"(\S+?)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", line)}


def _partition(values: dict[str, str], members: list[dict[str, str]]) -> Partition:
    accounts = values.get("AllowAccounts", "ALL")
    most = values.get("MaxNodes", "UNLIMITED")
    return Partition(
        name=values["PartitionName"],
        default=values.get("Default") == "YES",
        open=values.get("State", "UP") == "UP",
        max_time_s=time_limit_s(values.get("MaxTime", "")),
        default_time_s=time_limit_s(values.get("DefaultTime", "")),
        max_nodes=int(most) if most.isdigit() else None,
        accounts=() if accounts in ("ALL", "(null)") else tuple(accounts.split(",")),
        shapes=_shapes(members),
    )


def _shapes(members: list[dict[str, str]]) -> tuple[NodeShape, ...]:
    counts: dict[NodeShape, Counter[str]] = {}
    for row in members:
        kind, gpus = _gpus(row.get("Gres", ""))
        features = row.get("ActiveFeatures", "(null)")
        bare = NodeShape(
            kind, gpus, int(row.get("CPUTot", 0)), int(row.get("RealMemory", 0)),
            () if features == "(null)" else tuple(sorted(features.split(","))),
        )  # fmt: skip
        state = row.get("State", "UNKNOWN").upper()
        usable = not any(closed in state for closed in CLOSED)
        idle = usable and state.startswith("IDLE")
        used = _gpus(row.get("GresUsed", ""))[1]
        counts.setdefault(bare, Counter()).update(
            nodes=1,
            usable_nodes=int(usable),  # a Counter would keep the bool of a single node
            idle_nodes=int(idle),
            idle_gpus=max(0, gpus - used) if usable else 0,
        )
    shapes = [replace(bare, **dict[str, Any](count)) for bare, count in counts.items()]
    return tuple(sorted(shapes, key=lambda shape: -shape.nodes))


def _gpus(gres: str) -> tuple[str, int]:
    """(type, count) from `gpu:h100:4(S:0-1),other:2`; types of one node are added up under the first."""
    kind, total = "", 0
    plain = re.sub(r"\([^)]*\)", "", gres)
    for entry in plain.split(","):
        parts = entry.split(":")
        if parts[0] == "gpu":
            total += int(parts[-1]) if parts[-1].isdigit() else 1
            kind = kind or (parts[1] if len(parts) > 1 and not parts[1].isdigit() else "")
    return kind, total
