"""Hosts with real sshd, and `corral` on the machine that reaches them, with a stand-in engine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.stand_in import install_stand_in
from tests.testbed.hosts import Hosts
from tests.tiny_llama import make_tiny_llama
from tests.until import LIMIT_S, polled

NODES = ("node1", "node2")


@dataclass
class Bench:
    """Hosts, and `corral` on the machine that reaches them."""

    hosts: Hosts
    env: dict[str, str]
    model: Path

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *arguments]
        return subprocess.run(command, env={**self.env, **env}, capture_output=True, text=True, timeout=180)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "corral", *arguments]
        return subprocess.Popen(
            command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def up(self, name: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run("up", str(self.model), "--name", name, "--hosts", ",".join(NODES), *options)

    def status(self, name: str) -> Any:
        return json.loads(self.run("status", name, "--json").stdout)

    def wait(self, name: str, wanted: Callable[[Any], Any]) -> Any:
        found: list[Any] = [None]

        def look() -> bool:
            found[0] = self.status(name)
            return bool(wanted(found[0]))

        if not polled(look, LIMIT_S):
            raise AssertionError(f"never: {found[0]}")
        return found[0]

    def failed(self, name: str) -> Any:
        """How it failed, once its agents have noticed. How long that takes is `make faults`' affair."""
        return self.wait(name, lambda status: status["state"] == "failed")

    def engines(self, host: str) -> list[int]:
        return [pid for pid, line in self.hosts.processes(host) if "stub_engine.py" in line]

    def agents(self, host: str) -> list[int]:
        return [pid for pid, line in self.hosts.processes(host) if "agent.py" in line]

    @property
    def home(self) -> Path:
        """Corral's home, here and on the nodes."""
        return Path(self.env["CORRAL_HOME"])

    def folder(self, name: str) -> Path:
        return self.home / "deployments" / name

    def mend(self) -> None:
        """Every node is on, and its link is up."""
        for host in NODES:
            if not self.hosts.pid(host):
                self.hosts.power_on(host)
            self.hosts.heal(host)

    def nothing_left(self) -> None:
        left: dict[str, Any] = {}

        def none() -> bool:
            left.update({host: self.hosts.processes(host) for host in NODES})
            return not any(left.values())

        assert polled(none, LIMIT_S), left


@contextlib.contextmanager
def open_bench(folder: Path) -> Iterator[Bench]:
    """Two nodes that share a home with this machine; `local` and `mine` are empty there, and each node's own."""
    home = folder / "home" / "corral"
    env = {**os.environ, "HOME": str(folder / "home"), "CORRAL_HOME": str(home)}
    install_stand_in(home, ROOT / "tests" / "stub_engine.py")
    private = [folder / "local", folder / "mine"]
    for path in private:
        path.mkdir()
    with Hosts(folder / "hosts", shared=[folder], private=private) as hosts:
        env["CORRAL_SSH"] = " ".join(hosts.ssh_command)
        made = Bench(hosts, env, make_tiny_llama(folder / "tiny"))
        yield made
        made.mend()
        made.run("down", "--all")
