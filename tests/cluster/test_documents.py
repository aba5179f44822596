"""The documents of docs/from as whole workflows, in order: what is downloaded is found, and fetched once.

Real sshd, slurmctld and Docker; stand-in engines; a hub that counts the bytes of weights it sends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import corral as package
from tests.cluster.bed import FILES
from tests.fake_hub import FakeHub
from tests.stand_in import install_stand_in
from tests.testbed import PATH, missing
from tests.testbed.containers import Docker
from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm
from tests.tiny_llama import make_tiny_llama
from tests.until import free_port

SOURCE = Path(package.__file__).parent.parent
ENGINE = Path(__file__).parent.parent / "fake_engine.py"
MODEL, WEIGHTS, IMAGE = "acme/tiny", "model.safetensors", "stand-in:1"
QUESTION = "Where was the 2020 World Series played?"
need_slurm = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))
need_docker = pytest.mark.skipif(bool(missing("containers")), reason=missing("containers"))


@dataclass
class User:
    """Who follows a document: `corral` on one machine, in a home of its own."""

    folder: Path
    hub: FakeHub
    repository: Path
    also: dict[str, str] = field(default_factory=dict)
    hosts: Hosts | None = None  # the machine is `login`, one of these

    @property
    def env(self) -> dict[str, str]:
        home = self.folder / "home"
        own = {"HOME": str(home), "CORRAL_HOME": str(home / "corral"), "XDG_CONFIG_HOME": str(home / "config"),
               "HF_HOME": str(home / "hf"), "HF_ENDPOINT": self.hub.url, "HF_HUB_OFFLINE": "0",
               "PYTHONPATH": str(SOURCE)}  # fmt: skip
        return {**os.environ, **own, **self.also}

    def types(self, *words: str, stdin: str | None = None) -> str:
        """A command that succeeds; what it prints."""
        done = self._run([sys.executable, "-m", "corral", *words], stdin)
        assert done.returncode == 0, f"corral {' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def shell(self, text: str) -> str:
        done = self._run(["bash", "-euc", text], None)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _run(self, command: list[str], stdin: str | None) -> subprocess.CompletedProcess[str]:
        if self.hosts:
            return self.hosts.exec("login", command, env=self.env, input=stdin or "", check=False, timeout=180)
        return subprocess.run(command, env=self.env, input=stdin or "", capture_output=True, text=True, timeout=180)

    def asks(self, name: str, path: str = "chat/completions") -> int:
        """A question as a program of its own asks it; the status of the answer."""
        endpoint = json.loads(self.types("status", name, "--json"))["endpoint"]
        key = Path(endpoint["key_file"]).read_text().strip()
        body = {"model": endpoint["model"], "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40}
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{endpoint['base_url']}/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)

    def fetched(self) -> float:
        """How often the weights were sent by the hub; requests for their headers send a little more than once."""
        size = (self.repository / WEIGHTS).stat().st_size
        return round(self.hub.served.get(WEIGHTS, 0) / size, 0)

    def launch(self, name: str) -> Any:
        return json.loads((self.folder / "home/corral/deployments" / name / "launch.json").read_text())


def user_of(folder: Path, hub: FakeHub, **more: Any) -> User:
    (folder / "home").mkdir(parents=True)
    return User(folder, hub, hub.repos[MODEL], **more)


# ------------------------------------------------------------------------------ 000 Kempner, 004 Harvard's workshop
@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, Path]]:
    folder = tmp_path_factory.mktemp("cluster")
    folder.parent.chmod(0o755)
    folder.chmod(0o755)
    with Hosts(folder / "hosts", ("login", "n1", "n2"), shared=[folder]) as hosts, Slurm(hosts):
        yield hosts, folder


@pytest.fixture
def lab(cluster: tuple[Hosts, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """A user of the cluster, with a stand-in engine; the hub is reached from the login node."""
    hosts, shared = cluster
    folder = shared / f"user{len(list(shared.glob('user*')))}"
    with FakeHub({MODEL: make_tiny_llama(shared / "repository")}, host=hosts.machine_address) as hub:
        user = user_of(folder, hub, hosts=hosts)
        install_stand_in(folder / "home" / "corral", ENGINE, source=SOURCE)
        yield user
        user._run([sys.executable, "-m", "corral", "down", "--all"], None)


def write_profile(user: User, name: str, text: str) -> None:
    file = user.folder / "home/config/corral/profiles" / f"{name}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


SLURM = """target = "slurm"
[slurm]
partition = "gpu"
gpus_per_node = 0
cpus_per_task = 2
mem = "4G"
time = "10:00"
"""


@need_slurm
def test_kempner_serves_what_the_cluster_has(lab: User, cluster: tuple[Hosts, Path]) -> None:
    """The base model by the catalogue's name, from the shared path under the repository's; nothing is fetched."""
    models = cluster[1] / "models"
    folder = make_tiny_llama(models / "Llama-3.1-8B")
    write_profile(lab, "my-kempner", f'{SLURM}[storage]\nmodels = "{models}"\n[defaults]\nmodel = "llama-3.1-8b"\n')
    assert "405b" in lab.types("plan", "--table", "--offline")
    lab.types("profile", "check", "my-kempner")
    assert f"{folder} --served-model-name" in lab.types("up", "--on", "my-kempner", "--dry-run", "--shell")
    lab.types("up", "--on", "my-kempner", "--served-name", str(folder), "--no-wait")
    lab.types("wait", "llama-3.1-8b")
    assert "RUNNING" in lab.types("status", "llama-3.1-8b").upper() or "READY" in lab.types("status").upper()
    assert lab.launch("llama-3.1-8b")["model_path"] == str(folder)
    body = json.dumps({"model": str(folder), "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0})
    asked = lab.shell(f"""
