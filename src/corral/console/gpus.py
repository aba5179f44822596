"""Power, memory and use of this machine's GPUs, where `nvidia-smi` can tell."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

FIELDS = "index,name,power.draw,memory.used,memory.total,utilization.gpu"
PATIENCE_S = 5.0
MOST = 64


@dataclass(frozen=True)
class GpuLoad:
    """One GPU now; None: it does not say."""

    index: int
    name: str
    power_w: float | None
    used_mib: float | None
    total_mib: float | None
    use: float | None  # 0 to 1


def read_gpus() -> list[GpuLoad]:
    """All GPUs of this machine; empty where there are none, or nobody can be asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus_load(done.stdout) if done.returncode == 0 else []


def parse_gpus_load(text: str) -> list[GpuLoad]:
    found = []
    for line in text.splitlines()[:MOST]:
        words = [word.strip() for word in line.split(",")]
        if len(words) == 6 and words[0].isdigit():
            power, used, total, use = map(_number, words[2:])
            share = None if use is None else use / 100
            found.append(GpuLoad(int(words[0]), words[1][:80], power, used, total, share))
    return found


def gpu_figures(gpus: Sequence[GpuLoad]) -> dict[str, float | None]:
    """Power (W) and memory (GiB) by name: of each GPU, and the mean and the largest of all."""
    found: dict[str, float | None] = {}
    read = {"power": [one.power_w for one in gpus], "memory": [_gib(one.used_mib) for one in gpus]}
    for figure, values in read.items():
        found |= {f"{figure} {one.index}": value for one, value in zip(gpus, values, strict=True)}
        known = [value for value in values if value is not None]
        found[f"{figure} mean"] = sum(known) / len(known) if known else None
        found[f"{figure} most"] = max(known, default=None)
    return found


def _gib(mib: float | None) -> float | None:
    return None if mib is None else mib / 1024


def _number(word: str) -> float | None:
    try:
        value = float(word)  # "[N/A]" where a GPU does not say
    except ValueError:
        return None
    return value if 0 <= value < 1e9 else None
