"""How much the fake server can serve from one core: requests/s and streamed chunks/s, by its own CPU time.

The client is a bare socket loop that looks only for the end of each answer, so that the server is what is measured.
Prints requests or chunks per second as seen, and per second of server CPU (what one free core would give).
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from process import fake_server

SECONDS = 3.0


class Blaster(asyncio.Protocol):
    def __init__(self, request: bytes, end: bytes, tally: list[int]) -> None:
        self.request, self.end, self.tally, self.tail = request, end, tally, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.tally[1] += data.count(b"data: {")
        self.tail = (self.tail + data)[-16:]
        if self.tail.endswith(self.end):
            self.tally[0] += 1
            self.tail = b""
            self.transport.write(self.request)


async def blast(port: int, body: dict[str, Any], connections: int) -> list[int]:
    loop = asyncio.get_running_loop()
    raw = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(raw) + raw
    tally = [0, 0]
    end = b"0\r\n\r\n" if body.get("stream") else b'"metrics":null}'
    pairs = [
        await loop.create_connection(lambda: Blaster(request, end, tally), "127.0.0.1", port)
        for _ in range(connections)
    ]
    await asyncio.sleep(0.5)
    before = list(tally)
    started = time.perf_counter()
    await asyncio.sleep(SECONDS)
    took = time.perf_counter() - started
    result = [int((a - b) / took) for a, b in zip(tally, before, strict=True)]
    for transport, _ in pairs:
        transport.abort()
    return result


def measure(name: str, body: dict[str, Any], connections: int, *options: str) -> None:
    with fake_server("--answer-tokens", "all", *options) as server:
        port = int(server.url.rpartition(":")[2])
        before, started = server.cpu_s(), time.perf_counter()
        requests, chunks = asyncio.run(blast(port, body, connections))
        share = (server.cpu_s() - before) / (time.perf_counter() - started)
    unit, value = ("chunks/s", chunks) if body.get("stream") else ("requests/s", requests)
    print(f"{name:44} {value:>9,} {unit:10} server CPU {share:4.0%}  per CPU second {value / share:>10,.0f}")


def main() -> None:
    ask = {"model": "fake", "prompt": "The quick brown fox jumps over the lazy dog. " * 4, "temperature": 0}
    loops = [(), ("--no-uvloop",)]
    for extra in loops:
        print("uvloop" if not extra else "asyncio")
        measure("completions, 16 tokens, 64 connections", {**ask, "max_tokens": 16}, 64, *extra)
        measure("completions, 128 tokens, 64 connections", {**ask, "max_tokens": 128}, 64, *extra)
        stream = {**ask, "stream": True, "max_tokens": 128, "ignore_eos": True}
        measure("stream, at once, 16 connections", stream, 16, *extra)
        measure("stream, paced 4 ms, 128 connections", stream, 128, "--itl-ms", "4", *extra)
        measure("stream, paced 4 ms, 256 connections", stream, 256, "--itl-ms", "4", *extra)


if __name__ == "__main__":
    main()
