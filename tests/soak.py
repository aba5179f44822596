"""The soak: `python tests/soak.py --minutes 30 [--seed N]`, as root (`make soak`).

A deployment over two nodes (own network, own sshd, stand-in engines), its tunnel, and the batch service on a small
disk, used with the official SDK without a pause, while faults strike at random: kill -9, SIGSTOP, a cut cable, a full
disk, no free descriptors, and steps of the service's clock (of Python's `time.time`: libfaketime breaks `select`
in the same process). Beside it, hostile clients attack a gateway (`hostile_clients.py`). An operator brings the
deployment up again when it has ended. At the end every row of every batch has exactly one answer, nothing is left
running, and no process that lived on has more threads, descriptors or memory than a little above what it began with.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import openai

from corral.base.processes import terminated_as_interrupted
from tests.stand_in import install_stand_in
from tests.testbed import missing
from tests.testbed.disk import small_disk
from tests.testbed.hosts import Hosts
from tests.tiny_llama import make_tiny_llama

ROOT = Path(__file__).parent.parent
NODES = ("node1", "node2")
NAME = "soak"
ROWS = 1500
DISK_MIB = 420
CLOCK = """
import os, time
_real, _file = time.time, os.environ["SOAK_CLOCK"]
def _stepped():
    try:
        with open(_file) as file:
            return _real() + float(file.read() or 0)
    except (OSError, ValueError):
        return _real()
