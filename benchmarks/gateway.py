"""What the gateway does and costs, beside vllm-router (Rust, PyPI) and beside no router at all.

    python benchmarks/gateway.py cost     [--seconds 10]        processor time per request, added latency
    python benchmarks/gateway.py spread   [--kind text|ids]     16 fake servers, Zipf prefixes: load, hits, latency
    python benchmarks/gateway.py faults                         kill -9 and SIGSTOP of members under 64 streams
    python benchmarks/gateway.py streams  [--count 5000]        memory with that many open streams
    python benchmarks/gateway.py replicas URL... --key-file F   prefix hits with real servers, against an oracle

`--router PATH` names the `vllm-router` of another environment; without it, the rows of vllm-router are left out.
Servers, gateway and client are processes of one machine and share its cores: compare rows of one run only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway_processes import Process, fakes, gateway, key_file, router

from corral.client.client import Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError

COMPLETIONS = "/v1/completions"


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


# Cost


async def timed(url: str, key: str, body: dict[str, Any], seconds: float, at_once: int) -> list[float]:
    """The times of requests in ms, so many at once."""
    found: list[float] = []
    async with Client(Endpoint(url, "fake", key)) as client:
        for number in range(at_once):
            await client.request(COMPLETIONS, {**body, "seed": number})
        stop = time.perf_counter() + seconds

        async def worker(number: int) -> None:
            while time.perf_counter() < stop:
                began = time.perf_counter()
                await client.request(COMPLETIONS, {**body, "seed": number})
                found.append((time.perf_counter() - began) * 1e3)
                number += at_once

        await asyncio.gather(*map(worker, range(at_once)))
    return found


def cost(given: argparse.Namespace) -> None:
    """Rounds of direct, gateway and router, one after the other, so that the machine's load falls on all alike."""
    text = "The quick brown fox jumps over the lazy dog. "
    whole = {"prompt": text * 12, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    cases = {"whole answers of 16 tokens": whole, "streams of 64 tokens": {**whole, "max_tokens": 64, "stream": True}}
    with contextlib.ExitStack() as stack:
        key = stack.enter_context(key_file())
        urls = [one.url for one in fakes(stack, 2)]
        places: dict[str, Process | str] = {"direct": urls[0], "corral gateway": gateway(stack, urls)}
        if given.router:
            places["vllm-router"] = router(stack, given.router, urls)
        for title, body in cases.items():
            for at_once in (1, 32):
                rows = rounds(places, key, body, given.seconds, at_once)
                print(f"\n{title}, {at_once} at once: requests, processor ms per request, ms P50, P99")
                for name, (times, cpu_s) in rows.items():
                    each = f"{cpu_s / len(times) * 1e3:7.3f}" if cpu_s else "      -"
                    middle, late = statistics.median(times), percentile(times, 0.99)
                    print(f"  {name:16}{len(times):8,} {each} {middle:8.2f} {late:8.2f}", flush=True)


def rounds(
    places: dict[str, Process | str], key: str, body: dict[str, Any], seconds: float, at_once: int
) -> dict[str, tuple[list[float], float]]:
    rows: dict[str, tuple[list[float], float]] = {name: ([], 0.0) for name in places}
    for _ in range(5):
        for name, place in places.items():
            url = place if isinstance(place, str) else place.url
            before = 0.0 if isinstance(place, str) else place.cpu_s()
            times = run(timed(url, key, body, seconds / 5, at_once))
            spent = 0.0 if isinstance(place, str) else place.cpu_s() - before
            rows[name] = ([*rows[name][0], *times], rows[name][1] + spent)
    return rows


# Spread


@dataclass
class Outcome:
    """What one policy made of a load."""

    first_ms: list[float] = field(default_factory=list)
    failed: int = 0
    late_ms: list[float] = field(default_factory=list)


def zipf_load(kind: str, count: int, prefixes: int, seed: int) -> list[tuple[float, Any]]:
    """Prompts with their share of the arrival times: a Poisson process, and prefixes by Zipf's law."""
    from corral.fake import words

    rng = random.Random(seed)
    weights = [1 / (number + 1) for number in range(prefixes)]
    starts = [" ".join(f"subject{number}word{i}" for i in range(110)) for number in range(prefixes)]
    found, at = [], 0.0
    for number, which in enumerate(rng.choices(range(prefixes), weights, k=count)):
        at += rng.expovariate(1.0)
        prompt: Any = f"{starts[which]} and question {number} of {seed}"
        found.append((at, words.encode(prompt.encode()) if kind == "ids" else prompt))
    return found


async def open_loop(url: str, key: str, load: list[tuple[float, Any]], rate: float, tokens: int) -> Outcome:
    found = Outcome()
    loop = asyncio.get_running_loop()
    async with Client(Endpoint(url, "fake", key)) as client:
        began = loop.time() + 0.1

        async def one(prompt: Any) -> None:
            body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
            try:
                reply = await client.request(COMPLETIONS, body)
                found.first_ms.append((reply.timing.chunk_ns[0] - reply.timing.sent_ns) / 1e6)
            except RequestError:
                found.failed += 1

        tasks = []
        for at, prompt in load:
            due = began + at / rate
            await asyncio.sleep(max(0.0, due - loop.time()))
            found.late_ms.append((loop.time() - due) * 1e3)
            tasks.append(asyncio.ensure_future(one(prompt)))
        await asyncio.gather(*tasks)
    return found


def spread(given: argparse.Namespace) -> None:
    pace = ("--ttft-ms", "20", "--prefill-rate", "2000", "--itl-ms", "50", "--max-seqs", "8")
    load = zipf_load(given.kind, given.requests, given.prefixes, 1)
    asked = f"{given.requests:,} requests at {given.rate:g}/s, {given.prefixes} prefixes by Zipf, as {given.kind}"
    print(f"16 fake servers of 8 seats, {asked}")
    print(
        "policy, max/mean of requests, of busy time, prompt tokens cached, first token ms P50, P99, failed, lag P99"
    )
    names = [*given.routes, *(["vllm-router"] if given.router else [])]
    for name in names:
        with contextlib.ExitStack() as stack:
            key = stack.enter_context(key_file())
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            servers = fakes(stack, 16, *pace, folder=folder)
            urls = [one.url for one in servers]
            seats = ("--seats", "8")
            front = router(stack, given.router, urls) if name == "vllm-router" else gateway(stack, urls, name, *seats)
            outcome = run(open_loop(front.url, key, load, given.rate, given.tokens))
            time.sleep(1.5)
            tell_spread(name, servers, outcome)


def tell_spread(name: str, servers: list[Process], outcome: Outcome) -> None:
    counts, busy, cached, prompts = [], [], 0, 0
    for server in servers:
        assert server.log
        rows = [json.loads(line) for line in server.log.read_text().splitlines()] if server.log.exists() else []
        counts.append(len(rows))
        busy.append(sum(row["last_ns"] - row["start_ns"] for row in rows))
        cached += sum(row["cached_tokens"] for row in rows)
        prompts += sum(row["prompt_tokens"] for row in rows)
    shares = [max(one) / statistics.mean(one) for one in (counts, busy)]
    first = outcome.first_ms
    middle, late, lag = statistics.median(first), percentile(first, 0.99), percentile(outcome.late_ms, 0.99)
    figures = f"{shares[0]:6.2f}{shares[1]:6.2f}{cached / prompts:8.1%}{middle:8.0f}{late:8.0f}"
    print(f"  {name:14}{figures}{outcome.failed:5d}{lag:7.0f}", flush=True)


# Faults


@dataclass
class Streams:
    """Streams without pause, and what became of them."""

    done: int = 0
    broken: int = 0  # after the first byte
    failed: list[str] = field(default_factory=list)  # before it
    stop: bool = False

    async def ask(self, client: Client, number: int) -> None:
        while not self.stop:
            events: list[bytes] = []

            def note(event: bytes, _: int, to: list[bytes] = events) -> None:
                to.append(event)

            body = {"prompt": f"subject {number % 16} " * 60 + str(number), "max_tokens": 40, "stream": True}
            try:
                await client.request(COMPLETIONS, {**body, "ignore_eos": True}, on_event=note)
                self.done += 1
            except RequestError as error:
                if events:
                    self.broken += 1
                else:
                    self.failed.append(str(error))
            number += 1000

    async def more(self, count: int) -> None:
        wanted, until = self.done + count, time.monotonic() + 120
        while self.done < wanted and time.monotonic() < until:
            await asyncio.sleep(0.05)


async def trouble(url: str, key: str, servers: list[Process], stop_for_s: float) -> Streams:
    load = Streams()
    async with Client(Endpoint(url, "fake", key)) as client:
        tasks = [asyncio.ensure_future(load.ask(client, number)) for number in range(64)]
        await load.more(200)
        servers[0].popen.kill()
        await load.more(200)
        servers[1].popen.kill()
        await load.more(200)
        if stop_for_s:
            servers[2].popen.send_signal(signal.SIGSTOP)
            await asyncio.sleep(stop_for_s)
            await load.more(200)
            servers[2].popen.send_signal(signal.SIGCONT)
            await load.more(200)
        load.stop = True
        await asyncio.gather(*tasks)
    return load


def faults(given: argparse.Namespace) -> None:
    print("64 streams without pause on 4 fake servers; two killed (-9), then one stopped for 30 s and continued")
    for name in ["corral gateway", *(["vllm-router"] if given.router else [])]:
        with contextlib.ExitStack() as stack:
            key = stack.enter_context(key_file())
            servers = fakes(stack, 4, "--ttft-ms", "20", "--itl-ms", "10")
            urls = [one.url for one in servers]
            front = router(stack, given.router, urls) if name == "vllm-router" else gateway(stack, urls)
            found = run(trouble(front.url, key, servers, 30.0 if name != "vllm-router" else 0.0))
        told = f"{found.done:,} whole, {len(found.failed)} failed before the first byte, {found.broken} cut after it"
        print(f"  {name:16}{told}" + (f"; first: {found.failed[0]}" if found.failed else ""), flush=True)


# Streams


async def hold_open(url: str, key: str, count: int, look: Callable[[], None]) -> tuple[int, int]:
    """Hold streams that have begun; how many there were at the look, and how many were asked for again."""
    begun, again = [0], [0]

    async def one(client: Client, number: int) -> None:
        seen = [False]

        def note(_: bytes, __: int) -> None:
            if not seen[0]:
                seen[0] = True
                begun[0] += 1

        body = {"prompt": f"{number} and more", "max_tokens": 8000, "stream": True, "ignore_eos": True}
        while not seen[0]:
            try:
                await client.request(COMPLETIONS, body, on_event=note)
            except RequestError as error:
                again[0] += 1
                if again[0] == 1:
                    sys.stderr.write(f"asked again: {error}\n")

    async with Client(Endpoint(url, "fake", key), connections=count, connect_s=60) as client:
        tasks = []
        for number in range(count):
            tasks.append(asyncio.ensure_future(one(client, number)))
            if number % 100 == 99:
                await asyncio.sleep(0.2)
        until = time.monotonic() + 200
        while begun[0] < count and time.monotonic() < until:
            await asyncio.sleep(0.2)
        await asyncio.sleep(3)
        look()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return begun[0], again[0]


def streams(given: argparse.Namespace) -> None:
    from corral.proxy.relay_server import raise_file_limit

    raise_file_limit(given.count + 1000)
    with contextlib.ExitStack() as stack:
        key = stack.enter_context(key_file())
        servers = fakes(stack, 2, "--itl-ms", "5000", "--ttft-ms", "10")
        for name in ["corral gateway", *(["vllm-router"] if given.router else [])]:
            urls = [one.url for one in servers]
            front = router(stack, given.router, urls) if name == "vllm-router" else gateway(stack, urls)
            sizes = [front.memory_mib()]
            begun, again = run(hold_open(front.url, key, given.count, functools.partial(_note_memory, front, sizes)))
            told = f"{begun:,} open streams in {sizes[-1]:.0f} MiB ({sizes[0]:.0f} MiB before)"
            print(f"{name}: {told}, {again} asked again", flush=True)


def _note_memory(process: Process, sizes: list[float]) -> None:
    sizes.append(process.memory_mib())


# Real replicas


def replicas(given: argparse.Namespace) -> None:
    """The same prompts through each way, cold by a word of their own each time; hits by the servers' counters."""
    ways = [("corral prefix", "prefix"), ("corral least-work", "least-work"), ("corral round-robin", "round-robin")]
    plans = [(name, route) for name, route in ways] + ([("vllm-router cache_aware", "")] if given.router else [])
    keys = [Path(path).read_text().strip() for path in given.key_file] or [""] * len(given.urls)
    print(
        f"{len(given.urls)} servers, {given.prefixes} prefixes of {given.words} words, each asked {given.each} times"
    )
    for number, (name, route) in enumerate(plans):
        with contextlib.ExitStack() as stack:
            key = stack.enter_context(key_file())
            more = [word for one in keys if one for word in ("--key", one)]
            front = (
                router(stack, given.router, given.urls, "cache_aware")
                if not route
                else gateway(stack, given.urls, route, *more)
            )
            hits, queries, oracle = run(ask_replicas(front.url, key, given, keys, f"way {number} {time.time():.0f}"))
        print(
            f"  {name:26} {hits:8,.0f} of {queries:8,.0f} prompt tokens from the cache; an oracle {oracle:8,.0f}: "
            f"{hits / oracle:.3f} of it",
            flush=True,
        )


async def ask_replicas(
    url: str, key: str, given: argparse.Namespace, keys: list[str], salt: str
) -> tuple[float, float, float]:
    """Prompt tokens from the caches and in all, and how many an oracle would have had from them.

    An oracle sends all requests of a prefix to one server, which computes it once; caches hold whole blocks.
    """
    from corral.client.endpoint import HeldKeyEndpoint
    from corral.client.metrics import cache_config, read

    rng = random.Random(3)
    starts = [
        f"{salt}: {number}. " + " ".join(rng.choice(WORDS) for _ in range(given.words))
        for number in range(given.prefixes)
    ]
    order = [number for number in range(given.prefixes) for _ in range(given.each)]
    rng.shuffle(order)
    readers = [
        Client(HeldKeyEndpoint(one, given.model, held or None)) for one, held in zip(given.urls, keys, strict=True)
    ]
    block = int(cache_config((await readers[0].page("/metrics")).body).get("block_size", "16"))
    oracle = 0.0
    for start in starts:
        page = await readers[0].page("/tokenize", {"model": given.model, "prompt": f"{start} Question "})
        oracle += (given.each - 1) * (page.json()["count"] // block * block)
    before = [await read(one) for one in readers]
    gate = asyncio.Semaphore(given.at_once)
    async with Client(Endpoint(url, given.model, key)) as client:

        async def ask(number: int, which: int) -> None:
            async with gate:
                body = {"prompt": f"{starts[which]} Question {number}:", "max_tokens": 4, "temperature": 0}
                await client.request(COMPLETIONS, body)

        await asyncio.gather(*(ask(number, which) for number, which in enumerate(order)))
    await asyncio.sleep(1)
    after = [await read(one) for one in readers]
    for one in readers:
        await one.close()
    hits = sum((b.prefix_hits or 0) - (a.prefix_hits or 0) for a, b in zip(before, after, strict=True))
    asked = sum((b.prefix_queries or 0) - (a.prefix_queries or 0) for a, b in zip(before, after, strict=True))
    return hits, asked, oracle


WORDS = [f"{first}{second}" for first in ("river", "stone", "light", "paper") for second in ("", "s", "less", "like")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("cost", "spread", "faults", "streams", "replicas"):
        verb = verbs.add_parser(name)
        verb.add_argument("--router", default="", help="path of vllm-router")
        if name == "cost":
            verb.add_argument("--seconds", type=float, default=10.0)
        elif name == "spread":
            verb.add_argument("--kind", choices=["text", "ids"], default="text")
            verb.add_argument("--requests", type=int, default=1600)
            verb.add_argument("--rate", type=float, default=80.0)
            verb.add_argument("--prefixes", type=int, default=64)
            verb.add_argument("--tokens", type=int, default=16)
            verb.add_argument("--routes", nargs="*", default=["prefix", "least-work", "round-robin", "random"])
        elif name == "streams":
            verb.add_argument("--count", type=int, default=5000)
        elif name == "replicas":
            verb.add_argument("urls", nargs="+")
            verb.add_argument("--key-file", nargs="*", default=[], help="of each server, where it has a key")
            verb.add_argument("--model", required=True)
            verb.add_argument("--prefixes", type=int, default=8)
            verb.add_argument("--each", type=int, default=8)
            verb.add_argument("--words", type=int, default=400)
            verb.add_argument("--at-once", type=int, default=4)
    given = parser.parse_args()
    globals()[given.verb](given)


if __name__ == "__main__":
    main()
