"""Prefix hits with real servers, against an oracle that knows every request beforehand. See gateway.py.

The same prompts through each way, cold by words of their own each time; hits by the servers' counters. The oracle
sends all requests of a prefix to one server, which computes it once, and what all prompts begin with is computed once
in all; caches hold whole blocks, and none is ever lost. So it may have more than any router with two servers can.

vllm-router sends the client's key on and has one for all: for it, each server stands behind a gateway of its own that
takes the client's key (the server's guard is off, as far as vllm-router can tell).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway_processes import gateway, key_file, percentile, router

from corral.client.client import COMPLETIONS, Client, run
from corral.client.endpoint import Endpoint, HeldKeyEndpoint
from corral.client.metrics import cache_config, read

WORDS = [f"{first}{second}" for first in ("river", "stone", "light", "paper") for second in ("", "s", "less", "like")]


@dataclass(frozen=True)
class Prompts:
    """What is asked, in order, and how many tokens of it an oracle has from the caches."""

    order: list[Any]
    oracle: float
    tokens: float  # of a prefix, on average


def replicas(given: argparse.Namespace) -> dict[str, Any]:
    keys = [Path(path).read_text().strip() for path in given.key_file] or [""] * len(given.urls)
    ways = [*given.routes, *(["vllm-router"] if given.router else [])]
    shared = f", the first {given.common} words shared by all" if given.common else ""
    asked = f"{given.prefixes} prefixes of {given.words} words{shared}, each asked {given.each} times as {given.kind}"
    print(f"{len(given.urls)} servers, {asked}, {given.at_once} at once, seed {given.seed}")
    print(
        "prompt tokens cached; by an oracle; share of it; max/mean of requests; seconds in all, P50, P99", flush=True
    )
    rows = {}
    for number, name in enumerate(ways):
        with contextlib.ExitStack() as stack:
            key = stack.enter_context(key_file())
            if name == "vllm-router":
                doors = [
                    gateway(stack, [u], "random", *_keys([k])).url for u, k in zip(given.urls, keys, strict=True)
                ]
                front = router(stack, given.router, doors, key=key)
            else:
                front = gateway(stack, given.urls, name, *_keys(keys))
            time.sleep(2.0)
            rows[name] = run(_ask_all(front.url, key, given, keys, f"{number} of {time.time():.0f}"))
        tell(name, rows[name])
    return {"asked": asked, "at_once": given.at_once, "seed": given.seed, "rows": rows}


def _keys(keys: list[str]) -> list[str]:
    return [word for one in keys if one for word in ("--key", one)]


def tell(name: str, row: dict[str, float]) -> None:
    share = row["hits"] / row["oracle"]
    times = f"{row['wall_s']:7.1f} {row['p50_s']:6.2f} {row['p99_s']:6.2f}"
    print(
        f"  {name:14}{row['hits']:9,.0f} {row['oracle']:9,.0f} {share:7.3f} {row['uneven']:6.2f} {times}", flush=True
    )


async def _prompts(server: Client, given: argparse.Namespace, salt: str) -> Prompts:
    rng = random.Random(given.seed)
    common = " ".join([salt, *(rng.choice(WORDS) for _ in range(given.common))])
    starts = []
    for number in range(given.prefixes):
        own = " ".join(rng.choice(WORDS) for _ in range(given.words - given.common))
        starts.append(f"{common} {number}: {own}" if given.common else f"{number} {salt}: {own}")
    block = int(cache_config((await server.page("/metrics")).body).get("block_size", "16"))
    whole = [len(await _ids(server, given.model, f"{start} Question ")) // block * block for start in starts]
    shared = len(await _ids(server, given.model, common)) // block * block if given.common else 0
    oracle = sum(given.each * one for one in whole) - sum(one - shared for one in whole) - shared
    order = [number for number in range(given.prefixes) for _ in range(given.each)]
    rng.shuffle(order)
    asked: list[Any] = [f"{starts[which]} Question {number}:" for number, which in enumerate(order)]
    if given.kind == "ids":
        asked = [await _ids(server, given.model, one) for one in asked]
    return Prompts(asked, float(oracle), statistics.mean(whole))


async def _ids(server: Client, model: str, prompt: str) -> list[int]:
    found: list[int] = (await server.page("/tokenize", {"model": model, "prompt": prompt})).json()["tokens"]
    return found


async def _ask_all(url: str, key: str, given: argparse.Namespace, keys: list[str], salt: str) -> dict[str, float]:
    readers = [Client(HeldKeyEndpoint(u, given.model, k or None)) for u, k in zip(given.urls, keys, strict=True)]
    prompts = await _prompts(readers[0], given, salt)
    before = [await read(one) for one in readers]
    gate, times, began = asyncio.Semaphore(given.at_once), [], time.perf_counter()
    async with Client(Endpoint(url, given.model, key)) as client:

        async def ask(prompt: Any) -> None:
            async with gate:
                sent = time.perf_counter()
                await client.request(COMPLETIONS, {"prompt": prompt, "max_tokens": 4, "temperature": 0})
                times.append(time.perf_counter() - sent)

        await asyncio.gather(*map(ask, prompts.order))
    wall_s = time.perf_counter() - began
    await asyncio.sleep(1)
    after = [await read(one) for one in readers]
    for one in readers:
        await one.close()
    hits = [(b.prefix_hits or 0) - (a.prefix_hits or 0) for a, b in zip(before, after, strict=True)]
    asked = [(b.prefix_queries or 0) - (a.prefix_queries or 0) for a, b in zip(before, after, strict=True)]
    return {"hits": sum(hits), "asked": sum(asked), "oracle": prompts.oracle, "prefix_tokens": prompts.tokens,
            "uneven": max(asked) / statistics.mean(asked), "wall_s": wall_s, "p50_s": statistics.median(times),
            "p99_s": percentile(times, 0.99)}  # fmt: skip