time.time = _stepped
"""  # a sitecustomize module
GROWTH_BYTES, GROWTH_FILES, GROWTH_THREADS = 96 << 20, 24, 8
ENDED = ("completed", "failed", "cancelled", "expired")


@dataclass
class Figures:
    """What happened."""

    faults: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    rows: int = 0
    brought_up: int = 0
    service_starts: int = 0
    waits: Counter[str] = field(default_factory=Counter)  # seen in batches' status
    problems: list[str] = field(default_factory=list)
    grown: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Size:
    """What a process has of the machine."""

    threads: int
    files: int
    memory_bytes: int


def size_of(pid: int) -> Size | None:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
        found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return Size(int(found["Threads"]), files, int(found["VmRSS"].split()[0]) << 10)
    except (OSError, KeyError):
        return None


class Soak:
    """Everything that runs, and what is done to it."""

    def __init__(self, folder: Path, hosts: Hosts, chance: random.Random) -> None:
        self.folder, self.hosts, self.chance, self.figures = folder, hosts, chance, Figures()
        self.home, self.disk = folder / "home" / "corral", folder / "disk"
        self.clock = folder / "clock"
        self.env = {**os.environ, "HOME": str(folder / "home"), "CORRAL_HOME": str(self.home)}
        self.env["CORRAL_SSH"] = " ".join(hosts.ssh_command)
        self.model = make_tiny_llama(folder / "tiny")
        self.service: subprocess.Popen[str] | None = None
        self.url = self.key = ""
        self.over, self.given_up = threading.Event(), threading.Event()
        self.smallest: dict[tuple[str, int], Size] = {}

    # the deployment and its service

    def corral(self, *words: str, limit_s: float = 300) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *words]
        try:
            return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"{words} did not end within {limit_s:g} s")

    def state(self) -> str:
        with contextlib.suppress(ValueError, KeyError):
            return str(json.loads(self.corral("status", NAME, "--json", limit_s=60).stdout)["state"])
        return "unknown"

    def bring_up(self) -> None:
        words = ["up", str(self.model), "--name", NAME, "--hosts", ",".join(NODES), "--restart", "50"]
        done = self.corral(*words, "--node-timeout", "5", "--env", "STUB_OPTIONS=pause=0.05")
        self.figures.brought_up += not done.returncode
        if done.returncode and done.stderr:
            print(f"  up: {done.stderr.strip().splitlines()[-1][:160]}", flush=True)

    def operate(self) -> None:
        """Bring the deployment up again whenever it has ended; start the service again whenever it is gone."""
        while not self.over.wait(2):
            if self.service is None or self.service.poll() is not None:
                self.start_service()
            if self.state() in ("failed", "stopped"):
                self.corral("down", NAME)
                self.bring_up()

    def start_service(self) -> None:
        env = dict(self.env)
        env |= {"PYTHONPATH": str(self.folder / "site"), "SOAK_CLOCK": str(self.clock)}
        command = [sys.executable, "-m", "corral", "batch", "serve", "--deployment", NAME, "--folder", str(self.disk),
                   "--port", "0", "--json", "--any-model"]  # fmt: skip
        with (self.folder / "service.log").open("ab") as log:
            self.service = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.service.stdout
        line = self.service.stdout.readline()
        told = json.loads(line) if line.strip() else {}
        if "url" not in told:
            print(f"  the service did not start: {line.strip()[:200]}", flush=True)
        else:
            self.url, self.key = told["url"], Path(told["key_file"]).read_text().strip()
            self.figures.service_starts += 1

    # the user

    def use(self) -> None:
        """Batches, one after the other, each checked."""
        number = 0
        while not self.over.is_set():
            self.one_batch(number)
            number += 1

    def one_batch(self, number: int) -> None:
        ids = [f"b{number}-r{n}" for n in range(ROWS)]
        body = {"model": "m", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 4}
        lines = [json.dumps({"custom_id": one, "method": "POST", "url": "/v1/chat/completions", "body": body})
                 for one in ids]  # fmt: skip
        data = "\n".join(lines).encode()
        file = self.patiently(lambda c: c.files.create(file=("rows.jsonl", io.BytesIO(data)), purpose="batch")).id
        made = self.patiently(lambda c: c.batches.create(input_file_id=file, endpoint="/v1/chat/completions",
                                                         completion_window="24h"))  # fmt: skip
        while (batch := self.patiently(lambda c: c.batches.retrieve(made.id))).status not in ENDED:
            if waiting := (batch.model_extra or {}).get("waiting_for"):
                self.figures.waits[waiting["code"]] += 1
            time.sleep(0.5)
        self.judge(batch, ids)
        for one in filter(None, (file, batch.output_file_id, batch.error_file_id)):
            with contextlib.suppress(openai.NotFoundError):
                self.patiently(functools.partial(_delete, one))

    def judge(self, batch: Any, ids: list[str]) -> None:
        if batch.status != "completed" or batch.error_file_id:
            why = batch.errors.data[0].message if batch.errors and batch.errors.data else "rows failed"
            self.figures.problems.append(f"{batch.id} is {batch.status}: {why}")
        if batch.output_file_id:
            text = self.patiently(lambda c: c.files.content(batch.output_file_id).text)
            found = Counter(json.loads(line)["custom_id"] for line in text.splitlines())
            if found != Counter(ids):
                lost, twice = set(ids) - set(found), [one for one, times in found.items() if times > 1]
                self.figures.problems.append(f"{batch.id}: {len(lost)} rows lost, {len(twice)} more than once")
            self.figures.rows += len(found)
        self.figures.batches += 1
        print(f"  batch {self.figures.batches}: {batch.status}", flush=True)

    def patiently(self, ask: Callable[[openai.OpenAI], Any]) -> Any:
        """Ask until the service answers: it may be dead, stopped, full or starting."""
        while not self.given_up.is_set():
            try:
                with openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, timeout=10, max_retries=0) as client:
                    return ask(client)
            except openai.NotFoundError:
                raise
            except (openai.APIConnectionError, openai.APIStatusError, openai.OpenAIError):
                time.sleep(0.5)
        raise SystemExit  # of this thread

    # the faults

    def victims(self) -> dict[str, list[int]]:
        """Processes of this soak's own, by what they are."""
        found: dict[str, list[int]] = {"engine": [], "agent": [], "tunnel": [], "ssh": [], "service": []}
        for host in NODES:
            for pid, line in self.hosts.processes(host):
                for kind, word in (("engine", "stub_engine.py"), ("agent", "agent.py")):
                    found[kind] += [pid] * (word in line)
        with contextlib.suppress(OSError, ValueError, KeyError):
            holder = json.loads((self.home / "deployments" / NAME / "tunnel.json").read_text())["holder"]["pid"]
            if str(self.home).encode() in Path(f"/proc/{holder}/environ").read_bytes():
                found["tunnel"] = [holder]
                children = Path(f"/proc/{holder}/task/{holder}/children").read_text().split()
                found["ssh"] = [int(child) for child in children]
        if self.service and self.service.poll() is None:
            found["service"] = [self.service.pid]
        return found

    def strike(self) -> None:
        kind = self.chance.choices(
            ["kill engine", "kill agent", "kill tunnel", "kill ssh", "kill service", "stop", "cut cable", "full disk",
             "no descriptors", "clock step"], [3, 1, 2, 3, 3, 4, 2, 3, 3, 3])[0]  # fmt: skip
        with contextlib.suppress(ProcessLookupError, IndexError, RuntimeError, OSError):
            self.do(kind)
            self.figures.faults[kind] += 1
            print(f"fault: {kind}", flush=True)

    def do(self, kind: str) -> None:
        found = self.victims()
        seconds = self.chance.uniform(1, 6)
        if kind.startswith("kill "):
            os.kill(self.chance.choice(found[kind.removeprefix("kill ")]), signal.SIGKILL)
        elif kind == "stop":
            pid = self.chance.choice([pid for pids in found.values() for pid in pids])
            os.kill(pid, signal.SIGSTOP)
            self.over.wait(seconds)
            os.kill(pid, signal.SIGCONT)
        elif kind == "cut cable":
            host = self.chance.choice(NODES)
            self.hosts.cut(host)
            self.over.wait(seconds)
            self.hosts.heal(host)
        elif kind == "full disk":
            self.fill(seconds)
        elif kind == "no descriptors":
            self.starve(found["service"][0], seconds)
        else:
            self.clock.write_text(self.chance.choice(["0", "3600", "-3600", "86400", "-86400"]))

    def fill(self, seconds: float) -> None:
        filler = self.disk / "filler"
        try:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))
            self.over.wait(seconds)
        finally:
            filler.unlink(missing_ok=True)

    def starve(self, pid: int, seconds: float) -> None:
        import resource

        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = size_of(pid)
        if used is None:
            return
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used.files, before[1]))
        self.over.wait(seconds)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    # what may not grow

    def measure(self) -> None:
        for kind in ("service", "tunnel", "agent"):
            for pid in self.victims()[kind]:
                if (now := size_of(pid)) is not None:  # the smallest seen: under load all are large
                    seen = self.smallest.get((kind, pid), now)
                    self.smallest[kind, pid] = Size(
                        *(min(pair) for pair in zip(astuple(seen), astuple(now), strict=True))
                    )

    def compare(self) -> None:
        for kind in ("service", "tunnel", "agent"):
            for pid in self.victims()[kind]:
                first, now = self.smallest.get((kind, pid)), size_of(pid)
                if first is None or now is None:
                    continue
                grown = [now.threads - first.threads, now.files - first.files, now.memory_bytes - first.memory_bytes]
                self.figures.grown[f"{kind} {pid}"] = grown
                limits = (GROWTH_THREADS, GROWTH_FILES, GROWTH_BYTES)
                if any(value > limit for value, limit in zip(grown, limits, strict=True)):
                    self.figures.problems.append(f"{kind} {pid} grew: threads, descriptors, bytes {grown}")

    def left(self) -> list[str]:
        """Processes of this soak that still run."""
        mine = f"CORRAL_HOME={self.home}".encode()
        found = [line for host in NODES for _, line in self.hosts.processes(host)]
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(entry.name) != os.getpid() and mine in (entry / "environ").read_bytes():
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found += [line] if line else []
        return found

    def run(self, minutes: float) -> None:
        self.bring_up()
        self.start_service()
        ending = time.monotonic() + minutes * 60
        user = threading.Thread(target=self.use, daemon=True)
        operator = threading.Thread(target=self.operate, daemon=True)
        user.start()
        operator.start()
        while time.monotonic() < ending:
            time.sleep(self.chance.uniform(2, 14))
            self.measure()
            self.strike()
        print("no more faults: the last batch may end", flush=True)
        self.clock.write_text("0")
        done = self.figures.batches
        deadline = time.monotonic() + 600
        while self.figures.batches < done + 2 and time.monotonic() < deadline:
            time.sleep(1)
        if self.figures.batches < done + 2:
            self.figures.problems.append("batches did not end within 600 s after the last fault")
        self.over.set()
        operator.join(120)
        user.join(120)  # the batch under way ends too: what is left open then belongs to nobody
        self.given_up.set()
        user.join(20)
        time.sleep(10)
        self.compare()
        self.end()

    def end(self) -> None:
        if self.service and self.service.poll() is None:
            self.service.terminate()
            try:
                if self.service.wait(60):
                    self.figures.problems.append(f"the service ended with {self.service.returncode}")
            except subprocess.TimeoutExpired:
                self.figures.problems.append("the service did not end within 60 s of SIGTERM")
                self.service.kill()
        done = self.corral("down", NAME)
        if done.returncode:
            self.figures.problems.append(f"down: {done.stderr.strip()[-200:]}")
        deadline = time.monotonic() + 90  # ssh keeps a shared connection for a minute
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(1)
        self.figures.problems += [f"left running: {line[:200]}" for line in left]


