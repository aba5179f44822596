"""What passing a request on costs: processor time, and latency beside asking a server directly. See gateway.py."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gateway_processes import fakes, gateway, key_file, percentile, router
from process import Process

from corral.client.client import COMPLETIONS, Client, run
from corral.client.endpoint import Endpoint

Times = list[float]
Measure = Callable[[Client, dict[str, Any], float], Awaitable[Times]]
TURNS = 5
WHOLE = {
    "prompt": "The quick brown fox jumps over the lazy dog. " * 12,
    "max_tokens": 16,
    "temperature": 0,
    "ignore_eos": True,
}
BODIES = {"whole answers of 16 tokens": WHOLE, "streams of 64 tokens": {**WHOLE, "max_tokens": 64, "stream": True}}


async def ask(client: Client, body: dict[str, Any], number: int) -> float:
    began = time.perf_counter()
    await client.request(COMPLETIONS, {**body, "seed": number})
    return (time.perf_counter() - began) * 1e3


def closed(at_once: int) -> Measure:
    """So many at once, each followed by the next."""

    async def measure(client: Client, body: dict[str, Any], seconds: float) -> Times:
        found: Times = []
        stop = time.perf_counter() + seconds

        async def worker(number: int) -> None:
            while time.perf_counter() < stop:
                found.append(await ask(client, body, number))
                number += at_once

        await asyncio.gather(*map(worker, range(at_once)))
        return found

    return measure


def paced(rate: float) -> Measure:
    """So many a second, by chance."""

    async def measure(client: Client, body: dict[str, Any], seconds: float) -> Times:
        rng, loop = random.Random(1), asyncio.get_running_loop()
        tasks: list[asyncio.Future[float]] = []
        at = loop.time()
        stop = at + seconds
        while (at := at + rng.expovariate(rate)) < stop:
            await asyncio.sleep(max(0.0, at - loop.time()))
            tasks.append(asyncio.ensure_future(ask(client, body, len(tasks))))
        return list(await asyncio.gather(*tasks))

    return measure


async def timed(url: str, key: str, body: dict[str, Any], seconds: float, measure: Measure) -> Times:
    async with Client(Endpoint(url, "fake", key)) as client:
        await asyncio.gather(*(ask(client, body, number) for number in range(32)))  # connections
        return await measure(client, body, seconds)


def cost(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Turns of direct, gateway and router, one after the other, so that the machine's load falls on all alike."""
    loads = {"1 at once": closed(1), f"{given.rate:g} per second": paced(given.rate), "32 at once": closed(32)}
    found = []
    with contextlib.ExitStack() as stack:
        key = stack.enter_context(key_file())
        urls = [one.url for one in fakes(stack, 2)]
        places: dict[str, Process | str] = {"direct": urls[0], "corral gateway": gateway(stack, urls)}
        for checkout in given.beside:
            places[f"that of {Path(checkout).name}"] = gateway(stack, urls, checkout=checkout)
        if given.router:
            places["vllm-router"] = router(stack, given.router, urls)
        for title, body in BODIES.items():
            for load, measure in loads.items():
                rows = turns(places, key, body, given.seconds, measure)
                found.append({"answers": title, "load": load, "rows": tell(f"{title}, {load}", rows)})
    return found


def turns(
    places: dict[str, Process | str], key: str, body: dict[str, Any], seconds: float, measure: Measure
) -> dict[str, tuple[Times, float]]:
    rows: dict[str, tuple[Times, float]] = {name: ([], 0.0) for name in places}
    for _ in range(TURNS):
        for name, place in places.items():
            url = place if isinstance(place, str) else place.url
            before = 0.0 if isinstance(place, str) else place.cpu_s()
            times = run(timed(url, key, body, seconds / TURNS, measure))
            spent = 0.0 if isinstance(place, str) else place.cpu_s() - before
            rows[name] = ([*rows[name][0], *times], rows[name][1] + spent)
    return rows


def tell(title: str, rows: dict[str, tuple[Times, float]]) -> dict[str, dict[str, float]]:
    """Added times are differences of percentiles; what passes 32 requests to open connections is counted too."""
    print(f"\n{title}: requests, processor ms per request, ms P50, P99, added P50, P99")
    direct = rows["direct"][0]
    found = {}
    for name, (times, cpu_s) in rows.items():
        middle, late = statistics.median(times), percentile(times, 0.99)
        each = cpu_s / (len(times) + 32 * TURNS) * 1e3
        row = {
            "requests": len(times),
            "cpu_ms": each,
            "p50_ms": middle,
            "p99_ms": late,
            "added_p50_ms": middle - statistics.median(direct),
            "added_p99_ms": late - percentile(direct, 0.99),
        }
        found[name] = row
        cpu = f"{each:7.3f}" if cpu_s else "      -"
        added = f"{row['added_p50_ms']:8.2f} {row['added_p99_ms']:8.2f}" if name != "direct" else ""
        print(f"  {name:16}{len(times):8,} {cpu} {middle:8.2f} {late:8.2f} {added}", flush=True)
    if "vllm-router" in found:
        ratio = found["corral gateway"]["cpu_ms"] / max(1e-9, found["vllm-router"]["cpu_ms"])
        print(f"  processor time, gateway over router: {ratio:.2f}", flush=True)
    return found
