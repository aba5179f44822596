"""Real vLLM on the CPU as jobs of a real SLURM: one node, and two with either link; asked from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import corral as package
from tests.integration.conftest import Corral
from tests.testbed import missing
from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm

pytestmark = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))
# the simulated GPUs are only GRES: asked for, allocated, and left alone by the CPU engine
JOB = ("--partition", "gpu", "--time", "30:00", "--slurm", "cpus_per_task=2", "--slurm", "mem=6G",
       "--slurm", "gpus_per_node=0", "--slurm", "gres=gpu:h100:1")  # fmt: skip
OPTIONS = ("--set", "eager=true", "--set", "max_model_len=512", "--patience", "30", "--json")


class Cluster:
    """A user on the login host, and another machine that reaches only that host by ssh."""

    def __init__(self, hosts: Hosts, slurm: Slurm, home: Path, outside: dict[str, str]) -> None:
        self.hosts, self.slurm, self.home = hosts, slurm, home
        self.outside = outside | {"CORRAL_SSH": " ".join(hosts.ssh_command)}
        source = str(Path(package.__file__).parent.parent)
        self.env = {"CORRAL_HOME": str(home), "PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}

    def corral(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *arguments]
        return self.hosts.exec("login", command, env=self.env, check=False, timeout=600)

    def far_corral(self) -> str:
        """How the login host's Corral is called over ssh."""
        words = " ".join(f"{name}={value}" for name, value in self.env.items())
        return f"env {words} {sys.executable} -m corral"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, corral: Corral, tiny_model: Path) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("jobs")
    home = folder / "corral"
    home.mkdir()
    for name in ("engines", "models", "cache"):
        (home / name).symlink_to((corral.home / name).resolve())
    kept = (corral.home / "engines").resolve().parent
    shared = [folder, kept, tiny_model.parent]
    with Hosts(folder / "hosts", ("login", "n1", "n2"), shared=shared) as hosts, Slurm(hosts) as slurm:
        found = Cluster(hosts, slurm, home, corral.env)
        yield found
        found.corral("down", "--all")


@pytest.mark.parametrize(("name", "split"), [
    ("one-node", ()),
    ("native", ("--nodes", "2", "--link", "native", "--set", "pipeline=2")),
    ("ray", ("--nodes", "2", "--link", "ray", "--set", "pipeline=2")),
])  # fmt: skip
def test_from_the_login_node_to_an_answer_on_a_laptop(
    cluster: Cluster, tiny_model: Path, name: str, split: tuple[str, ...]
) -> None:
    done = cluster.corral("up", str(tiny_model), "--name", name, *JOB, *split, *OPTIONS)
    log = cluster.corral("logs", name, "-n", "40").stdout
    assert done.returncode == 0, f"{done.stderr}\n{log}"
    assert "gres=gpu" in cluster.slurm.run("scontrol", "show", "job", "-dd").stdout
    command = [sys.executable, "-m", "corral", "tunnel", name, "--through", "login", "--corral", cluster.far_corral()]
    with subprocess.Popen(command, env=cluster.outside, text=True, stdout=subprocess.PIPE) as tunnel:
        try:
            assert tunnel.stdout
            url = tunnel.stdout.readline().strip().partition("=")[2]
            key = Path(tunnel.stdout.readline().partition("(cat ")[2].partition(")")[0]).read_text().strip()
            assert ask(url, key)
        finally:
            tunnel.terminate()
    assert cluster.corral("down", name).returncode == 0
    assert not cluster.slurm.run("squeue", "-h").stdout
    assert [cluster.hosts.processes(node) for node in ("n1", "n2")] == [[], []]


def ask(url: str, key: str) -> Any:
    """Retried until the forward stands."""
    body = json.dumps({"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    for attempt in range(50):
        try:
            with urllib.request.urlopen(
                urllib.request.Request(f"{url}/completions", body, headers), timeout=60
            ) as got:
                return json.load(got)["choices"][0]["text"]
        except OSError:
            if attempt == 49:
                raise
            subprocess.run(["sleep", "0.2"], check=True)
    return None
