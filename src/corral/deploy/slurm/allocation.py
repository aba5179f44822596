"""Where a job will run, as far as it is known before: what the cluster has, or a profile's facts held against it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from corral.base.errors import CorralError
from corral.deploy.slurm.cluster import Cluster, NodeShape, Partition, discover, gpu_of, shortage
from corral.deploy.slurm.options import SlurmOptions
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
