"""Hostile clients against a gateway, beside honest streams: `make hostile`.

Strangers and a client with a key send unfinished bodies, deep JSON, heads and bodies a byte at a time, and requests
whose answers they do not read; the gateway's process is stopped for seconds, and has no free descriptor for a while.
No honest stream fails, and at the end the process has about the memory that it had, and holds no body.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from corral.client.client import CHAT, Client, run
from corral.client.endpoint import HeldKeyEndpoint
from corral.client.errors import RequestError
from corral.deploy.deployment.state import State
from corral.fake.app import FakeOptions
from corral.fake.pace import Pace
from corral.fake.server import FakeServer
from corral.serve.gateway.gateway import Gateway
from corral.serve.gateway.health import HealthMonitor
from corral.serve.gateway.keys import digest_of
from corral.serve.gateway.member import MemberReading
from corral.serve.gateway.relay import GatewayLimits
from corral.serve.gateway.usage import KeyGrant

OWNER, HONEST, HOSTILE = "the-owners-key", "an-honest-clients-key", "a-hostile-clients-key"
GROWTH_BYTES = 64 << 20
STREAMS, TOKENS = 4, 60
LIMITS = GatewayLimits(connections=256, head_s=3, idle_s=20, read_s=3, unread_s=3, closing_s=2)
ATTACKS = {
    "keyless bodies": 4, "bodies of a key": 2, "deep JSON": 3, "trickling": 3, "unread answers": 3, "silent": 2,
    "stop": 2, "no descriptors": 2,
}  # fmt: skip


def gateway_process(url: str) -> None:
    """The gateway under attack: prints its port, serves until SIGTERM."""

    async def serve() -> None:
        ending = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
        gateway = Gateway(limits=LIMITS)
        await gateway.listen("127.0.0.1", 0)
        grants = [KeyGrant(key, digest_of(key.encode())) for key in (HONEST, HOSTILE)]
        grants.append(KeyGrant("owner", digest_of(OWNER.encode()), source="m"))
        gateway.update([MemberReading("m", State.READY, url, model="fake", source="m")], grants)
        monitor = asyncio.ensure_future(HealthMonitor(gateway).run())
        print(gateway.url, flush=True)
        await ending.wait()
        monitor.cancel()
        await gateway.close()
        print(json.dumps({"held": gateway.held.total, "connections": len(gateway.connections)}), flush=True)

    run(serve())


@dataclass
class Outcome:
    """What happened."""

    attacks: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    problems: list[str] = field(default_factory=list)
    before_bytes: int = 0
    after_bytes: int = 0
    each_minute_mib: list[int] = field(default_factory=list)


class Attack:
    """The gateway, its honest clients, and what is done to it."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.outcome, self.over = chance, Outcome(), threading.Event()
        self.url, self.pid = "", 0

    # honest clients

    async def stream(self, number: int) -> None:
        async with Client(HeldKeyEndpoint(self.url, "fake", HONEST)) as client:
            while not self.over.is_set():
                body = {"messages": [{"role": "user", "content": f"{number}"}], "stream": True, "max_tokens": TOKENS,
                        "ignore_eos": True}  # fmt: skip
                try:
                    reply = await client.request(CHAT, body)
                    if reply.usage is not None and reply.usage.completion_tokens != TOKENS:
                        self.outcome.problems.append(f"an answer has {reply.usage.completion_tokens} tokens")
                    self.outcome.answered += 1
                except RequestError as error:
                    self.outcome.problems.append(f"an honest stream failed: {error}")

    async def streams(self) -> None:
        await asyncio.gather(*(self.stream(number) for number in range(STREAMS)))

    # hostile ones

    def connections(self, count: int, head: bytes) -> list[socket.socket]:
        opened = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                to = socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=2)
                opened.append(to)
                to.sendall(head)
        return opened

    def send(self, opened: list[socket.socket], piece: bytes, times: int, pause_s: float = 0.0) -> None:
        for _ in range(times):
            for to in opened:
                with contextlib.suppress(OSError):
                    to.sendall(piece)
            self.over.wait(pause_s)

    def do(self, kind: str) -> None:
        post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
        key = b"authorization: Bearer " + HOSTILE.encode() + b"\r\n"
        opened: list[socket.socket] = []
        if kind == "keyless bodies":
            opened = self.connections(16, post % (b"", 1 << 28))
            self.send(opened, bytes(1 << 20), 8)
        elif kind == "bodies of a key":
            opened = self.connections(4, post % (key, 1 << 27))
            self.send(opened, bytes(1 << 20), 8)
        elif kind == "deep JSON":
            body = b'{"prompt": ' + b"[" * self.chance.randrange(100_000, 4_000_000)
            opened = self.connections(8, post % (key, len(body)))
            self.send(opened, body, 1)
        elif kind == "trickling":
            opened = self.connections(20, b"GET / HTTP/1.1\r\nx: ") + self.connections(4, post % (key, 1 << 20))
            self.send(opened, b"y", 20, 0.2)
        elif kind == "unread answers":
            opened = self.connections(2, b"")
            self.send(opened, b"GET /metrics HTTP/1.1\r\nhost: x\r\n" + key + b"\r\n", 2000)
        elif kind == "silent":
            opened = self.connections(300, b"")  # more than it serves
        elif kind == "stop":
            os.kill(self.pid, signal.SIGSTOP)
            self.over.wait(self.chance.uniform(1, 12))
            os.kill(self.pid, signal.SIGCONT)
        else:
            before = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
            used = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (used, before[1]))
            opened = self.connections(10, b"")
            self.over.wait(self.chance.uniform(0.5, 3))
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, before)
        for to in opened:
            to.close()
        self.outcome.attacks[kind] += 1

    def memory_bytes(self) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) << 10

    def run(self, seconds: float) -> Outcome:
        with (
            FakeServer(FakeOptions(pace=Pace(ttft_s=0.02, itl_s=0.02))) as server,
            self.gateway(server.url) as process,
        ):
            self.pid = process.pid
            honest = threading.Thread(target=lambda: run(self.streams()))
            honest.start()
            self.wait_for(lambda: self.outcome.answered >= 2 * STREAMS, "the first answers")
            self.outcome.before_bytes = self.memory_bytes()
            ending = time.monotonic() + seconds
            minute = time.monotonic() + 60
            while time.monotonic() < ending:
                if time.monotonic() >= minute:
                    minute += 60
                    self.outcome.each_minute_mib.append(self.memory_bytes() >> 20)
                self.do(self.chance.choices(list(ATTACKS), list(ATTACKS.values()))[0])
            answered = self.outcome.answered
            self.wait_for(lambda: self.outcome.answered >= answered + 2 * STREAMS, "answers after the attacks")
            most = self.outcome.before_bytes + GROWTH_BYTES
            self.wait_for(lambda: self.memory_bytes() < most, "the memory that it had", 60)
            self.outcome.after_bytes = self.memory_bytes()
            self.over.set()
            honest.join(60)
            process.terminate()
            out, _ = process.communicate(timeout=60)
        left = json.loads(out)
        self.outcome.problems += [f"{left['held']:,} bytes of bodies are held"] * bool(left["held"])
        return self.outcome

    @contextlib.contextmanager
    def gateway(self, url: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "tests.hostile_clients", "--gateway", url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
        try:
            assert process.stdout
            self.url = process.stdout.readline().strip()
            yield process
        finally:
            self.over.set()
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = 120) -> None:
        ending = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > ending:
                self.outcome.problems.append(f"not within {limit_s:g} s: {what}")
                return
            time.sleep(0.1)


def attack(seconds: float, seed: int) -> Outcome:
    return Attack(random.Random(seed)).run(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gateway", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.gateway:
        gateway_process(given.gateway)
        return
    outcome = attack(given.seconds, given.seed)
    print(json.dumps(vars(outcome), indent=1))
    if outcome.problems:
        sys.exit(1)


if __name__ == "__main__":
    main()
