"""Shared memory between ranks only where there is some.

vLLM 0.32 exchanges tensors through shared memory when all ranks of a group derive
the same name from their rendezvous address.  Under Ray they always do, also on
different hosts, where each then waits for ever in a segment of its own.  This
communicator also compares the memory itself: kernel, device and inode of
``/dev/shm``, which also differ between two containers on one machine.
"""

from __future__ import annotations

import os

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def shared_memory_identity() -> str:
    """Equal for processes that see one ``/dev/shm`` of one kernel."""
    shm = os.stat("/dev/shm")  # noqa: S108 (looked at, not written)
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {shm.st_dev} {shm.st_ino}"


class HostAwareCpuCommunicator(CpuCommunicator):
    """The stock communicator, which uses shared memory only between ranks that really share it."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        if not super()._all_group_ranks_share_shm_group_name():
            return False
        seen: list[str] = [""] * self.world_size
        torch.distributed.all_gather_object(seen, shared_memory_identity(), group=self.device_group)
        return len(set(seen)) == 1
