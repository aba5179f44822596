"""The processes of benchmarks/gateway.py: fake servers, the gateway alone, and vllm-router.

python benchmarks/gateway_processes.py [--route NAME] [--seats N] [--key KEY] URL...     the gateway, until EOF
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from process import FAKE_SERVER, Process, start

from corral.client.client import Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError

KEY = "a-key-for-this-benchmark"


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def fakes(stack: contextlib.ExitStack, count: int, *options: str, folder: str = "") -> list[Process]:
    started = []
    for number in range(count):
        log = Path(folder) / f"{number}.jsonl" if folder else None
        logged = ("--log", str(log)) if log else ()
        started.append(start(stack, *FAKE_SERVER, *options, *logged, log=log))
    return [ready() for ready in started]


def gateway(
    stack: contextlib.ExitStack, urls: list[str], route: str = "prefix", *more: str, checkout: str = ""
) -> Process:
    """The gateway of this checkout, or of another one with the same packages."""
    prefix = ("env", f"PYTHONPATH={checkout}/src") if checkout else ()
    script = f"{checkout}/benchmarks/{Path(__file__).name}" if checkout else __file__
    return start(stack, script, "--route", route, *more, *urls, prefix=prefix)()


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
