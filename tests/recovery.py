"""Recovery with real vLLM: `python -m tests.recovery [handover] [restart] [preemption]`, as root; minutes each.

What the cluster tests do with stand-in engines in seconds, once with the real one on the CPU (installed and kept as
for the integration tests): the hand-over of a deployment over two nodes under load, `--restart` after a node was cut
off, and a batch over three SLURM jobs, preempted while they run. Prints what was seen; exits 1 where something was
lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corral as package
from corral.client.client import COMPLETIONS, Client, run
from corral.client.endpoint import Endpoint
from corral.client.errors import RequestError
from tests.integration.conftest import KEPT
from tests.testbed.hosts import Hosts, wait_for
from tests.testbed.slurm import Slurm
from tests.tiny_llama import make_tiny_llama

JOB = ("--partition", "gpu", "--slurm", "cpus_per_task=2", "--slurm", "mem=6G", "--slurm", "gpus_per_node=0")
PAIR = ("--link", "native", "--set", "pipeline=2")
SMALL = ("--set", "eager=true", "--set", "max_model_len=512", "--node-timeout", "60")
PREEMPTION = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
STREAMS = 4
ROWS = 9000


class Bed:
    """A login host and nodes, and a user who has the real engine in the home that they all see."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self.hosts, self.folder, self.home = hosts, folder, folder / "corral"
        self.model = make_tiny_llama(folder / "tiny")

    @property
    def env(self) -> dict[str, str]:
        return {
            "CORRAL_HOME": str(self.home),
            "PYTHONPATH": str(Path(package.__file__).parent.parent),
            "HF_HUB_OFFLINE": "1",
            "CORRAL_SSH": " ".join(self.hosts.ssh_command),
        }

    def corral(self, *words: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *words]
        return self.hosts.exec("login", command, env=self.env, check=False, timeout=timeout)

    def must(self, *words: str) -> str:
        done = self.corral(*words)
        if done.returncode:
            sys.exit(f"corral {' '.join(words)}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def start(self, *words: str) -> subprocess.Popen[str]:
        return self.hosts.popen("login", [sys.executable, "-m", "corral", *words], env=self.env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # fmt: skip

    def status(self, name: str) -> Any:
        return json.loads(self.corral("status", name, "--json").stdout)

    def wait(self, name: str, state: str, limit_s: float) -> Any:
        seen: list[Any] = [None]

        def look() -> bool:
            seen[0] = self.status(name)
            return bool(seen[0]["state"] == state)

        wait_for(look, limit_s, f"{name} {state}, last seen {seen[0]}")
        return seen[0]


class Load:
    """Streams without a pause until stopped."""

    def __init__(self, url: str, key_file: Path) -> None:
        self.endpoint = Endpoint(url, "tiny", str(key_file))
        self.whole = 0
        self.failures: list[str] = []
        self.stop = False

    async def run(self) -> None:
        async with Client(self.endpoint) as client:
            await asyncio.gather(*(self._stream(client, number) for number in range(STREAMS)))

    async def _stream(self, client: Client, number: int) -> None:
        body = {"prompt": f"Story {number} begins", "max_tokens": 60, "stream": True, "ignore_eos": True}
        while not self.stop:
            try:
                await client.request(COMPLETIONS, body)
                self.whole += 1
            except RequestError as error:
                self.failures.append(f"{type(error).__name__}: {error.message}")
                await asyncio.sleep(0.5)


def under_load(url: str, key_file: Path, until: Callable[[], bool], limit_s: float) -> Load:
    load = Load(url, key_file)

    async def both() -> None:
        running = asyncio.ensure_future(load.run())
        deadline = time.monotonic() + limit_s
        try:
            while not await asyncio.to_thread(until) and time.monotonic() < deadline:
                await asyncio.sleep(1)
        finally:
            load.stop = True
            await running

    run(both())
    return load


def handover(bed: Bed, slurm: Slurm) -> bool:
    """A job over two nodes follows another one, while four streams go on."""
    kept = ("--renew", "--max-jobs", "2", "--slurm", "signal_s=40", "--slurm", "renew_margin_s=20", "--time", "8:00")
    began = time.monotonic()
    bed.must("up", str(bed.model), "--name", "served", *JOB, "--nodes", "2", *PAIR, *SMALL, *kept)
    print(f"handover: ready after {time.monotonic() - began:.0f} s", flush=True)
    proxy = bed.start("proxy", "served", "--json", "--bind", bed.hosts.address("login"))
    place = bed.home / "deployments" / "served" / "proxy.json"
    wait_for(place.exists, 60, "the proxy")
    url = f"http://{bed.hosts.address('login')}:{json.loads(place.read_text())['port']}"
    over: list[float] = []

    def followed() -> bool:
        with contextlib.suppress(ValueError, KeyError):
            if bed.status("served")["state"] == "stopped":
                over.append(time.monotonic())
        return bool(over) and time.monotonic() - over[0] > 20

    load = under_load(url, bed.home / "deployments" / "served" / "key", followed, 1200)
    for pid, line in bed.hosts.processes("login"):
        if "corral proxy served" in line:
            os.kill(pid, 2)
    figures = json.loads(proxy.communicate(timeout=60)[0])
    good = bool(over) and not load.failures and figures["failed"] == 0 and figures["switch_overs"] >= 1
    print(f"handover: {load.whole} whole streams, failures {load.failures[:3]}, proxy {figures}", flush=True)
    bed.corral("down", "--all")
    return good


def restart(bed: Bed, slurm: Slurm) -> bool:
    """Over ssh: a node is cut off and comes back; the gang is started again and answers as before."""
    up = ("up", str(bed.model), "--name", "gang", "--hosts", "n1,n2", *PAIR, *SMALL, "--restart", "3", "--json")
    endpoint = json.loads(bed.must(*up))["endpoint"]
    words = ("complete", "Once upon a time", "--deployment", "gang", "--max-tokens", "8", "--temperature", "0")
    before = bed.must(*words)
    began = time.monotonic()
    bed.hosts.cut("n2")
    wait_for(lambda: bed.status("gang")["state"] != "ready", 120, "the loss was noticed")
    noticed = time.monotonic() - began
    bed.hosts.heal("n2")
    bed.wait("gang", "ready", 600)
    print(f"restart: noticed after {noticed:.0f} s, ready again after {time.monotonic() - began:.0f} s", flush=True)
    same = bed.must(*words) == before
    bed.corral("down", "gang")
    left = [bed.hosts.processes(node) for node in ("n1", "n2")]
    print(f"restart: the same words {same}, left {left}, {endpoint['model']}", flush=True)
    return same and left == [[], []]


def preemption(bed: Bed, slurm: Slurm) -> bool:
    """A batch over three jobs; those of one node are preempted, come back, and every row has one answer."""
    rows, output = bed.folder / "rows.jsonl", bed.folder / "out.jsonl"
    rows.write_text("".join(json.dumps({"id": n, "prompt": f"Row {n}"}) + "\n" for n in range(ROWS)))
    slurm.run("scontrol", "update", "PartitionName=debug", "PriorityTier=10")
    bed.must("batch", str(rows), "-o", str(output), "--start", str(bed.model), *JOB, "--time", "30:00",
             "--jobs", "3", *SMALL[:4], "--max-tokens", "48", "--param", "ignore_eos=true")  # fmt: skip

    def standing() -> Any:
        return json.loads(bed.must("batch", "status", str(output), "--json"))

    wait_for(lambda: output.exists() and output.stat().st_size > 0, 600, "the first rows")
    node = slurm.run("squeue", "-h", "-t", "R", "-o", "%N").stdout.split()[0]
    rival = ["sbatch", "--parsable", "-p", "debug", "-t5", "-o", "/dev/null", "--exclusive", f"--nodelist={node}"]
    job = slurm.run(*rival, "--wrap", "sleep 600").stdout.strip()
    wait_for(lambda: "RUNNING" in slurm.run("squeue", "-h", "-j", job, "-o", "%T").stdout, 120, "the rival's start")
    print(f"preemption of {node}: {[one['text'] for one in standing()['jobs']]}", flush=True)
    slurm.run("scancel", job)
    wait_for(lambda: standing()["state"] == "done", 1500, f"the end, last {standing()}")
    ids = [json.loads(line)["id"] for line in output.read_bytes().splitlines()]  # text also splits at U+2028
    print(f"preemption: {len(ids)} rows, {len(set(ids))} different", flush=True)
    return sorted(ids) == list(range(ROWS))


SCENARIOS = {"handover": handover, "restart": restart, "preemption": preemption}


def main() -> None:
    chosen = sys.argv[1:] or list(SCENARIOS)
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "corral").mkdir()
        for part in ("engines", "models", "cache"):
            (KEPT / part).mkdir(parents=True, exist_ok=True)
            (folder / "corral" / part).symlink_to(KEPT / part)
        names = ("login", "n1", "n2", "n3", "n4")
        with (
            Hosts(folder / "hosts", names, shared=[folder, KEPT]) as hosts,
            Slurm(hosts, settings=PREEMPTION) as slurm,
        ):
            bed = Bed(folder, hosts)
            bed.must("engine", "install", "cpu")
            bad = [one for one in chosen if not SCENARIOS[one](bed, slurm)]
            bed.corral("down", "--all")
    sys.exit(f"lost something: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
