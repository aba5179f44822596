"""Where a job will run, as far as it is known before: what the cluster has, or a profile's facts held against it.

Whether the runtime is there, before a job waits in the queue for hours: asked in the cheapest way that answers.

First on the login node, which costs a second: an environment on the shared file system answers there as it would on
a node. Where it does not answer, a node of the same partition is asked, with one processor and for two minutes at
most; such a job mostly starts at once. Where no node is to be had in a minute, the login node's word counts if it is
about the environment itself; that it lacks a command (conda, module) says nothing about the nodes.

Whether the nodes see Corral's home: jobs find their files there, and everything they say comes back through it.

A network file system is believed. Of any other kind a node is asked, once, whether it sees a file written here; where
no node is free to answer, the job's first line looks for its files, and its end tells.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corral.base.errors import CorralError, EngineError, UsageError
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
    """What can be had of it. Whatever says what nodes are like, what the cluster cannot give is refused."""
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
    """The cluster of this machine; None where there is none, or it does not answer: a profile can do without."""
    try:
        return discover()
    except CorralError:
        return None


def _stated(given: SlurmOptions) -> Inventory | None:
    """What a profile says of its nodes; None where it does not say enough."""
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
    """Raise what a check found; `where` are the options that lead to the partition of the job."""
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
            raise EngineError(f"{check.what}, asked on a node: {_words(there)}", check.remedy)
        if here is not None and here.code != NO_COMMAND:
            raise EngineError(f"{check.what}: {_words(here)}", check.remedy)


def _checked_here(check: NodeCheck) -> Completed | None:
    try:
        return run(check.light, HERE_S)
    except CorralError:
        return None


def on_a_node(argv: Sequence[str], where: Sequence[str], wait_s: int = WAIT_S) -> Completed | None:
    """What a command says on a node; None where none was to be had."""
    small = ["--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=1G", "--time=2", f"--immediate={wait_s}"]
    mark = ["sh", "-c", f'echo {REACHED}; exec "$@"', "corral-early", *argv]
    try:
        done = ask(["srun", "--quiet", "--job-name=corral-check", *small, *where, *mark], NODE_S)
    except CorralError:
        return None
    return done if REACHED in done.stdout else None


def _words(done: Completed) -> str:
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    said = [line for line in said if not line.startswith("srun: ")] or ["it said nothing"]
    return said[-1][:300]


NODE_SEES_HOME_WAIT_S = 5  # for a node to become free
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "panfs", "wekafs", "glusterfs", "orangefs", "afs", "cifs", "smb",
          "9p", "virtiofs", "fuse")  # fmt: skip
MARK = ".seen-by-the-nodes"
REMEDY = "Set CORRAL_HOME to a folder that login and compute nodes share, usually a home, project or scratch folder."


def refuse_unseen(home: Path, where: Sequence[str]) -> None:
    """Raise when a node says that it does not see the home; `where` are the options that lead to the partition."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (home / MARK).exists() or _kind(home).startswith(SHARED):
        return
    probe = home / f".probe-{secrets.token_hex(4)}"
    probe.touch(mode=0o600)
    try:
        said = on_a_node(["test", "-e", str(probe)], where, NODE_SEES_HOME_WAIT_S)
    finally:
        probe.unlink(missing_ok=True)
    if said is None:
        return
    if said.code:
        raise UsageError(f"the nodes do not see Corral's home {home}: a file written here is not there.", REMEDY)
    (home / MARK).touch(mode=0o600)


def _kind(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system that a path lies on; empty when nobody says."""
    found, longest = "", -1
    real = Path(os.path.realpath(path))
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines() if mounts.is_file() else ():
        point, kind = [*line.split(), "", "", ""][1:3]
        where = Path(point.replace("\\040", " "))
        if (where == real or where in real.parents) and len(where.parts) >= longest:
            found, longest = kind, len(where.parts)
    return found
