"""What the server was asked, kept: a line of counters every few minutes, for whoever wants to know the last hour.

What the agent needs of the engine's metrics page, by the rules of Corral's own `client/metrics`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Dict

from ..exposition import load_figures, samples

EVERY_S = 300.0
MOST_BYTES = 4 << 20  # some weeks; then the older half goes


class LoadLog:
    """Appends to one file; a full disk loses lines, and nothing else."""

    def __init__(self, path: str) -> None:
        self._path, self._noted = path, float("-inf")

    def note(self, page: bytes, own: int) -> None:
        """Keep what a metrics page says, unless a line is young; `own` are the agent's own requests among them."""
        now = time.monotonic()
        if not self._path or now - self._noted < EVERY_S:
            return
        self._noted = now
        line = dict(load_figures(page), t=round(time.time(), 1), own=own)
        with contextlib.suppress(OSError):
            self._cut()
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                file.write((json.dumps(line) + "\n").encode())

    def _cut(self) -> None:
        """Leave the newer half of a file that has grown too long."""
        if not os.path.exists(self._path) or os.path.getsize(self._path) < MOST_BYTES:
            return
        with open(self._path, "rb") as file:
            file.seek(-(MOST_BYTES // 2), os.SEEK_END)
            kept = file.read().partition(b"\n")[2]
        with open(self._path, "wb") as file:
            file.write(kept)


SUMS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
}
KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the second: before 0.10


def figures(page: bytes) -> Dict[str, float]:
    """Counts and tokens added up over the engines, the mean of their KV use; what the page lacks is absent."""
    found = {(one.name, one.label_text): one.value for one in samples(page, (*SUMS, *KV_USE)) if one.value >= 0}
    sums: Dict[str, float] = {}
    for (series, _), value in found.items():
        if series in SUMS:
            sums[SUMS[series]] = sums.get(SUMS[series], 0.0) + value
    for wanted in KV_USE:
        uses = [value for (series, _), value in found.items() if series == wanted]
        if uses and "kv_use" not in sums:
            sums["kv_use"] = sum(uses) / len(uses)
    return sums
