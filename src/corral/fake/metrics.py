"""The fake server's counters, their Prometheus text under vLLM's names, and its log of true times (lines: see `app`).

The inter-token histogram counts each request's mean as often as it had gaps: its sum and count are exact.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path

TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
         80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LATENCY_BOUNDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                  480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
LENGTH_BOUNDS = tuple(float(m * 10**e) for e in range(5) for m in (1, 2, 5))  # as vLLM's, up to the context


class Histogram:
    """Counts by bucket, with their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str, headed: bool = True) -> list[str]:
        total, lines = 0, [f"# HELP {name} {name}", f"# TYPE {name} histogram"] if headed else []
        for bound, count in zip([*map(repr, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {float(total)}')
        return [*lines, f"{name}_count{{{labels}}} {float(total)}", f"{name}_sum{{{labels}}} {self.sum}"]


@dataclass(slots=True)
class Metrics:
    """Counts since the server started."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    success: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS))
    itl: Histogram = field(default_factory=lambda: Histogram(_ITL))
    e2e: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    queue: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    prompts: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    outputs: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))

    def text(self, model: str, gauges: dict[str, float], preemptions: int, cache: dict[str, str]) -> str:
        """The page that `/metrics` serves."""
        name = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        labels = f'engine="0",model_name="{name}"'
        lines: list[str] = []
        for name, value in gauges.items():
            lines += [f"# HELP vllm:{name} {name}", f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{labels}}} {value}"]
        counters = {
            "prefix_cache_queries": self.prefix_queries,
            "prefix_cache_hits": self.prefix_hits,
            "num_preemptions": preemptions,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
        }
        for name, count in counters.items():
            full = f"vllm:{name}_total"
            lines += [f"# HELP {full} {name}", f"# TYPE {full} counter", f"{full}{{{labels}}} {float(count)}"]
        lines += ["# HELP vllm:request_success_total finished", "# TYPE vllm:request_success_total counter"]
        for reason, count in self.success.items():
            lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(count)}')
        lines += self.ttft.lines("vllm:time_to_first_token_seconds", labels)
        lines += self.itl.lines("vllm:inter_token_latency_seconds", labels)
        lines += self.e2e.lines("vllm:e2e_request_latency_seconds", labels)
        lines += self.queue.lines("vllm:request_queue_time_seconds", labels)
        lines += self.prompts.lines("vllm:request_prompt_tokens", labels)
        lines += self.outputs.lines("vllm:request_generation_tokens", labels)
        info = ",".join(f'{k}="{v}"' for k, v in cache.items())
        lines += ["# HELP vllm:cache_config_info cache", "# TYPE vllm:cache_config_info gauge"]
        lines.append(f"vllm:cache_config_info{{{info}}} 1.0")
        return "\n".join(lines) + "\n"


class TruthLog:
    """Appends lines to a file in blocks, so that a logged request costs little."""

    def __init__(self, path: Path | None) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path else -1
        self._lines: list[bytes] = []

    @property
    def wanted(self) -> bool:
        return self._fd >= 0

    def add(self, line: bytes) -> None:
        self._lines.append(line)
        if len(self._lines) >= 512:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            os.write(self._fd, b"".join(self._lines))
            self._lines.clear()

    def close(self) -> None:
        self.flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
