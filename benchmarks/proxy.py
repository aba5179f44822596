"""What `corral proxy` costs: the same load on a fake server directly and through it, each in its own process.

    python benchmarks/proxy.py [--seconds 5]

Prints requests/s, streamed chunks/s, and the time to the first token of one quiet stream, direct and proxied.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from typing import Any

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
WHOLE = {"model": "fake", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
STREAM = {**WHOLE, "max_tokens": 128, "stream": True}


async def serve(url: str) -> None:
    """The gateway as `corral proxy` runs it, in front of one server, until standard input ends."""
    from corral.deploy.deployment.state import State
    from corral.serve.gateway.gateway import Gateway
    from corral.serve.gateway.keys import digest_of
    from corral.serve.gateway.member import MemberReading
    from corral.serve.gateway.policies import NEWEST
    from corral.serve.gateway.usage import KeyGrant

    proxy = Gateway(NEWEST)
    await proxy.listen("127.0.0.1", 0)
    proxy.update([MemberReading("fake", State.READY, url, model="fake")], [KeyGrant("none", digest_of(b""))])
    print(json.dumps({"url": proxy.url}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await proxy.close()


async def load(url: str, body: dict[str, Any], seconds: float, concurrency: int) -> dict[str, float]:
    """Requests/s, chunks/s and the median time to the first token at a concurrency."""
    from corral.client.client import Client
    from corral.client.endpoint import Endpoint

    counts, firsts, stop = [0, 0], [], time.perf_counter() + seconds
    async with Client(Endpoint(url, "fake")) as client:

        async def worker(number: int) -> None:
            while time.perf_counter() < stop:
                reply = await client.request("/v1/completions", {**body, "seed": number})
                counts[0] += 1
                counts[1] += len(reply.timing.chunk_ns)
                if reply.timing.chunk_ns:
                    firsts.append((reply.timing.chunk_ns[0] - reply.timing.sent_ns) / 1e6)
                number += concurrency

        start = time.perf_counter()
        await asyncio.gather(*map(worker, range(concurrency)))
        wall = time.perf_counter() - start
    first = statistics.median(firsts) if firsts else 0.0
    return {"requests_s": counts[0] / wall, "chunks_s": counts[1] / wall, "first_ms": first}


@contextlib.contextmanager
def child(*argv: str) -> Any:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *argv], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin
        assert process.stdout
        yield json.loads(process.stdout.readline())["url"]
        process.stdin.close()


def main() -> None:
    from corral.client.client import run

    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        run(serve(given.serve))
        return
    cases = [
        ("whole answers, 64 at once, server at once", WHOLE, 64, ()),
        ("streams of 128, 64 at once, server at once", STREAM, 64, ()),
        ("streams of 128, 64 at once, tokens 10 ms apart", STREAM, 64, ("--itl-ms", "10")),
        ("one stream of 128, tokens 2 ms apart", STREAM, 1, ("--itl-ms", "2")),
    ]
    print(f"{'':50}{'requests/s':>22}{'chunks/s':>24}{'first token ms':>20}")
    for title, body, concurrency, options in cases:
        server = ("-m", "corral", "fake-server", "--until-eof", *options)
        with child(*server) as url, child(__file__, "--serve", url) as via:
            found = [run(load(place, body, given.seconds, concurrency)) for place in (url, via)]
        cells = ""
        for name, width, form in (("requests_s", 22, ",.0f"), ("chunks_s", 24, ",.0f"), ("first_ms", 20, ".2f")):
            direct, proxied = (one[name] for one in found)
            ratio = f" ({proxied / direct:.2f})" if direct and name != "first_ms" else ""
            cells += f"{f'{direct:{form}} → {proxied:{form}}{ratio}':>{width}}"
        print(f"{title:50}{cells}", flush=True)


if __name__ == "__main__":
    main()
