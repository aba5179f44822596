"""A fleet under 64 streams: what breaks, when it is noticed and mended, and what clients notice. As root.

    python -m tests.cluster.fleet_faults [ssh] [slurm] [--only WORD]...

Four hosts with real sshd, or a SLURM cluster of three nodes, have the members, each a stand-in engine behind the real
guard; 64 clients ask again as soon as they have their answer. A request fails *before its first byte*, which must not
happen while a gateway is there, or is *cut* after it, which the loss of a server cannot but do. A fault is noticed
when `corral status` tells of it, or the gateway calls the member hung; it is mended when all members are ready again.
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
from tests.cluster.test_slurm_handover import ENGINE, SMALL
from tests.conftest import ROOT
from tests.stand_in import install_stand_in
from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm
from tests.tiny_llama import make_tiny_llama
from tests.until import free_port, until

NODES = ("n1", "n2", "n3", "n4")
STREAMS, TOKENS, ITL_MS = 64, 12, 40
PATIENCE_S = 240.0


@dataclass
class Herd:
    """A fleet called `herd`, and where its user sits."""

    hosts: Hosts
    env: dict[str, str]
    model: Path
    members: int = len(NODES)
    where: tuple[str, ...] = ("--hosts", ",".join(NODES))

    def corral(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *words]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=240)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command, pipe = [sys.executable, "-m", "corral", *words], subprocess.PIPE
        return subprocess.Popen(command, env=self.env, text=True, stdout=pipe, stderr=subprocess.DEVNULL)

    def up(self) -> Endpoint:
        done = self.corral(
            "up", str(self.model), "--name", "herd", "--replicas", str(self.members), *self.where,
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

    def is_well(self) -> bool:
        """All members are ready, and the gateway calls none hung."""
        return self.is_whole(self.members) and "hung" not in json.dumps(loads(self))

    def host_of(self, member: str) -> str:
        record = json.loads((self.folder / "deployments" / member / "deployment.json").read_text())
        return next(host for host in NODES if f'"{host}"' in json.dumps(record))

    @property
    def folder(self) -> Path:
        return Path(self.env["CORRAL_HOME"])

    def engine(self, host: str) -> int:
        return next(pid for pid, line in self.hosts.processes(host) if ENGINE.name in line)

    def kill_on(self, host: str, word: str) -> None:
        for pid in [pid for pid, line in self.hosts.processes(host) if word in line]:
            os.kill(pid, signal.SIGKILL)

    def kill(self, words: str) -> None:
        """Of its own processes, those with these words in their command line, wherever its user sits."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = f"CORRAL_HOME={self.folder}".encode() in (path / "environ").read_bytes()
                if ours and words.encode() in (path / "cmdline").read_bytes():
                    os.kill(int(path.name), signal.SIGKILL)

    def gateways(self) -> dict[int, int]:
        """The processes of its gateways, by port."""
        found = {}
        for path in (self.folder / "fleets" / "herd" / "gateways").glob("*.json"):
            told = json.loads(path.read_text())
            if told.get("holder"):
                found[int(told["port"])] = int(told["holder"]["pid"])
        return found


@dataclass
class SlurmHerd(Herd):
    """The same as jobs; its user sits on the login host."""

    slurm: Slurm = field(kw_only=True)

    def corral(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *words]
        return self.hosts.exec("login", command, env=self.env, check=False, timeout=PATIENCE_S)

    def job(self, member: str) -> str:
        return str(json.loads((self.folder / "deployments" / member / "job.json").read_text())["id"])

    def cancel(self, member: str) -> None:
        self.slurm.run("scancel", self.job(member))

    def node_of(self, member: str) -> str:
        return self.slurm.run("squeue", "-h", "-j", self.job(member), "-o", "%N").stdout.strip()


