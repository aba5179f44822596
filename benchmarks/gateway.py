"""What the gateway does and costs, beside vllm-router (Rust, PyPI) and beside no router at all.

    python benchmarks/gateway.py all      [--json FILE]         cost, and spread as text and as ids: 140 s
    python benchmarks/gateway.py cost     [--seconds 10]        processor time per request, added latency
    python benchmarks/gateway.py spread   [--kind text|ids]     16 fake servers, Zipf prefixes: load, hits, latency
    python benchmarks/gateway.py faults                         kill -9 and SIGSTOP of members under 64 streams
    python benchmarks/gateway.py streams  [--count 5000]        memory with that many open streams
    python benchmarks/gateway.py replicas URL... --key-file F   prefix hits with real servers, against an oracle

`--beside FOLDER` measures the gateway of another checkout in the same turns, for what a change costs.
`--router PATH` names the `vllm-router` of another environment; without it, the rows of vllm-router are left out.
`--json FILE` writes what was found, with the machine and its load. Servers, gateway and client are processes of one
machine and share its cores: compare rows of one run only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway_cost import cost
from gateway_processes import fakes, gateway, key_file, router
from gateway_replicas import replicas
from gateway_spread import spread
from process import Process

from corral.client.client import COMPLETIONS, Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError
from corral.serve.gateway.policies import POLICIES

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


def faults(given: argparse.Namespace) -> dict[str, Any]:
    rows = {}
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
        rows[name] = {"whole": found.done, "failed": len(found.failed), "cut": found.broken}
    return rows


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


def streams(given: argparse.Namespace) -> dict[str, Any]:
    from corral.client.pool import open_files

    open_files(given.count + 1000)
    rows = {}
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
            rows[name] = {"open": begun, "mib": sizes[-1], "mib_before": sizes[0], "asked_again": again}
    return rows


def _note_memory(process: Process, sizes: list[float]) -> None:
    sizes.append(process.memory_mib())


# All


def everything(given: argparse.Namespace) -> dict[str, Any]:
    """Spread twice at the same time, in processes of their own; then the others, each alone."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for kind in ("text", "ids"):
            file = Path(folder) / f"{kind}.json"
            command = [
                sys.executable,
                __file__,
                "spread",
                "--kind",
                kind,
                "--json",
                str(file),
                "--seed",
                str(given.seed),
            ]
            command += [*(["--router", given.router] if given.router else []), "--rate", str(given.spread_rate)]
            pipe = subprocess.PIPE
            started[kind] = (
                file,
                subprocess.Popen([*command, "--requests", str(given.requests)], stdout=pipe, text=True),
            )
        for kind, (file, process) in started.items():
            print(process.communicate()[0], flush=True)
            found[f"spread as {kind}"] = json.loads(file.read_text())["found"] if not process.returncode else "failed"
    found["cost"] = cost(given)
    return found


VERBS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "all": everything, "cost": cost, "spread": spread, "faults": faults, "streams": streams, "replicas": replicas
}  # fmt: skip


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="verb", required=True)
    verbs = {name: parts.add_parser(name) for name in VERBS}
    for verb in verbs.values():
        verb.add_argument("--router", default="", help="path of vllm-router")
        verb.add_argument("--json", default="", help="file to write what was found to")
    for name in ("all", "cost"):
        verbs[name].add_argument("--seconds", type=float, default=10.0 if name == "cost" else 2.0)
        verbs[name].add_argument("--rate", type=float, default=200.0)
        verbs[name].add_argument(
            "--beside", action="append", default=[], help="another checkout, with its own gateway"
        )
    verbs["streams"].add_argument("--count", type=int, default=5000)
    for name in ("all", "spread", "replicas"):
        verbs[name].add_argument("--seed", type=int, default=1)
    verbs["all"].add_argument("--requests", type=int, default=1200)
    verbs["all"].add_argument("--spread-rate", type=float, default=100.0)
    _spread_options(verbs["spread"])
    _replicas_options(verbs["replicas"])
    return parser


def _spread_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--kind", choices=["text", "ids"], default="text")
    verb.add_argument("--requests", type=int, default=1600)
    verb.add_argument("--warm", type=int, default=200, help="requests that are not measured, after each prefix once")
    verb.add_argument("--rate", type=float, default=80.0)
    verb.add_argument("--prefixes", type=int, default=64)
    verb.add_argument("--tokens", type=int, default=16)
    verb.add_argument("--routes", nargs="*", default=list(POLICIES))


def _replicas_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("urls", nargs="+")
    verb.add_argument("--key-file", nargs="*", default=[], help="of each server, where it has a key")
    verb.add_argument("--model", required=True)
    verb.add_argument("--kind", choices=["text", "ids"], default="text")
    verb.add_argument("--prefixes", type=int, default=8)
    verb.add_argument("--each", type=int, default=8)
    verb.add_argument("--words", type=int, default=400)
    verb.add_argument("--common", type=int, default=0, help="words that all prompts begin with, of these")
    verb.add_argument("--at-once", type=int, default=4)
    verb.add_argument("--routes", nargs="*", default=["prefix", "least-connections"])


def main() -> None:
    given = options().parse_args()
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    loads, began = [os.getloadavg()], time.monotonic()
    found = VERBS[given.verb](given)
    loads.append(os.getloadavg())
    about = {**machine, "load_average": loads, "seconds": time.monotonic() - began}
    print(f"\n{about}", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps({"verb": given.verb, "about": about, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
