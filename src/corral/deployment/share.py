"""A part of the machines that several deployments share: which nodes, and which GPUs or cores of each."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NodeShare"]


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
