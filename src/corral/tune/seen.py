"""What a running deployment has seen since its engine started, from its counters: lengths and a rate, no text."""

from __future__ import annotations

import time
from dataclasses import dataclass

from corral.bench.spec import Workload
from corral.client.client import Client
from corral.client.client import run as run_loop
from corral.client.endpoint import Endpoint
from corral.client.metrics import Reading, read
from corral.errors import UsageError

__all__ = ["SEEN", "SeenLoad", "read_seen", "seen_load"]

SEEN = "seen"  # the workload's name
FEWEST = 20  # requests, below which means say nothing
SHARED_LEAST = 16  # tokens of a block on a GPU: shorter beginnings are never shared


@dataclass(frozen=True)
class SeenLoad:
    """Means over all requests, and how many came in a second."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int  # of a prompt, found in the cache
    rate: float

    def workload(self, chat: bool, seed: int) -> Workload:
        """Prompts of such lengths, give or take a third; the spread is not known."""
        shared = self.shared_tokens >= SHARED_LEAST
        return Workload(
            dataset="prefix_repetition" if shared else "random", input_len=self.prompt_tokens,
            output_len=self.output_tokens, range_ratio=0.33, prefix_len=self.shared_tokens if shared else 64,
            chat=chat, seed=seed,
        )  # fmt: skip

    @property
    def words(self) -> str:
        shared = f" ({self.shared_tokens:,} of them cached)" if self.shared_tokens else ""
        return (
            f"{self.requests:,} requests of {self.prompt_tokens:,} prompt tokens{shared} and {self.output_tokens:,} "
            f"output tokens on average, {self.rate:.3g} a second"
        )


def seen_load(found: Reading, name: str, seconds: float) -> SeenLoad:
    """The load that a reading tells of, over so many seconds."""
    requests = int(found.finished or 0)
    if requests < FEWEST or not found.prompt_tokens or not found.generated_tokens:
        raise UsageError(
            f"{name!r} has answered {requests} requests: too few to tell a workload.",
            "Name one: --workload chat, or --input-len and --output-len.",
        )
    prompt = max(1, round(found.prompt_tokens / requests))
    share = (found.prefix_hits or 0.0) / found.prefix_queries if found.prefix_queries else 0.0
    output = max(1, round(found.generated_tokens / requests))
    return SeenLoad(requests, prompt, output, min(prompt - 1, round(share * prompt)), requests / max(1.0, seconds))


def read_seen(endpoint: Endpoint, name: str, ready_at_s: float) -> SeenLoad:
    """Ask the server; `ready_at_s` is when it became ready, by the clock on the wall."""

    async def look() -> Reading:
        async with Client(endpoint) as client:
            return await read(client)

    return seen_load(run_loop(look()), name, time.time() - ready_at_s)
