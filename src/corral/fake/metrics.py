"""The fake server's counters, their Prometheus text under vLLM's names, and its log of true times (lines: see `app`).

The inter-token histogram counts each request's mean as often as it had gaps: its sum and count are exact.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from corral.node.exposition import LATENCY_BOUNDS, TTFT_BOUNDS, Histogram, metric_lines

_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LENGTH_BOUNDS = tuple(float(m * 10**e) for e in range(5) for m in (1, 2, 5))  # as vLLM's, up to the context


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
        labels = {"engine": "0", "model_name": model}
        lines: list[str] = []
        for name, value in gauges.items():
            lines += metric_lines(f"vllm:{name}", "gauge", name, [(labels, value)])
        counters = {
            "prefix_cache_queries": self.prefix_queries,
            "prefix_cache_hits": self.prefix_hits,
            "num_preemptions": preemptions,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
        }
        for name, count in counters.items():
            lines += metric_lines(f"vllm:{name}_total", "counter", name, [(labels, count)])
        reasons = [({**labels, "finished_reason": reason}, count) for reason, count in self.success.items()]
        lines += metric_lines("vllm:request_success_total", "counter", "finished", reasons)
        lines += self.ttft.lines("vllm:time_to_first_token_seconds", labels, "Time to first token.")
        lines += self.itl.lines("vllm:inter_token_latency_seconds", labels, "Time between tokens.")
        lines += self.e2e.lines("vllm:e2e_request_latency_seconds", labels, "Time of a request.")
        lines += self.queue.lines("vllm:request_queue_time_seconds", labels, "Time in the queue.")
        lines += self.prompts.lines("vllm:request_prompt_tokens", labels, "Prompt tokens of a request.")
        lines += self.outputs.lines("vllm:request_generation_tokens", labels, "Generated tokens of a request.")
        lines += metric_lines("vllm:cache_config_info", "gauge", "cache", [(cache, 1.0)])
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
