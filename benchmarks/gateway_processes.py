"""The processes of benchmarks/gateway.py: fake servers, the gateway alone, and vllm-router.

python benchmarks/gateway_processes.py [--route NAME] [--seats N] [--key KEY] URL...     the gateway, until EOF
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.base.processes import processor_s
from corral.client.client import Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError

KEY = "a-key-for-this-benchmark"


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass
class Process:
    """A server that was started here."""

    url: str
    popen: subprocess.Popen[str]
    log: Path | None = None

    def cpu_s(self) -> float:
        return processor_s(self.popen.pid)

    def memory_mib(self) -> float:
        lines = Path(f"/proc/{self.popen.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def child(stack: contextlib.ExitStack, *argv: str, log: Path | None = None) -> Callable[[], Process]:
    """Start one; what is returned waits until it says its address, so that several start side by side."""
    pipe = subprocess.PIPE
    popen = subprocess.Popen([sys.executable, *argv], stdin=pipe, stdout=pipe, text=True)
    stack.callback(_end, popen)

    def ready() -> Process:
        assert popen.stdout
        return Process(json.loads(popen.stdout.readline())["url"], popen, log)

    return ready


def _end(popen: subprocess.Popen[str]) -> None:
    assert popen.stdin
    assert popen.stdout
    with contextlib.suppress(OSError):
        popen.stdin.close()
    popen.send_signal(signal.SIGCONT)
    try:
        popen.wait(10)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
    popen.stdout.close()


def fakes(stack: contextlib.ExitStack, count: int, *options: str, folder: str = "") -> list[Process]:
    found = []
    for number in range(count):
        log = Path(folder) / f"{number}.jsonl" if folder else None
        words = ("-m", "corral", "fake-server", "--until-eof", *options, *(("--log", str(log)) if log else ()))
        found.append(child(stack, *words, log=log))
    return [ready() for ready in found]


def gateway(stack: contextlib.ExitStack, urls: list[str], route: str = "prefix", *more: str) -> Process:
    return child(stack, __file__, "--route", route, *more, *urls)()


def router(stack: contextlib.ExitStack, program: str, urls: list[str], key: str = "") -> Process:
    """vllm-router by cache_aware, otherwise with its defaults; `key`: the file of the key that servers ask for."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        port, metrics = one.getsockname()[1], two.getsockname()[1]
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    command += [
        "--policy",
        "cache_aware",
        "--log-level",
        "error",
        "--max-concurrent-requests",
        "16384",
        "--worker-urls",
        *urls,
    ]
    popen = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    stack.callback(popen.wait)
    stack.callback(popen.terminate)
    url = f"http://127.0.0.1:{port}"
    run(_answering(url, key))
    return Process(url, popen)


async def _answering(url: str, key: str) -> None:
    """Until it passes a request on."""
    async with Client(Endpoint(url, "fake", key or None)) as client:
        for _ in range(300):
            with contextlib.suppress(RequestError, OSError):
                if (await client.page("/v1/models", timeout_s=5)).status == 200:
                    return
            await asyncio.sleep(0.2)
    raise SystemExit(f"{url} does not answer")


class LeastConnections:
    """The fewest requests, as load balancers have it; here only, to compare with."""

    def choose(self, members: Sequence[Any], prompt: object) -> Any:
        return min(members, key=lambda one: (one.width, one.holdings.clock))


async def serve(urls: list[str], route: str, keys: list[str], seats: int | None) -> None:
    """The gateway alone, in front of servers, until standard input ends."""
    from corral.deploy.deployment.state import State
    from corral.serve.gateway.gateway import Gateway, calm_collector
    from corral.serve.gateway.health import HealthMonitor
    from corral.serve.gateway.keys import digest_of
    from corral.serve.gateway.member import MemberReading
    from corral.serve.gateway.policies import POLICIES
    from corral.serve.gateway.usage import KeyGrant

    calm_collector()
    POLICIES["least-connections"] = LeastConnections

    def say(text: str) -> None:
        sys.stderr.write(f"gateway: {text}\n")

    box, model = Gateway(route, say=say), os.environ.get("BENCH_MODEL", "fake")
    await box.listen("127.0.0.1", 0)
    keys = keys or [""] * len(urls)
    servers = [
        MemberReading(f"m{number}", State.READY, url, "", model, key, seats, "bench")
        for number, (url, key) in enumerate(zip(urls, keys, strict=True))
    ]
    box.update(servers, [KeyGrant("bench", digest_of(KEY.encode()))])
    looking = asyncio.ensure_future(HealthMonitor(box).run())
    print(json.dumps({"url": box.url}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    await box.close()


@contextlib.contextmanager
def key_file() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key"
        path.touch(0o600)
        path.write_text(KEY)
        yield str(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--route", default="prefix")
    parser.add_argument("--key", action="append", default=[])
    parser.add_argument("--seats", type=int)
    given = parser.parse_args()
    run(serve(given.urls, given.route, given.key, given.seats))


if __name__ == "__main__":
    main()
