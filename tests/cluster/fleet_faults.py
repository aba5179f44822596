"""A fleet on hosts with real sshd under 64 streams: what breaks, and what clients notice. As root.

    python -m tests.cluster.fleet_faults [--only WORD]...

Four hosts have a member each, a stand-in engine behind the real guard; the gateway and 64 clients, who ask again
as soon as they have their answer, are on the machine that reaches the hosts by ssh. A request fails *before
its first byte*, which must not happen, or is *cut* after it, which the loss of a server cannot but do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from corral.client.client import CHAT, Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError
from tests.cluster.test_slurm_handover import ENGINE
from tests.stand_in import install_stand_in
from tests.testbed.hosts import Hosts
from tests.tiny_llama import make_tiny_llama
from tests.until import free_port, until

NODES = ("n1", "n2", "n3", "n4")
STREAMS, TOKENS, ITL_MS = 64, 12, 40


@dataclass
class Herd:
    """A fleet called `herd`, and where its user sits."""

    hosts: Hosts
    env: dict[str, str]
    model: Path

    def corral(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *words]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=240)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command, pipe = [sys.executable, "-m", "corral", *words], subprocess.PIPE
        return subprocess.Popen(command, env=self.env, text=True, stdout=pipe, stderr=subprocess.DEVNULL)

    def up(self) -> Endpoint:
        done = self.corral(
            "up", str(self.model), "--name", "herd", "--replicas", str(len(NODES)), "--hosts", ",".join(NODES),
            "--env", f"STREAM_TOKENS={TOKENS}", "--env", f"STREAM_ITL_MS={ITL_MS}", "--env", "LOAD_S=0.2", "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)["endpoint"]
        return Endpoint(told["base_url"], told["model"], told["key_file"])

    def scale(self, count: int) -> None:
        done = self.corral("scale", "herd", str(count))
        assert done.returncode == 0, done.stderr

    def states(self) -> dict[str, str]:
        """Members and their states, from `corral status`."""
        told = json.loads(self.corral("status", "herd", "--json").stdout)
        members = [one for one in told["members"] if not one["leaving"]]
        return {one["name"]: (one.get("status") or {}).get("state", "none") for one in members}

    def is_whole(self, count: int) -> bool:
        return sorted(self.states().values()) == ["ready"] * count

    def host_of(self, member: str) -> str:
        record = json.loads((self.folder / "deployments" / member / "deployment.json").read_text())
        return next(host for host in NODES if f'"{host}"' in json.dumps(record))

    @property
    def folder(self) -> Path:
        return Path(self.env["CORRAL_HOME"])

    def engine(self, host: str) -> int:
        return next(pid for pid, line in self.hosts.processes(host) if ENGINE.name in line)

    def gateways(self) -> dict[int, int]:
        """The processes of its gateways, by port."""
        found = {}
        for path in (self.folder / "fleets" / "herd" / "gateways").glob("*.json"):
            told = json.loads(path.read_text())
            if told.get("holder"):
                found[int(told["port"])] = int(told["holder"]["pid"])
        return found


@contextlib.contextmanager
def open_herd(folder: Path) -> Iterator[Herd]:
    """Four hosts that share a home with this machine."""
    home = folder / "home" / "corral"
    env = {**os.environ, "HOME": str(folder / "home"), "CORRAL_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    install_stand_in(home, ENGINE, python="/usr/bin/python3")
    with Hosts(folder / "hosts", NODES, shared=[folder]) as hosts:
        env["CORRAL_SSH"] = " ".join(hosts.ssh_command)
        herd = Herd(hosts, env, make_tiny_llama(folder / "tiny"))
        yield herd
        for host in NODES:
            if not hosts.pid(host):
                hosts.power_on(host)
        herd.corral("down", "--all")


@dataclass
class Streams:
    """Clients who ask again and again, and what became of each request."""

    whole: int = 0
    cut: int = 0
    failed: list[str] = field(default_factory=list)  # before the first byte
    over: bool = False

    async def ask(self, client: Client, number: int) -> None:
        turn = 0
        while not self.over:
            turn += 1
            events: list[bytes] = []
            body = {
                "messages": [{"role": "user", "content": f"{number} {turn}"}],
                "stream": True,
                "max_tokens": TOKENS,
            }
            try:
                await client.request(CHAT, body, on_event=partial(_note, events))
                self.whole += 1
            except RequestError as error:
                if events:
                    self.cut += 1
                else:
                    self.failed.append(f"{type(error).__name__}: {error.message}")
                    await asyncio.sleep(0.1)

    def go_on(self) -> None:
        """Until every client has had about another answer."""
        wanted = self.whole + STREAMS
        until(lambda: self.whole >= wanted, "answers go on", 240)


def _note(events: list[bytes], event: bytes, _: int) -> None:
    events.append(event)


def during(endpoint: Endpoint, work: Callable[[Streams], None]) -> Streams:
    """Do something to a fleet under streams."""
    streams = Streams()

    async def through() -> None:
        async with Client(endpoint) as client:
            running = [asyncio.ensure_future(streams.ask(client, number)) for number in range(STREAMS)]
            try:
                await asyncio.to_thread(streams.go_on)
                await asyncio.to_thread(work, streams)
                await asyncio.to_thread(streams.go_on)
            finally:
                streams.over = True
                await asyncio.gather(*running)

    run(through())
    return streams


# what breaks


def kill_engine(herd: Herd, streams: Streams) -> None:
    """kill -9 of an engine; it comes back."""
    os.kill(herd.engine("n1"), signal.SIGKILL)
    streams.go_on()
    until(lambda: herd.is_whole(4), "four members", 240)


def lose_node(herd: Herd, streams: Streams) -> None:
    """A host loses its power, and gets it back."""
    herd.hosts.power_off("n2")
    streams.go_on()
    until(lambda: sorted(herd.states().values()) != ["ready"] * 4, "the loss is seen", 240)
    herd.hosts.power_on("n2")
    until(lambda: herd.is_whole(4), "four members", 240)


def hang(herd: Herd, streams: Streams) -> None:
    """An engine stands still for as long as it takes to be noticed, and goes on."""
    pid = herd.engine("n3")
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: "hung" in json.dumps(loads(herd)), "the gateway calls it hung", 240)
        streams.go_on()
    finally:
        with contextlib.suppress(ProcessLookupError):  # its agent may have ended it
            os.kill(pid, signal.SIGCONT)
    until(lambda: herd.is_whole(4) and "hung" not in json.dumps(loads(herd)), "four members again", 240)


def loads(herd: Herd) -> list[Any]:
    found = []
    for path in (herd.folder / "fleets" / "herd" / "gateways").glob("*.load.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return found


def roll(herd: Herd, streams: Streams) -> None:
    """`corral scale` 4 → 1 → 6 → 4."""
    for count in (1, 6, 4):
        herd.scale(count)
        until(partial(herd.is_whole, count), f"{count} members", 240)
        streams.go_on()


def two_gateways(herd: Herd, endpoint: Endpoint) -> Streams:
    """A second gateway of the same fleet serves while the first is killed, and that one comes back on its port."""
    port = free_port()
    second = herd.start("gateway", "herd", "--port", str(port))
    try:
        until(lambda: port in herd.gateways(), "the second gateway")
        ((first, pid),) = [one for one in herd.gateways().items() if one[0] != port]

        def kill_first(streams: Streams) -> None:
            os.kill(pid, signal.SIGKILL)
            until(lambda: herd.gateways().get(first, pid) != pid, "the first gateway is back on its port")
            streams.go_on()

        other = Endpoint(f"http://127.0.0.1:{port}/v1", endpoint.model, str(herd.folder / "fleets" / "herd" / "key"))
        found = during(other, kill_first)
        again = during(endpoint, lambda streams: streams.go_on())
        found.whole, found.cut, found.failed = (
            found.whole + again.whole,
            found.cut + again.cut,
            found.failed + again.failed,
        )
        return found
    finally:
        second.send_signal(signal.SIGINT)
        second.communicate(timeout=120)


FAULTS: dict[str, Callable[[Herd, Endpoint], Streams]] = {
    "kill -9 of an engine": lambda herd, endpoint: during(endpoint, partial(kill_engine, herd)),
    "a node without power, and back": lambda herd, endpoint: during(endpoint, partial(lose_node, herd)),
    "an engine that hangs": lambda herd, endpoint: during(endpoint, partial(hang, herd)),
    "scale 4 → 1 → 6 → 4": lambda herd, endpoint: during(endpoint, partial(roll, herd)),
    "two gateways, one killed": two_gateways,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="WORD")
    given = parser.parse_args()
    bad = 0
    with TemporaryDirectory() as name, open_herd(Path(name)) as herd:
        endpoint = herd.up()
        for title, strike in FAULTS.items():
            if given.only and not any(word in title for word in given.only):
                continue
            began, found = time.monotonic(), strike(herd, endpoint)
            bad += len(found.failed)
            lost = f"{len(found.failed)} failed before the first byte, {found.cut} cut after it"
            print(f"{title}: {found.whole:,} whole, {lost}; {time.monotonic() - began:.0f} s", flush=True)
            for text in found.failed[:3]:
                print(f"    {text}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
