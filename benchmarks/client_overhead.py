"""What a request costs the client: Corral's client beside aiohttp, the openai SDK, and requests in 20 threads.

One fake server, one run, each contender in a process of its own. Prints CPU milliseconds per request, requests/s and
streamed chunks/s as seen, and chunks per second of client CPU (what one core gives when the server is not the limit).

    python benchmarks/client_overhead.py [--seconds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from process import fake_server

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
WHOLE = {"model": "fake", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
STREAM = {**WHOLE, "max_tokens": 128, "stream": True}
CONCURRENCY = 256


async def closed_loop(one: Callable[[int], Awaitable[int]], seconds: float, concurrency: int) -> dict[str, float]:
    """Keep `concurrency` requests under way for some seconds; `one` returns its number of chunks."""
    tally = [0, 0]
    stop = 0.0

    async def worker(number: int) -> None:
        while time.perf_counter() < stop:
            chunks = await one(number)
            tally[0] += 1
            tally[1] += chunks
            number += concurrency

    stop = time.perf_counter() + 0.5
    await asyncio.gather(*map(worker, range(concurrency)))
    tally[:] = [0, 0]
    cpu, start = time.process_time(), time.perf_counter()
    stop = start + seconds
    await asyncio.gather(*map(worker, range(concurrency)))
    return {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - start,
        "requests": tally[0],
        "chunks": tally[1],
    }


async def with_corral(url: str, body: dict[str, Any], seconds: float, concurrency: int) -> dict[str, float]:
    from corral.client.client import Client
    from corral.client.endpoint import Endpoint

    async with Client(Endpoint(url, "fake")) as client:

        async def one(number: int) -> int:
            reply = await client.request("/v1/completions", {**body, "seed": number})
            return len(reply.timing.chunk_ns)

        return await closed_loop(one, seconds, concurrency)


async def with_aiohttp(url: str, body: dict[str, Any], seconds: float, concurrency: int) -> dict[str, float]:
    import aiohttp
    import msgspec

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:

        async def one(number: int) -> int:
            data = msgspec.json.encode({**body, "seed": number})
            headers = {"content-type": "application/json"}
            async with session.post(url + "/v1/completions", data=data, headers=headers) as answer:
                if not body.get("stream"):
                    msgspec.json.decode(await answer.read())
                    return 0
                times, texts = [], []
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        times.append(time.monotonic_ns())
                        choices = msgspec.json.decode(line[6:])["choices"]
                        if choices:
                            texts.append(choices[0]["text"])
                return len(times)

        return await closed_loop(one, seconds, concurrency)


async def with_openai(url: str, body: dict[str, Any], seconds: float, concurrency: int) -> dict[str, float]:
    import openai

    extra = {"ignore_eos": True}
    kept = {k: v for k, v in body.items() if k not in extra}
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def one(number: int) -> int:
            answer: Any = await client.completions.create(**kept, seed=number, extra_body=extra)
            if not body.get("stream"):
                return 0
            times = []
            async for chunk in answer:
                if chunk.choices:
                    times.append(time.monotonic_ns())
            return len(times)

        return await closed_loop(one, seconds, concurrency)


def with_requests(url: str, body: dict[str, Any], seconds: float) -> dict[str, float]:
    """The workshops' recipe: 20 threads (a session each, which is kinder than the recipe)."""
    import requests

    tally = [0, 0]
    lock = threading.Lock()
    stop = time.perf_counter() + seconds

    def worker(number: int) -> None:
        session = requests.Session()
        while time.perf_counter() < stop:
            streamed = bool(body.get("stream"))
            answer = session.post(url + "/v1/completions", json={**body, "seed": number}, stream=streamed)
            chunks = sum(1 for line in answer.iter_lines() if line.startswith(b"data: {")) if streamed else 0
            if not streamed:
                answer.json()
            number += 20
            with lock:
                tally[0] += 1
                tally[1] += chunks

    cpu, start = time.process_time(), time.perf_counter()
    threads = [threading.Thread(target=worker, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - start
    return {"cpu_s": cpu_s, "wall_s": wall_s, "requests": tally[0], "chunks": tally[1]}


async def truth(url: str, log: Path, seconds: float) -> None:
    """How much later than the server's own clock says does the client see first and last tokens."""
    from corral.client.client import Client
    from corral.client.endpoint import Endpoint

    replies = []
    names = itertools.count()
    async with Client(Endpoint(url, "fake")) as client:

        async def one(number: int) -> int:
            reply = await client.request("/v1/completions", {**STREAM, "seed": number}, request_id=f"r{next(names)}")
            replies.append(reply)
            return len(reply.timing.chunk_ns)

        result = await closed_loop(one, seconds, CONCURRENCY)
        await asyncio.sleep(0.5)  # the log is written in blocks
    rows = {row["id"]: row for row in map(json.loads, log.read_text().splitlines())}
    first = [(r.timing.chunk_ns[0] - rows[r.id]["first_ns"]) / 1e6 for r in replies if r.id in rows]
    last = [(r.timing.chunk_ns[-1] - rows[r.id]["last_ns"]) / 1e6 for r in replies if r.id in rows]
    chunks_s = result["chunks"] / result["wall_s"]
    print(f"\ntruth at {chunks_s:,.0f} chunks/s: client minus server, ms (n = {len(first)})")
    for name, values in (("first token", first), ("last token", last)):
        cuts = statistics.quantiles(values, n=100)
        print(f"{name:12} median {cuts[49]:.3f}  p90 {cuts[89]:.3f}  p99 {cuts[98]:.3f}")


def contender(name: str, url: str, kind: str, seconds: float) -> dict[str, float]:
    body = STREAM if kind == "stream" else WHOLE
    if name == "requests":
        return with_requests(url, body, seconds)
    from corral.client.client import run

    work = {"corral": with_corral, "aiohttp": with_aiohttp, "openai": with_openai}[name]
    return run(work(url, body, seconds, CONCURRENCY))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default="corral,aiohttp,openai,requests")
    parser.add_argument("--contender", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender:
        name, url, kind = given.contender
        print(json.dumps(contender(name, url, kind, given.seconds)))
        return
    for title, kind, options in (
        ()
        if given.only == "none"
        else (
            ("whole answers, 16 tokens, server at once", "whole", ()),
            ("whole answers, 16 tokens, server takes 100 ms", "whole", ("--ttft-ms", "100")),
            ("streams, 128 tokens, server at once", "stream", ()),
            ("streams, 128 tokens, 10 ms apart", "stream", ("--itl-ms", "10")),
        )
    ):
        print(f"\n{title} (concurrency {CONCURRENCY}; requests: 20 threads)")
        print(f"{'':10}{'CPU ms/request':>16}{'requests/s':>12}{'chunks/s':>12}{'chunks/CPU s':>14}{'CPU':>7}")
        with fake_server(*options) as server:
            for name in given.only.split(","):
                child = [sys.executable, __file__, "--seconds", str(given.seconds)]
                child += ["--contender", name, server.url, kind]
                out = subprocess.run(child, capture_output=True, text=True, timeout=120, check=False)
                if out.returncode:
                    print(f"{name:10} failed: {out.stderr.strip().splitlines()[-1:]}")
                    continue
                r = json.loads(out.stdout)
                cpu, wall, requests, chunks = r["cpu_s"], r["wall_s"], r["requests"], r["chunks"]
                rates = f"{requests / wall:12,.0f}{chunks / wall:12,.0f}{chunks / cpu:14,.0f}{cpu / wall:7.0%}"
                print(f"{name:10}{cpu / max(1, requests) * 1000:16.3f}{rates}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "truth.jsonl"
        with fake_server("--log", str(log), "--ttft-ms", "50", "--itl-ms", "20", "--jitter", "0.5") as server:
            from corral.client.client import run

            run(truth(server.url, log, given.seconds))


if __name__ == "__main__":
    main()