@contextlib.contextmanager
def open_slurm_herd(folder: Path) -> Iterator[SlurmHerd]:
    """A controller on a login host and three nodes; two jobs, each on a node of its own."""
    home = folder / "corral"
    env = {"CORRAL_HOME": str(home), "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    install_stand_in(home, ENGINE, python="/usr/bin/python3")
    with Hosts(folder / "hosts", ("login", "n1", "n2", "n3"), shared=[folder]) as hosts, Slurm(hosts) as slurm:
        where = (*SMALL, "--slurm", "exclusive=true", "--time", "60:00", "--bind", hosts.address("login"))
        herd = SlurmHerd(hosts, env, make_tiny_llama(folder / "tiny"), 2, where, slurm=slurm)
        yield herd
        herd.corral("down", "--all")


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


def loads(herd: Herd) -> list[Any]:
    found = []
    for path in (herd.folder / "fleets" / "herd" / "gateways").glob("*.load.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return found


# what breaks


@dataclass
class Row:
    """One fault: what clients noticed, and seconds from it until it was noticed and mended."""

    streams: Streams
    noticed_s: float | None = None
    mended_s: float | None = None
    load: float = 0.0

    def shown(self, title: str) -> str:
        told = ["–" if s is None else f"{s:.1f} s" for s in (self.noticed_s, self.mended_s)]
        lost = (f"{self.streams.whole:,}", len(self.streams.failed), self.streams.cut, f"{self.load:.0f}")
        return f"| {' | '.join(map(str, (title, *told, *lost)))} |"


def struck(
    herd: Herd,
    strike: Callable[[], object],
    heal: Callable[[], object] = lambda: None,
    noticed: Callable[[], bool] | None = None,
) -> Callable[[Endpoint], Row]:
    """Under streams strike, wait until it is noticed, heal, and wait until the fleet is well again."""

    def through(endpoint: Endpoint) -> Row:
        row = Row(Streams())

        def work(streams: Streams) -> None:
            row.streams, began = streams, time.monotonic()
            strike()
            until(noticed or (lambda: not herd.is_well()), "it is noticed", PATIENCE_S)
            row.noticed_s = time.monotonic() - began
            heal()
            until(herd.is_well, "the fleet is well again", PATIENCE_S)
            row.mended_s, row.load = time.monotonic() - began, os.getloadavg()[0]

        during(endpoint, work)
        return row

    return through


def lose_node(herd: Herd) -> Callable[[Endpoint], Row]:
    """A host loses its power, and gets it back."""
    return struck(herd, partial(herd.hosts.power_off, "n2"), partial(herd.hosts.power_on, "n2"))


def hang(herd: Herd) -> Callable[[Endpoint], Row]:
    """An engine stands still; nobody lets it go on."""
    return struck(herd, lambda: os.kill(herd.engine("n3"), signal.SIGSTOP))


def kill_gateway(herd: Herd) -> Callable[[Endpoint], Row]:
    """The only gateway; clients are refused until the keeper has started it again."""
    before = herd.gateways()
    return struck(herd, lambda: herd.kill("corral\0gateway"), noticed=lambda: herd.gateways() not in ({}, before))


def kill_keeper(herd: Herd) -> Callable[[Endpoint], Row]:
    """Nobody starts it again but a service, or whoever reads the first line of `corral ps`."""

    def told() -> bool:
        return "no keeper runs" in (done := herd.corral("ps")).stdout + done.stderr

    return struck(herd, lambda: herd.kill("fleet\0keep"), partial(herd.scale, herd.members), told)


def roll(herd: Herd) -> Callable[[Endpoint], Row]:
    """`corral scale` 4 → 1 → 6 → 4."""

    def scaled(streams: Streams) -> None:
        for count in (1, 6, 4):
            herd.scale(count)
            until(partial(herd.is_whole, count), f"{count} members", PATIENCE_S)
            streams.go_on()

    return lambda endpoint: Row(during(endpoint, scaled))


def two_gateways(herd: Herd) -> Callable[[Endpoint], Row]:
    """A second gateway of the same fleet serves while the first is killed, and that one comes back on its port."""

    def through(endpoint: Endpoint) -> Row:
        port = free_port()
        second = herd.start("gateway", "herd", "--port", str(port))
        try:
            until(lambda: port in herd.gateways(), "the second gateway")
            ((first, pid),) = [one for one in herd.gateways().items() if one[0] != port]

            def kill_first(streams: Streams) -> None:
                os.kill(pid, signal.SIGKILL)
                until(lambda: herd.gateways().get(first, pid) != pid, "the first gateway is back on its port")
                streams.go_on()

            key = str(herd.folder / "fleets" / "herd" / "key")
            found = during(Endpoint(f"http://127.0.0.1:{port}/v1", endpoint.model, key), kill_first)
            again = during(endpoint, lambda streams: streams.go_on())
            found.failed += again.failed
            return Row(Streams(found.whole + again.whole, found.cut + again.cut, found.failed))
        finally:
            second.send_signal(signal.SIGINT)
            second.communicate(timeout=120)

    return through


# a title -> what makes a row, on a fleet that is well; a gateway's end refuses requests, which only it may
Fault = Callable[[Any], Callable[[Endpoint], Row]]
REFUSES = "kill -9 of the only gateway"
ON_SSH: dict[str, Fault] = {
    "kill -9 of an engine": lambda herd: struck(herd, lambda: os.kill(herd.engine("n1"), signal.SIGKILL)),
    "kill -9 of an agent and its supervisor": lambda herd: struck(herd, lambda: herd.kill_on("n4", "agent.py")),
    "a node without power, and back": lose_node,
    "the link of a node cut, and back": lambda herd: struck(
        herd, partial(herd.hosts.cut, "n1"), partial(herd.hosts.heal, "n1")
    ),
    "an engine that hangs": hang,
    REFUSES: kill_gateway,
    "kill -9 of the keeper": kill_keeper,
    "scale 4 → 1 → 6 → 4": roll,
    "two gateways, one killed": two_gateways,
}


def scancel(herd: SlurmHerd) -> Callable[[Endpoint], Row]:
    return struck(herd, lambda: herd.cancel(min(herd.states())))


def kill_slurmd(herd: SlurmHerd) -> Callable[[Endpoint], Row]:
    """Of a node with a member, whose job SLURM then calls lost."""
    node = herd.node_of(min(herd.states()))
    return struck(
        herd,
        lambda: herd.hosts.exec(node, ["pkill", "-KILL", "-x", "slurmd"]),
        partial(herd.slurm.restart_node, node),
    )


def stop_controller(herd: SlurmHerd) -> Callable[[Endpoint], Row]:
    """Nothing of the fleet needs it; commands answer meanwhile."""

    def stopped(streams: Streams) -> None:
        herd.slurm.stop_controller()
        for _ in range(3):
            assert herd.corral("ps").returncode == 0
            streams.go_on()
        herd.slurm.start_controller()

    return lambda endpoint: Row(during(endpoint, stopped))


ON_SLURM: dict[str, Fault] = {
    "scancel of a job": scancel,
    "slurmd of a node killed, and back": kill_slurmd,
    "slurmctld gone, and back": stop_controller,
    REFUSES: kill_gateway,
    "kill -9 of the keeper": kill_keeper,
}
BEDS = {"ssh": (open_herd, ON_SSH), "slurm": (open_slurm_herd, ON_SLURM)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("beds", nargs="*", metavar="BED", help="ssh or slurm")
    parser.add_argument("--only", action="append", default=[], metavar="WORD")
    given = parser.parse_args()
    bad = 0
    print(
        "| fault | noticed after | well again after | answers | failed before the first byte | cut | load |",
        flush=True,
    )
    for bed in given.beds or BEDS:
        opened, faults = BEDS[bed]
        with TemporaryDirectory() as name, opened(Path(name)) as herd:
            endpoint = herd.up()
            for title, fault in faults.items():
                if given.only and not any(word in title for word in given.only):
                    continue
                row = fault(herd)(endpoint)
                bad += len(row.streams.failed) * (title != REFUSES)
                print(row.shown(f"{bed}: {title}"), flush=True)
                for text in row.streams.failed[:3]:
                    print(f"    {text}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
