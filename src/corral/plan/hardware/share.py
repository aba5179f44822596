"""A part of the machines that several deployments share: which nodes, and which GPUs or cores of each.

What of a machine is left to a deployment that shares it with others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from corral.plan.hardware.inventory import Inventory


@dataclass(frozen=True)
class NodeShare:
    """What one of several deployments may use; what is left empty is not divided."""

    nodes: tuple[str, ...] = ()  # as the target names them
    gpus: tuple[int, ...] = ()  # by number, on each of its nodes
    cores: tuple[int, ...] = ()  # by number, of machines without GPUs
    memory_bytes: int = 0  # of the memory that was free when the machine was divided; 0: all

    def env(self) -> dict[str, str]:
        """What keeps an engine within its part of a machine."""
        if self.gpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))}
        if self.cores:
            return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.cores))}
        return {}


def within(inventory: Inventory, share: NodeShare) -> Inventory:
    """The inventory as a plan may use it: some of the GPUs, or some of the cores and of the memory."""
    if share.gpus:
        inventory = replace(inventory, gpus_per_node=len(share.gpus))
    if share.cores:
        inventory = replace(inventory, cpu_cores=len(share.cores))
    if share.memory_bytes and inventory.gpu is None:
        return replace(
            inventory,
            host_memory_bytes=min(inventory.host_memory_bytes, share.memory_bytes),
            host_available_bytes=min(inventory.host_available_bytes, share.memory_bytes),
        )
    return inventory