eval "$({sys.executable} -m corral env llama-3.1-8b)"
curl -sS "$OPENAI_BASE_URL/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H "Content-Type: application/json" -d '{body}'""")
    assert json.loads(asked)["choices"]
    assert lab.types("complete", "San Francisco is a", "--max-tokens", "7", "--temperature", "0")
    lab.types("logs", "llama-3.1-8b")
    lab.types("down", "llama-3.1-8b")
    assert lab.fetched() == 0


@need_slurm
def test_the_workshop_downloads_once(lab: User) -> None:
    write_profile(lab, "class", f'{SLURM}[defaults]\nmodel = "{MODEL}"\n')
    lab.types("pull", MODEL, "--on", "class")
    assert lab.fetched() == 1
    lab.types("up", "--on", "class")
    told = json.loads(lab.types("complete", "San Francisco is a", "--max-tokens", "7", "--logprobs", "1", "--json"))
    assert {"id", "object", "created", "model", "choices", "usage"} <= told.keys()
    rows = lab.folder / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"id": n, "prompt": f"Row {n}"}) + "\n" for n in range(20)))
    answers = lab.folder / "answers.jsonl"
    lab.types("batch", str(rows), "-o", str(answers), "--max-tokens", "32", "--temperature", "1")
    assert len(answers.read_text().splitlines()) == 20
    lab.types("top", "--once")
    lab.types("down", "tiny")
    assert lab.fetched() == 1


# ---------------------------------------------------------------------------------------------- 001 Lambda, one node
@need_docker
def test_one_node_with_docker_downloads_once(tmp_path: Path) -> None:
    with FakeHub({MODEL: make_tiny_llama(tmp_path / "repository")}) as hub, Docker(tmp_path / "d") as docker:
        docker.import_image(IMAGE, FILES)
        user = user_of(tmp_path / "user", hub, also={**docker.env, "PATH": PATH})
        sets = ("--set", "hardware.gpus=1xH100", "--set", f"runtime.image={IMAGE}")
        user.types("profile", "init", "my-box", "--from", "single-node-docker", *sets)
        user.types("pull", MODEL)
        assert user.fetched() == 1
        assert "docker" in user.types("up", MODEL, "--on", "my-box", "--dry-run", "--shell")
        box = ("--runtime", "docker", "--runtime-option", f"image={IMAGE}")  # this machine has no GPU
        try:
            user.types("up", MODEL, *box, "--port", str(free_port()))
            assert user.asks("tiny") == 200
        finally:
            user.types("down", "--all")
        assert user.fetched() == 1


# --------------------------------------------------------------------- 002 Lambda's 1-Click Cluster, 003 DigitalOcean
@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, Path]]:
    """Two nodes with Docker; `shared` is one storage for both, `local` is each node's own."""
    folder = tmp_path_factory.mktemp("nodes")
    folder.parent.chmod(0o755)
    folder.chmod(0o755)
    local = folder / "local"
    local.mkdir()
    with (
        Hosts(folder / "hosts", ("node1", "node2"), shared=[folder], private=[local]) as hosts,
        Docker(folder / "d1", hosts, "node1") as one,
        Docker(folder / "d2", hosts, "node2") as two,
    ):
        one.import_image(IMAGE, FILES)
        one.run("save", "-o", str(folder / "image.tar"), IMAGE)  # the very image: nodes must not differ
        two.run("load", "-i", str(folder / "image.tar"))
        yield hosts, folder


HARDWARE = ("--hosts", "node1,node2", "--set", "hardware.gpus=1xH100", "--set", "hardware.nodes=2",
            "--set", f"runtime.image={IMAGE}", "--set", f"defaults.model={MODEL}",
            "--set", "defaults.context=128", "--set", "defaults.set={tensor = 1, pipeline = 2}")  # fmt: skip


@need_docker
@pytest.mark.parametrize("example", ["lambda-1cc", "digitalocean-baremetal"])
def test_two_nodes_with_docker_download_once(nodes: tuple[Hosts, Path], example: str) -> None:
    """Lambda's share their storage, by the profile; DigitalOcean's share nothing, and are named by their hosts."""
    hosts, folder = nodes
    shares = example == "lambda-1cc"
    store = folder / ("shared" if shares else "local") / "corral"
    with FakeHub({MODEL: make_tiny_llama(folder / "repository")}, host=hosts.machine_address) as hub:
        user = user_of(folder / example, hub, also={"CORRAL_SSH": " ".join(hosts.ssh_command)})
        network = () if shares else ("--set", "network.interface=eth0", "--set", "engine.args=[]")
        sets = (*HARDWARE, "--set", f"storage.home={store}", *network)
        user.types("profile", "init", "my-cluster", "--from", example, *sets)
        user.types("profile", "check", "my-cluster")
        where = ("--on", "my-cluster") if shares else ("--hosts", "node1,node2", "--to", f"{folder}/local/weights")
        pulled = json.loads(user.types("pull", MODEL, *where, "--json"))["folder"]
        assert user.fetched() == 1
        shown = user.types("up", "--on", "my-cluster", "--dry-run", "--shell")
        assert f"VLLM_HOST_IP={hosts.address('node1')} " in shown
        assert "-m corral pull" not in shown  # it is there
        try:
            user.types("up", "--on", "my-cluster")
            assert user.launch("tiny")["model_path"] == pulled
            assert all(host in user.types("status", "tiny") for host in ("node1", "node2"))
            assert user.asks("tiny") == 200
        finally:
            user.types("down", "--all")
        assert user.fetched() == 1
