"""Checks before a job waits in the queue: what the cluster can give, whether the runtime and the home are on the
nodes.

The runtime is checked in the cheapest way that answers. First on the login node, which takes a second: an environment
on the shared file system answers there as it would on a node. Where that fails, a node of the same partition runs the
check, with one processor and for two minutes at most; such a job mostly starts at once. Where no node is free within
a minute, the login node's answer counts if it is about the environment itself; that the login node lacks a command
(conda, module) says nothing about the nodes.

Jobs find their files in Corral's home, and all their output comes back through it. A network file system is trusted.
For any other kind, a node is asked once whether it sees a file written here; where no node is free, the job's first
line checks for its files.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corral.base.errors import CorralError, EngineError, UsageError
from corral.base.files import make_dir
from corral.base.shell import Completed, run
from corral.deploy.slurm.cluster import Cluster, NodeShape, Partition, discover, gpu_of, shortage
from corral.deploy.slurm.commands import ask
from corral.deploy.slurm.options import SlurmOptions
from corral.engines.runtimes.base import NodeCheck
from corral.plan.hardware.inventory import GIB, Inventory


@dataclass(frozen=True)
class Allocation:
    """What a plan may use, and what limits the job."""

    inventory: Inventory
    partition: Partition | None = None  # None: facts of a profile, and SLURM could not be asked
    shape: NodeShape | None = None  # None: the profile says what nodes are like


def find_allocation(given: SlurmOptions) -> Allocation:
    """The hardware that the cluster or the profile names; refuses what the cluster cannot give."""
    stated = _stated(given)
    if stated is None:
        partition, shape, inventory = discover().inventory(given.want())
        return Allocation(inventory, partition, shape)
    cluster = _cluster_here()
    if cluster is None:
        return Allocation(stated)
    partition, shape = cluster.shape(given.want())
    return Allocation(replace(stated, note=shortage(partition, shape, given.want())), partition)


def _cluster_here() -> Cluster | None:
    """The cluster of this machine; None where there is none, or it does not answer: a profile does not need it."""
    try:
        return discover()
    except CorralError:
        return None


def _stated(given: SlurmOptions) -> Inventory | None:
    """The hardware that a profile names; None where it does not name enough."""
    if not (given.gpu and given.gpus_per_node):
        return None
    facts = given.hardware
    kind, gpu_bytes = gpu_of(given.gpu, given.gpu_memory_gib, given.partition or "of the profile")
    memory = int(float(facts.get("memory_gib", 0)) * GIB)
    cores = given.cpus_per_task or int(facts.get("cpu_cores", 0))
    nodes = given.nodes or 1
    return Inventory(kind, given.gpus_per_node, nodes, gpu_bytes, cores, memory, memory, given.link, "profile")


HERE_S = 60.0
WAIT_S = 60  # for a node to become free
NODE_S = 240.0
NO_COMMAND = 127
REACHED = "corral-reached-a-node"


def refuse_lacking(checks: Sequence[NodeCheck], where: Sequence[str]) -> None:
    """Refuse nodes that fail a check; `where` are the options that lead to the partition of the job."""
    for check in checks:
        if not check.light:
            continue
        here = _checked_here(check)
        if here is not None and here.code == 0:
            continue
        there = on_a_node(check.light, where)
        if there is not None and there.code == 0:
            continue
        if there is not None:
            raise EngineError(f"{check.what}, asked on a node: {_last_line(there)}", check.remedy)
        if here is not None and here.code != NO_COMMAND:
            raise EngineError(f"{check.what}: {_last_line(here)}", check.remedy)


def _checked_here(check: NodeCheck) -> Completed | None:
    try:
        return run(check.light, HERE_S)
    except CorralError:
        return None


def on_a_node(argv: Sequence[str], where: Sequence[str], wait_s: int = WAIT_S) -> Completed | None:
    """Run a command on a node; None where no node was free."""
    small = ["--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=1G", "--time=2", f"--immediate={wait_s}"]
    mark = ["sh", "-c", f'echo {REACHED}; exec "$@"', "corral-early", *argv]
    try:
        done = ask(["srun", "--quiet", "--job-name=corral-check", *small, *where, *mark], NODE_S)
    except CorralError:
        return None
    return done if REACHED in done.stdout else None


def _last_line(done: Completed) -> str:
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("srun: ")] or ["it said nothing"]
    return lines[-1][:300]


NODE_SEES_HOME_WAIT_S = 5  # for a node to become free
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "panfs", "wekafs", "glusterfs", "orangefs", "afs", "cifs", "smb",
          "9p", "virtiofs", "fuse")  # fmt: skip
MARK = ".seen-by-the-nodes"
REMEDY = "Set CORRAL_HOME to a folder that login and compute nodes share, usually a home, project or scratch folder."


def refuse_unseen(home: Path, where: Sequence[str]) -> None:
    """Raise when a node does not see the home; `where` are the options that lead to the partition."""
    make_dir(home)
    if (home / MARK).exists() or _kind(home).startswith(SHARED):
        return
    probe = home / f".probe-{secrets.token_hex(4)}"
    probe.touch(mode=0o600)
    try:
        done = on_a_node(["test", "-e", str(probe)], where, NODE_SEES_HOME_WAIT_S)
    finally:
        probe.unlink(missing_ok=True)
    if done is None:
        return
    if done.code:
        raise UsageError(f"the nodes do not see Corral's home {home}: a file written here is not there.", REMEDY)
    (home / MARK).touch(mode=0o600)


def _kind(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system that a path is on; empty when it is not known."""
    found, longest = "", -1
    real = Path(os.path.realpath(path))
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines() if mounts.is_file() else ():
        point, kind = [*line.split(), "", "", ""][1:3]
        where = Path(point.replace("\\040", " "))
        if (where == real or where in real.parents) and len(where.parts) >= longest:
            found, longest = kind, len(where.parts)
    return found