def _delete(file: str, client: openai.OpenAI) -> Any:
    return client.files.delete(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    if missing():
        sys.exit(f"soak: {missing()}")
    print(f"soak: {given.minutes:g} minutes, seed {given.seed}", flush=True)
    words = ["--seconds", str(given.minutes * 60), "--seed", str(given.seed)]
    hostile = subprocess.Popen([sys.executable, "-m", "tests.hostile_clients", *words], cwd=ROOT)
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        folder = Path(place)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(CLOCK)
        install_stand_in(folder / "home" / "corral", ROOT / "tests" / "stub_engine.py")
        with small_disk(folder / "disk", DISK_MIB << 20, 0o700), Hosts(folder / "hosts", shared=[folder]) as hosts:
            soak = Soak(folder, hosts, random.Random(given.seed))
            soak.clock.write_text("0")
            try:
                with terminated_as_interrupted():
                    soak.run(given.minutes)
            except BaseException:
                soak.over.set()
                soak.end()
                raise
            log = (folder / "service.log").read_text(errors="replace")
            known = log.count("[Errno 24] Too many open files")  # asyncio tells each that it cannot accept
            if log.count("Traceback") > known:
                soak.figures.problems.append("the service's log holds a traceback: " + log[:3000])
    if hostile.wait(600):
        soak.figures.problems.append("hostile clients had an effect on a gateway: see above")
    print(json.dumps(vars(soak.figures), indent=1))
    if soak.figures.problems:
        sys.exit(1)


if __name__ == "__main__":
    main()
