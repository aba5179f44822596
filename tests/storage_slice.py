"""A fleet and a batch on a storage that fails: `python -m tests.storage_slice [--minutes 1] [--seed 1] [--on ssh]`.

Everything of Corral runs with `storage_shim.c` loaded: opening, reading, writing and listing files of CORRAL_HOME
fails at random, is short or takes long. Meanwhile clients stream through the gateway, keeper, gateway and engines are
killed, and commands are typed. Then the storage is well again, and everything has to be as if nothing had happened:
no key was refused, no row is lost or done twice, no engine was started twice, and none is left after `down`. The
members run on this machine, on hosts with sshd, or as jobs of SLURM, whose agents have the failing storage too.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.conftest import ROOT
from tests.stand_in import install_stand_in
from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm
from tests.tiny_llama import make_tiny_llama
from tests.until import polled

ENGINE = ROOT / "tests" / "streaming_engine.py"
SMALL = ("--partition", "gpu", "--slurm", "gpus_per_node=0", "--slurm", "cpus_per_task=2", "--slurm", "mem=4G")
MEMBERS, STREAMS, ROWS, PATIENCE_S = 2, 4, 400, 240.0


def build_shim(folder: Path) -> Path:
    """The library; the caller has made sure that there is a compiler."""
    made = folder / "storage_shim.so"
    source = ROOT / "tests" / "storage_shim.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


@dataclass
class Slice:
    """One run, and what was seen."""

    folder: Path
    seed: int
    hosts: Hosts | None = None  # on which the members run
    slurm: bool = False  # as jobs of a cluster, whose login host is the first of them
    answers: Counter[str] = field(default_factory=Counter)  # HTTP status, or the name of an error
    commands: Counter[str] = field(default_factory=Counter)  # verb and exit code
    refusals: Counter[str] = field(default_factory=Counter)  # the last line of a command that ended with another code
    problems: list[str] = field(default_factory=list)
    outputs: list[Path] = field(default_factory=list)  # of batches, one after the other
    well: threading.Event = field(default_factory=threading.Event)  # no further batch begins
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.home, self.switch = self.folder / "home" / "corral", self.folder / "failing"
        self.read_only = self.folder / "read-only"
        self.chance = random.Random(self.seed)
        self.rows = self.folder / "rows.jsonl"
        install_stand_in(self.home, ENGINE, python="/usr/bin/python3")
        self.model = make_tiny_llama(self.folder / "tiny")
        self.rows.write_text("".join(json.dumps({"id": n, "prompt": f"row {n}"}) + "\n" for n in range(ROWS)))
        self.env = {
            **os.environ, "HOME": str(self.folder / "home"), "CORRAL_HOME": str(self.home), "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": str(build_shim(self.folder)), "STORAGE_ROOT": str(self.home),
            "STORAGE_SWITCH": str(self.switch), "STORAGE_SEED": str(self.seed),
            "STORAGE_READ_ONLY": str(self.read_only),
        }  # fmt: skip
        self.words: tuple[str, ...] = ()  # of `up`: where the members run
        if self.hosts and self.slurm:
            self.words = (*SMALL, "--time", "60:00", "--bind", self.hosts.address("login"))
        elif self.hosts:
            self.env["CORRAL_SSH"] = shlex.join(self.hosts.ssh_command)
            self.words = ("--hosts", "n1,n2")

    def corral(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *words]
        if self.hosts and self.slurm:
            env = {**self.env, "PYTHONPATH": str(ROOT / "src")}
            done = self.hosts.exec("login", command, env=env, check=False, timeout=PATIENCE_S)
        else:
            done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=PATIENCE_S)
        self.commands[f"{words[0]} {done.returncode}"] += 1
        if done.returncode:
            said = " / ".join(done.stderr.strip().splitlines()[-3:])
            self.refusals[f"{words[0]} {done.returncode}: {re.sub(r'[0-9]+', '#', said)[-400:]}"] += 1
        if "Traceback" in done.stderr or "unexpected error" in done.stderr:
            self.problems.append(f"`corral {' '.join(words)}`: {done.stderr[-4000:]}")
        return done

    def processes(self, word: str = "") -> Iterator[tuple[int, dict[str, str]]]:
        """The processes of this home with a word in their command lines, and their environments."""
        folder = str(self.folder).encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (entry / "environ").read_bytes()
                is_ours = b"CORRAL_HOME=" in environ or b"CORRAL_LAUNCH=" in environ
                if is_ours and folder in environ and word.encode() in (entry / "cmdline").read_bytes():
                    pairs = (one.decode(errors="replace").partition("=") for one in environ.split(b"\0"))
                    yield int(entry.name), {name: value for name, _, value in pairs}

    def engines(self) -> Counter[str]:
        """How many engines there are for each launch."""
        return Counter(env.get("CORRAL_LAUNCH", "?") for _, env in self.processes(ENGINE.name))

    # who uses it

    def ask(self, url: str, key: str, number: int) -> None:
        """Stream again and again, as a client that does not ask again what was refused."""
        address = urlsplit(url)
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"{number}"}], "stream": True}
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        while not self.over.is_set():
            connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
            try:
                connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
                answer = connection.getresponse()
                answer.read()
                self.answers[str(answer.status)] += 1
            except (OSError, http.client.HTTPException) as error:
                self.answers[type(error).__name__] += 1
            finally:
                connection.close()
            self.over.wait(0.05)

    def batches(self) -> None:
        """Batches one after the other, each continued for as long as it does not end well."""
        while not self.well.is_set():
            self.outputs.append(self.home / f"out-{len(self.outputs)}.jsonl")
            output = str(self.outputs[-1])
            words = ("batch", str(self.rows), "-o", output, "--deployment", "herd", "--max-tokens", "4")
            tries = itertools.cycle([words, ("batch", "resume", output)])
            while self.corral(*next(tries)).returncode and not self.over.is_set():
                self.over.wait(0.5)

    def kill(self, word: str) -> None:
        for pid, _ in list(self.processes(word))[:1]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def operate(self) -> None:
        """What happens to it, and what somebody types."""
        what = self.chance.choice(["keep", "gateway", ENGINE.name, "ps", "status", "ps"])
        if what in ("ps", "status"):
            self.corral(*([what] if what == "ps" else [what, "herd"]))
            return
        self.kill(what if what == ENGINE.name else f"corral\0{what}" if what == "gateway" else "fleet\0keep")
        if what == "keep":
            self.corral("scale", "herd", str(MEMBERS))  # starts it again

    # the run

    def run(self, seconds: float) -> None:
        up = self.corral("up", str(self.model), "--name", "herd", "--replicas", str(MEMBERS), "--context", "128",
                         "--env", "STREAM_TOKENS=8", "--env", "STREAM_ITL_MS=10", *self.words, "--json")  # fmt: skip
        assert up.returncode == 0, up.stderr
        endpoint = json.loads(up.stdout)["endpoint"]
        key = Path(endpoint["key_file"]).read_text().strip()
        url = endpoint["base_url"]
        threads = [threading.Thread(target=self.ask, args=(url, key, number)) for number in range(STREAMS)]
        self.batching = threading.Thread(target=self.batches)
        for thread in (*threads, self.batching):
            thread.start()
        self.switch.touch()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.operate()
            self.note_doubles()
            time.sleep(self.chance.uniform(0.5, 2.0))
        self.switch.unlink()
        self.recover()
        self.serve_read_only()
        self.over.set()
        for thread in (*threads, self.batching):
            thread.join(PATIENCE_S)
        self.end()

    def note_doubles(self) -> None:
        if self.engines() and max(self.engines().values()) > 1 and polled(self.no_doubles, 10.0) is None:
            self.problems.append(f"engines by launch: {dict(self.engines())}")

    def no_doubles(self) -> bool:
        return max(self.engines().values(), default=0) <= 1

    def recover(self) -> None:
        """With a storage that works, the fleet is whole and the batch ends."""
        self.corral("scale", "herd", str(MEMBERS))
        if polled(self.is_whole, PATIENCE_S) is None:
            told = (self.corral(*words).stdout[-3000:] for words in (("status", "herd"), ("events", "herd")))
            self.problems.append("never whole again: " + "\n".join(told))
        self.well.set()
        self.batching.join(PATIENCE_S)
        if self.batching.is_alive():
            self.problems.append(f"the batch {self.outputs[-1].name} never ended")
        for output in self.outputs:
            found = [json.loads(line)["id"] for line in output.read_bytes().splitlines()]
            if sorted(found) != list(range(ROWS)):
                self.problems.append(f"{output.name}: {len(found)} rows, {len(set(found))} different, of {ROWS}")
        if self.answers["401"]:
            self.problems.append(f"{self.answers['401']} requests with a good key were refused")

    def serve_read_only(self) -> None:
        """A home that cannot be written to serves, and can be looked at."""
        self.read_only.touch()
        before = self.answers["200"]
        for words in (("ps",), ("status", "herd"), ("events", "herd"), ("logs", "herd-1")):
            if self.corral(*words).returncode:
                self.problems.append(f"`corral {' '.join(words)}` failed in a read-only home")
        if polled(lambda: self.answers["200"] >= before + 20, PATIENCE_S) is None or not self.no_doubles():
            self.problems.append("it does not serve from a read-only home")
        self.read_only.unlink()

    def is_whole(self) -> bool:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            now: Any = json.loads(self.corral("status", "herd", "--json").stdout)
            states = [(one.get("status") or {}).get("state") for one in now["members"] if not one["leaving"]]
            return states == ["ready"] * MEMBERS and sorted(self.engines().values()) == [1] * MEMBERS
        return False

    def end(self) -> None:
        down = self.corral("down", "--all")
        if down.returncode:
            self.problems.append(f"down: {down.stderr[-400:]}")
        if polled(lambda: not list(self.processes()), 60.0) is None:
            left = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid, _ in self.processes()]
            self.problems.append(f"left running: {left}")


@contextlib.contextmanager
def open_machines(folder: Path, where: str) -> Iterator[Hosts | None]:
    """The hosts on which members run, unless that is this machine."""
    if where == "local":
        yield None
        return
    names = ("login", "n1", "n2") if where == "slurm" else ("n1", "n2")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(folder / "hosts", names, shared=[folder]))
        if where == "slurm":
            stack.enter_context(Slurm(hosts))
        yield hosts


@contextlib.contextmanager
def open_slice(folder: Path, seed: int, where: str = "local") -> Iterator[Slice]:
    """A slice, of which nothing runs on."""
    with open_machines(folder, where) as hosts, _ended(Slice(folder, seed, hosts, where == "slurm")) as made:
        yield made


@contextlib.contextmanager
def _ended(made: Slice) -> Iterator[Slice]:
    try:
        yield made
    finally:
        made.over.set()
        made.switch.unlink(missing_ok=True)
        made.read_only.unlink(missing_ok=True)
        for pid, _ in list(made.processes()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--on", choices=["local", "ssh", "slurm"], default="local")
    given = parser.parse_args()
    folder = tempfile.TemporaryDirectory(prefix="storage-")
    with folder as name, open_slice(Path(name), given.seed, given.on) as made:
        made.run(60 * given.minutes)
        seen = {
            "batches": len(made.outputs),
            "answers": made.answers,
            "commands": made.commands,
            "refusals": made.refusals,
        }
        print(json.dumps({"seed": given.seed, "on": given.on, **seen, "refusals": made.refusals}, indent=1))
        for problem in made.problems:
            print(problem)
        sys.exit(bool(made.problems))


if __name__ == "__main__":
    main()
