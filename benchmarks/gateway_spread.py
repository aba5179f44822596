"""Sixteen fake servers, prefixes by Zipf's law, each policy in processes of its own. See gateway.py.

Load is counted over the whole run, by the servers' own logs: requests, tokens computed (uncached prompt and answer),
and the time that requests spent there. What a moment shows says nothing at a low rate: one request on sixteen servers
is sixteen times the mean. First tokens are taken after the warm-up, in which every prefix was asked for once, because
a prefix's first prompt misses under every policy; those of the whole run are beside them.

The generator is one process; how late it was, and how much of a core each part took, is told with each row.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from gateway_processes import fakes, gateway, key_file, percentile, router
from process import Process

from corral.client.client import COMPLETIONS, Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError

SERVERS = 16
PACE = ("--ttft-ms", "20", "--prefill-rate", "2000", "--itl-ms", "50", "--max-seqs", "8")
HEAD = (
    "max/mean of requests, tokens, busy time; prompt tokens cached; first token ms P50, P99, P99 with the warm-up; "
    "failed; generator late ms P99; cores of generator, front, servers"
)


@dataclass
class Outcome:
    """What one policy made of a load."""

    first_ms: dict[int, float] = field(default_factory=dict)
    late_ms: list[float] = field(default_factory=list)
    failed: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0


def zipf_load(kind: str, count: int, prefixes: int, seed: int) -> list[tuple[float, Any]]:
    """Prompts with their arrival times in units of the mean: every prefix once, then by Zipf's law."""
    from corral.fake import words

    rng = random.Random(seed)
    weights = [1 / (number + 1) for number in range(prefixes)]
    starts = [" ".join(f"subject{number}word{i}" for i in range(110)) for number in range(prefixes)]
    order = [*rng.sample(range(prefixes), prefixes), *rng.choices(range(prefixes), weights, k=count)]
    found, at = [], 0.0
    for number, which in enumerate(order):
        at += rng.expovariate(1.0)
        prompt: Any = f"{starts[which]} and question {number} of {seed}"
        found.append((at, words.encode(prompt.encode()) if kind == "ids" else prompt))
    return found


async def open_loop(url: str, key: str, load: list[tuple[float, Any]], rate: float, tokens: int) -> Outcome:
    found = Outcome()
    loop = asyncio.get_running_loop()
    async with Client(Endpoint(url, "fake", key)) as client:
        began, cpu_s = loop.time() + 0.1, time.process_time()

        async def one(number: int, prompt: Any) -> None:
            body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
            try:
                reply = await client.request(COMPLETIONS, body)
                found.first_ms[number] = (reply.timing.chunk_ns[0] - reply.timing.sent_ns) / 1e6
            except RequestError:
                found.failed += 1

        tasks = []
        for number, (at, prompt) in enumerate(load):
            due = began + at / rate
            await asyncio.sleep(max(0.0, due - loop.time()))
            found.late_ms.append((loop.time() - due) * 1e3)
            tasks.append(asyncio.ensure_future(one(number, prompt)))
        await asyncio.gather(*tasks)
        found.cpu_s, found.wall_s = time.process_time() - cpu_s, loop.time() - began
    return found


def spread(given: argparse.Namespace) -> dict[str, Any]:
    load = zipf_load(given.kind, given.requests, given.prefixes, given.seed)
    asked = f"{given.requests:,} requests at {given.rate:g}/s, {given.prefixes} prefixes by Zipf, as {given.kind}"
    print(f"{SERVERS} fake servers of 8 seats, {asked}, seed {given.seed}\n{HEAD}", flush=True)
    names = [*given.routes, *(["vllm-router"] if given.router else [])]
    rows = {name: tell(name, *_one(name, given, load), given.prefixes + given.warm) for name in names}
    return {"asked": asked, "seed": given.seed, "rows": rows}


def _one(
    name: str, given: argparse.Namespace, load: list[tuple[float, Any]]
) -> tuple[Outcome, list[Any], list[float]]:
    with contextlib.ExitStack() as stack:
        key = stack.enter_context(key_file())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        servers = fakes(stack, SERVERS, *PACE, folder=folder)
        urls = [one.url for one in servers]
        front = (
            router(stack, given.router, urls) if name == "vllm-router" else gateway(stack, urls, name, "--seats", "8")
        )
        time.sleep(2.0)  # its first look at the servers
        before = [front.cpu_s(), sum(one.cpu_s() for one in servers)]
        outcome = run(open_loop(front.url, key, load, given.rate, given.tokens))
        after = [front.cpu_s(), sum(one.cpu_s() for one in servers)]
        time.sleep(1.5)  # until their logs are written
        cores = [outcome.cpu_s, *(b - a for a, b in zip(before, after, strict=True))]
        return outcome, [_log(one) for one in servers], [one / outcome.wall_s for one in cores]


def _log(server: Process) -> list[dict[str, Any]]:
    assert server.log
    return [json.loads(line) for line in server.log.read_text().splitlines()] if server.log.exists() else []


def tell(name: str, outcome: Outcome, logs: list[Any], cores: list[float], warm: int) -> dict[str, Any]:
    computed = [
        sum(one["prompt_tokens"] - one["cached_tokens"] + one["completion_tokens"] for one in log) for log in logs
    ]
    busy = [sum(one["last_ns"] - one["start_ns"] for one in log) for log in logs]
    cached = sum(one["cached_tokens"] for log in logs for one in log)
    prompts = sum(one["prompt_tokens"] for log in logs for one in log)
    shares = [max(one) / max(1e-9, statistics.mean(one)) for one in (list(map(len, logs)), computed, busy)]
    after = [value for number, value in outcome.first_ms.items() if number >= warm]
    row = {
        "uneven": dict(zip(("requests", "tokens", "busy"), shares, strict=True)),
        "cached": cached / max(1, prompts),
        "ttft_p50_ms": statistics.median(after),
        "ttft_p99_ms": percentile(after, 0.99),
        "ttft_p99_all_ms": percentile(list(outcome.first_ms.values()), 0.99),
        "failed": outcome.failed,
        "late_p99_ms": percentile(outcome.late_ms, 0.99),
        "cores": dict(zip(("generator", "front", "servers"), cores, strict=True)),
    }
    figures = "".join(f"{one:6.2f}" for one in shares) + f"{row['cached']:8.1%}{row['ttft_p50_ms']:8.0f}"
    times = f"{row['ttft_p99_ms']:8.0f}{row['ttft_p99_all_ms']:8.0f}{outcome.failed:5d}{row['late_p99_ms']:7.1f}"
    print(f"  {name:14}{figures}{times}  " + " ".join(f"{one:.2f}" for one in cores), flush=True)
    return row
