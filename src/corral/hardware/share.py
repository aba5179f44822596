"""What of a machine is left to a deployment that shares it with others."""

from __future__ import annotations

from dataclasses import replace

from corral.deployment.share import NodeShare
from corral.hardware.inventory import Inventory

__all__ = ["within"]


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
