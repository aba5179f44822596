"""Walltime with a real controller: under constant streaming load through the proxy, jobs follow each other unnoticed.

Each job has two minutes; SLURM may signal its end up to a minute early. The engine is a stand-in behind the real
guard. The chain's keepers run inside the jobs, and one more on the login host beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import corral as package
from corral.client.client import CHAT, Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError
from tests.stand_in import install_stand_in
from tests.testbed import missing
from tests.testbed.hosts import Hosts, wait_for
from tests.testbed.slurm import Slurm
from tests.tiny_llama import make_tiny_llama

pytestmark = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))

ENGINE = Path(__file__).parent.parent / "streaming_engine.py"
STREAMS = 4  # through the proxy, and as many through a tunnel
SMALL = ("--partition", "gpu", "--slurm", "gpus_per_node=0", "--slurm", "cpus_per_task=2", "--slurm", "mem=4G")


class Cluster:
    """A user on the login host of a small cluster."""

    def __init__(self, hosts: Hosts, slurm: Slurm, folder: Path) -> None:
        self.hosts, self.slurm, self.home = hosts, slurm, folder / "corral"
        self.model = make_tiny_llama(folder / "tiny")
        install_stand_in(self.home, ENGINE, python="/usr/bin/python3")

    @property
    def env(self) -> dict[str, str]:
        source = str(Path(package.__file__).parent.parent)
        return {"CORRAL_HOME": str(self.home), "PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}

    def corral(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *arguments]
        return self.hosts.exec("login", command, env=self.env, check=False, timeout=180)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "corral", *arguments]
        pipe = subprocess.PIPE
        return self.hosts.popen("login", command, env=self.env, text=True, stdout=pipe, stderr=pipe)

    def start_tunnel(self, name: str) -> subprocess.Popen[str]:
        """`corral tunnel` on this machine, to a deployment of the login host."""
        there = ["env", *(f"{name}={value}" for name, value in self.env.items()), sys.executable, "-m", "corral"]
        words = ["tunnel", name, "--through", "login", "--corral", shlex.join(there)]
        here = {"CORRAL_HOME": str(self.home.parent / "here"), "CORRAL_SSH": shlex.join(self.hosts.ssh_command)}
        env, pipe = {**os.environ, **here}, subprocess.PIPE
        return subprocess.Popen([sys.executable, "-m", "corral", *words], env=env, text=True, stdout=pipe)

    def folder(self, name: str) -> Path:
        return self.home / "deployments" / name

    def interrupt(self, words: str) -> None:
        """Ctrl-C for a command on the login host."""
        for pid, line in self.hosts.processes("login"):
            if words in line:
                os.kill(pid, signal.SIGINT)

    def chain(self, name: str) -> Any:
        return json.loads((self.folder(name) / "fleet.json").read_text())

    def jobs(self, name: str) -> list[str]:
        return [one["name"] for one in self.chain(name)["members"]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("handover")
    with Hosts(folder / "hosts", ("login", "n1", "n2"), shared=[folder]) as hosts, Slurm(hosts) as slurm:
        found = Cluster(hosts, slurm, folder)
        yield found
        found.corral("down", "--all")


class Load:
    """Streams without pause until stopped, and what became of each."""

    def __init__(self) -> None:
        self.whole = self.tokens = 0
        self.failures: list[str] = []
        self.longest_gap_s = 0.0
        self.stop = False

    async def run(self, url: str, key_file: Path) -> None:
        async with Client(Endpoint(url, "tiny", str(key_file))) as client:
            await asyncio.gather(*(self._stream(client, number) for number in range(STREAMS)))

    async def _stream(self, client: Client, number: int) -> None:
        last = time.monotonic()
        while not self.stop:
            body = {"messages": [{"role": "user", "content": f"{number}"}], "stream": True, "max_tokens": 40}
            try:
                reply = await client.request(CHAT, body)
            except RequestError as error:
                self.failures.append(f"{type(error).__name__}: {error.message}")
                await asyncio.sleep(0.5)
                continue
            assert reply.text.startswith("0 1 2 ")
            assert reply.text.strip().endswith(" 39")
            self.whole += 1
            self.tokens += len(reply.timing.chunk_ns)
            for at_ns in reply.timing.chunk_ns:
                self.longest_gap_s = max(self.longest_gap_s, at_ns / 1e9 - last)
                last = at_ns / 1e9


def test_jobs_follow_each_other_and_no_request_fails(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    kept = ("--renew", "--max-jobs", "3", "--slurm", "signal_s=25", "--slurm", "renew_margin_s=5", "--time", "2:00")
    done = cluster.corral("up", str(cluster.model), "--name", "served", *SMALL, *kept, "--json")
    assert done.returncode == 0, done.stderr
    proxy = cluster.start("proxy", "served", "--json", "--bind", cluster.hosts.address("login"))
    renewal = cluster.start("renew", "served")
    tunnel = cluster.start_tunnel("served")
    try:
        place = cluster.folder("served") / "proxy.json"
        wait_for(place.exists, 20, "the proxy")
        url = f"http://{cluster.hosts.address('login')}:{json.loads(place.read_text())['port']}"
        load, far, key = Load(), Load(), cluster.folder("served") / "key"

        async def through() -> None:
            running = [
                asyncio.ensure_future(load.run(url, key)),
                asyncio.ensure_future(_through_tunnel(far, tunnel, key)),
            ]
            try:
                await _two_hand_overs(cluster, load)
            finally:
                load.stop = far.stop = True
                await asyncio.gather(*running)

        run(through())
    finally:
        tunnel.terminate()
        tunnel.communicate(timeout=120)
        for words in ("corral proxy served", "corral renew served"):
            cluster.interrupt(words)
        out, err = proxy.communicate(timeout=120)
        renewal.communicate(timeout=120)
    figures = json.loads(out)
    with capsys.disabled():
        gap = f"longest gap of one client {load.longest_gap_s:.2f} s"
        print(f"\n{load.whole} streams, {load.tokens} tokens, {len(load.failures)} failed, {gap}; proxy: {figures}")
        print(f"through a tunnel: {far.whole} streams, {len(far.failures)} failed")
    assert not load.failures
    assert not far.failures
    assert far.whole > STREAMS
    assert figures["failed"] == 0, err
    assert figures["switch_overs"] >= 2
    assert figures["answered"] == figures["requests"] == load.whole
    assert cluster.jobs("served") == ["served", "served~2", "served~3"]  # and no more, although several kept it
    keys = {(cluster.folder(name) / "key").read_text() for name in ("served", "served~2", "served~3")}
    assert len(keys) == 1


async def _through_tunnel(far: Load, tunnel: subprocess.Popen[str], key: Path) -> None:
    """Streams through a tunnel, as soon as it answers."""
    assert tunnel.stdout is not None
    line = await asyncio.to_thread(tunnel.stdout.readline)
    url = line.strip().partition("=")[2].removesuffix("/v1")
    await asyncio.to_thread(wait_for, lambda: _answers(url, key), 60, "an answer through the tunnel")
    await far.run(url, key)


def _answers(url: str, key: Path) -> bool:
    asked = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key.read_text().strip()}"})
    with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=10) as answer:
        return bool(answer.status == 200)
    return False


async def _two_hand_overs(cluster: Cluster, load: Load) -> None:
    """Until the first two jobs have drained and ended, and the third has served for a while."""
    for name in ("served", "served~2"):
        await _ended(cluster.folder(name))
    before = load.whole
    while load.whole < before + 3 * STREAMS and not load.failures:
        await asyncio.sleep(0.1)


async def _ended(folder: Path) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            lines = (folder / "rank0" / "events.jsonl").read_text().splitlines()
            states = [one["state"] for one in map(json.loads, lines) if one["kind"] == "state"]
            if states[-1:] == ["stopped"]:
                assert states[-2] == "draining"
                return
        await asyncio.sleep(0.5)
    raise AssertionError(f"{folder.name} never ended")


def test_an_engine_that_dies_has_a_successor_at_once_and_down_ends_the_whole_chain(cluster: Cluster) -> None:
    kept = ("--renew", "--max-jobs", "3", "--time", "30:00")
    done = cluster.corral("up", str(cluster.model), "--name", "dies", *SMALL, *kept, "--json")
    assert done.returncode == 0, done.stderr
    folder = str(cluster.folder("dies"))
    for node in cluster.slurm.nodes:
        for pid, line in cluster.hosts.processes(node):
            if ENGINE.name in line and folder in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace"):
                os.kill(pid, signal.SIGKILL)
    wait_for((cluster.folder("dies~2") / "job.json").exists, 60, "a successor")
    done = cluster.corral("wait", "dies~2")
    assert done.returncode == 0, done.stderr
    found = json.loads(cluster.corral("status", "dies", "--json").stdout)
    assert found["state"] == "failed"
    refused = cluster.corral("up", str(cluster.model), "--name", "dies", *SMALL, "--time", "5:00")
    assert refused.returncode == 4
    assert "'dies~2' follows 'dies'" in refused.stderr
    done = cluster.corral("down", "dies")
    assert done.returncode == 0, done.stderr
    assert "dies~2: stopped" in done.stdout
    assert (cluster.jobs("dies"), cluster.chain("dies")["closed"]) == (["dies", "dies~2"], "ended by `corral down`")
    cluster.corral("down", "--all")  # the last job of the chain above may have a minute left, or none

    def left() -> list[tuple[int, str]]:
        return [found for node in cluster.slurm.nodes for found in cluster.hosts.processes(node)]

    wait_for(lambda: not cluster.slurm.run("squeue", "-h").stdout.strip(), 30, "an empty queue")
    wait_for(lambda: not left(), 10, f"nothing left, but {left()}")
