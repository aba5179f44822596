"""Looking at this machine: GPUs through NVML or `nvidia-smi`, cores and memory with cgroup limits applied.

Quick by design (a few milliseconds without a GPU): nothing is imported or started that the machine does not have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SHARE = 0.995  # NVML counts memory the driver keeps; the total CUDA reports is less (H200: 0.43%, H100: 0.6%)


@dataclass(frozen=True)
class Seen:
    """The GPUs of this machine; the smallest memory where they differ."""

    name: str
    count: int
    memory_bytes: int
    driver: str


def gpu_facts() -> Seen | None:
    """The GPUs this process may use, or None."""
    if not (Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi")):
        return None
    seen = _from_nvml() or _from_smi()
    if seen is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return seen
    count = len([v for v in visible.split(",") if v.strip() not in ("", "-1")])
    return Seen(seen.name, min(count, seen.count), seen.memory_bytes, seen.driver) if count else None


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _from_nvml() -> Seen | None:
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            if not handles:
                return None
            smallest = min(int(pynvml.nvmlDeviceGetMemoryInfo(h).total) for h in handles)
            name = _text(pynvml.nvmlDeviceGetName(handles[0]))
            driver = _text(pynvml.nvmlSystemGetDriverVersion())
            return Seen(name, len(handles), int(smallest * _SHARE), driver)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _from_smi() -> Seen | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 3 and row[1].isdigit()]
    if done.returncode != 0 or not rows:
        return None
    smallest = min(int(row[1]) for row in rows)
    return Seen(rows[0][0], len(rows), int((smallest << 20) * _SHARE), rows[0][2])


def cpu_facts(root: Path = Path("/")) -> tuple[int, int, int]:
    """Usable cores, memory in bytes, and what of it is free, as the cgroup of this process allows."""
    return _cores(root), *_memory(root)


def _cores(root: Path) -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _quota(root)
    return max(1, min(allowed, quota)) if quota else allowed


def _quota(root: Path) -> int | None:
    words = _read(root / "sys/fs/cgroup/cpu.max").split()
    if len(words) == 2 and words[0].isdigit():
        return -(-int(words[0]) // int(words[1]))
    old = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip()
    period = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").strip()
    return -(-int(old) // int(period)) if old.isdigit() and period.isdigit() else None


def _memory(root: Path) -> tuple[int, int]:
    lines = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    info = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) >= 2 and words[1].isdigit()}
    total = info.get("MemTotal", 0)
    available = info.get("MemAvailable", info.get("MemFree", 0))
    for limit_file, used_file in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, used = _read(root / limit_file).strip(), _read(root / used_file).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < total:
            total = int(limit)
            available = min(available, max(0, int(limit) - int(used)))
    return total, available


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
