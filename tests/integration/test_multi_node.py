"""One model over two nodes with real vLLM on the CPU: both links, both splits, the same words as on one node.

Two of the four are SLURM jobs, asked from a laptop through a tunnel; two are started over ssh, and then lose a
node or a rank. A job on one node gives the words, and its scores are held against transformers'. Float32 and one
request at a time, because in bf16 batching alone changes greedy words.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import corral as package
from corral.use.llm.llm import LLM
from tests.integration.conftest import BOUND, Corral, free_port
from tests.integration.transformers_scores import planned_dtype, reference, rows, worst_difference
from tests.testbed import missing
from tests.testbed.hosts import Hosts
from tests.testbed.slurm import Slurm
from tests.tiny_llama import make_tiny_llama
from tests.until import until

pytestmark = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))
# the simulated GPUs are only GRES: asked for, allocated, and left alone by the CPU engine
JOB = ("--partition", "gpu", "--time", "30:00", "--slurm", "cpus_per_task=2", "--slurm", "mem=6G",
       "--slurm", "gpus_per_node=0", "--slurm", "gres=gpu:h100:1")  # fmt: skip
KEMPNER = """target = "slurm"
[slurm]
partition = "gpu"
time = "30:00"
cpus_per_task = 2
mem = "6G"
gpus_per_node = 0
extra = {{ gres = "gpu:h100:1" }}
[storage]
models = "{models}"
[defaults]
model = "{model}"
"""
OPTIONS = ("--set", "eager=true", "--set", "max_model_len=512", "--node-timeout", "30", "--json")
# Two nodes here are twice the same cores, and both ranks would bind themselves to the first; under Ray none does.
APART = {"native": ("--env", f"{BOUND}=nobind", "--env", "OMP_NUM_THREADS=1"), "ray": ()}
PROMPTS = ("Once upon a time", "The capital of France is", "1 2 3 4")
NODES = ("n1", "n2")


@dataclass
class Cluster:
    """A user on the login host, and another machine that reaches the hosts by ssh."""

    hosts: Hosts
    slurm: Slurm
    home: Path
    outside: Corral
    model: Path

    @property
    def env(self) -> dict[str, str]:
        source = str(Path(package.__file__).parent.parent)
        config = str(self.home.parent / "config")
        return {"CORRAL_HOME": str(self.home), "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "XDG_CONFIG_HOME": config}

    def corral(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """On the login host."""
        command = [sys.executable, "-m", "corral", *arguments]
        return self.hosts.exec("login", command, env=self.env, check=False, timeout=600)

    def types(self, *arguments: str) -> str:
        done = self.corral(*arguments)
        assert done.returncode == 0, f"{arguments}\n{done.stderr}"
        return done.stdout

    def far_corral(self) -> str:
        """How the login host's Corral is called over ssh."""
        words = " ".join(f"{name}={value}" for name, value in self.env.items())
        return f"env {words} {sys.executable} -m corral"

    def left(self) -> list[tuple[int, str]]:
        return [found for node in NODES for found in self.hosts.processes(node)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, corral: Corral) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("jobs")
    home = folder / "corral"
    home.mkdir()
    for name in ("engines", "models", "cache"):
        (home / name).symlink_to((corral.home / name).resolve())
    kept = (corral.home / "engines").resolve().parent
    model = make_tiny_llama(folder / "tiny", dtype="float32")
    shared = [folder, kept, corral.home.parent]
    with Hosts(folder / "hosts", ("login", *NODES), shared=shared) as hosts, Slurm(hosts) as slurm:
        outside = Corral(corral.env | {"CORRAL_SSH": " ".join(hosts.ssh_command)}, corral.home)
        found = Cluster(hosts, slurm, home, outside, model)
        yield found
        found.corral("down", "--all")


def ask(endpoint: package.Endpoint, prompt: str, tokens: int = 16) -> Any:
    body = {"model": endpoint.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1}
    key = Path(endpoint.key_file or "").read_text().strip()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(endpoint.base_url + "/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]


def words(endpoint: package.Endpoint) -> list[list[str]]:
    return [ask(endpoint, prompt)["logprobs"]["tokens"] for prompt in PROMPTS]


@contextmanager
def job(cluster: Cluster, name: str, *split: str, on: str = "") -> Iterator[package.Endpoint]:
    """A deployment in a job, as a laptop sees it that reaches the login host alone; nothing is left of it."""
    what = ("--on", on) if on else (str(cluster.model), *JOB)
    done = cluster.corral("up", *what, "--name", name, *split, *OPTIONS)
    log = cluster.corral("logs", name, "-n", "40").stdout
    assert done.returncode == 0, f"{done.stderr}\n{log}"
    assert "gres:gpu:h100:1" in cluster.slurm.run("scontrol", "show", "job", "-dd").stdout
    try:
        with tunnelled(cluster, name) as endpoint:
            yield endpoint
    finally:
        down = cluster.corral("down", name)
    assert down.returncode == 0, down.stderr
    assert not cluster.slurm.run("squeue", "-h").stdout
    assert cluster.left() == []


@contextmanager
def tunnelled(cluster: Cluster, name: str) -> Iterator[package.Endpoint]:
    command = [sys.executable, "-m", "corral", "tunnel", name, "--through", "login", "--corral", cluster.far_corral()]
    with subprocess.Popen(command, env=cluster.outside.env, text=True, stdout=subprocess.PIPE) as tunnel:
        try:
            assert tunnel.stdout
            url = tunnel.stdout.readline().strip().partition("=")[2]
            key_file = tunnel.stdout.readline().partition("(cat ")[2].partition(")")[0]
            endpoint = package.Endpoint(url, "tiny", key_file)
            until(lambda: answers(endpoint), "the forward through the login host")
            yield endpoint
        finally:
            tunnel.terminate()


def answers(endpoint: package.Endpoint) -> bool:
    with contextlib.suppress(OSError):
        return bool(ask(endpoint, "Hello", 1))
    return False


@dataclass
class Alone:
    """What the model says on one node."""

    words: list[list[str]]
    dtype: str
    worst: float  # the largest difference of a log-probability from transformers'
    model_path: str
    by_path: str  # what a client is answered that says the model's path as its name
    raw: dict[str, Any]  # the server's own response
    answered: int  # rows of a batch


@pytest.fixture(scope="module")
def alone(cluster: Cluster, corral: Corral) -> Alone:
    """As Kempner's document and the workshop have it: a model of the cluster's folder, served by a profile's name."""
    profile = cluster.home.parent / "config/corral/profiles/my-kempner.toml"
    profile.parent.mkdir(parents=True, exist_ok=True)
    profile.write_text(KEMPNER.format(models=cluster.model.parent, model=cluster.model.name))
    names = ("--served-name", "tiny", "--served-name", str(cluster.model))
    with job(cluster, "one-node", *names, on="my-kempner") as endpoint, LLM(endpoint) as llm:
        dtype = planned_dtype(cluster.home, "one-node")
        worst = worst_difference(llm, reference(corral, cluster.model, dtype, rows()), rows())
        launch = json.loads((cluster.home / "deployments/one-node/launch.json").read_text())
        asked = ("complete", PROMPTS[0], "--max-tokens", "7", "--temperature", "0")
        by_path = cluster.types(*asked, "--model", str(cluster.model))
        raw = json.loads(cluster.types(*asked, "--logprobs", "1", "--prompt-logprobs", "1", "--json"))
        given, output = cluster.home.parent / "prompts.jsonl", cluster.home.parent / "answers.jsonl"
        given.write_text("".join(json.dumps({"id": n, "prompt": f"Row {n}"}) + "\n" for n in range(8)))
        cluster.types("batch", str(given), "-o", str(output), "--max-tokens", "4", "--temperature", "1")
        answered = len(output.read_text().splitlines())
        return Alone(words(endpoint), dtype, worst, launch["model_path"], by_path, raw, answered)


def test_on_one_node_a_float32_checkpoint_keeps_its_format_and_scores_as_transformers_does(alone: Alone) -> None:
    print(f"stored in float32, served in {alone.dtype}: largest difference {alone.worst:.2e}")
    assert alone.dtype == "float32"
    assert alone.worst < 1e-4


def test_the_steps_of_kempners_document_and_of_the_workshop(alone: Alone, cluster: Cluster) -> None:
    assert alone.model_path == str(cluster.model)  # where the cluster has it
    assert alone.by_path.strip()
    assert {"id", "object", "created", "model", "usage", "choices"} <= alone.raw.keys()
    assert {"finish_reason", "stop_reason", "logprobs", "prompt_logprobs"} <= alone.raw["choices"][0].keys()
    assert alone.answered == 8


@pytest.mark.parametrize(("link", "split"), [("native", "tensor=2"), ("ray", "pipeline=2")])
def test_in_a_job_on_two_nodes_the_same_words(cluster: Cluster, alone: Alone, link: str, split: str) -> None:
    with job(cluster, link, "--nodes", "2", "--link", link, "--set", split, *APART[link]) as endpoint:
        assert words(endpoint) == alone.words


def up(cluster: Cluster, link: str, split: str, name: str, *further: str) -> package.Endpoint:
    """Started over ssh."""
    command = ["up", str(cluster.model), "--name", name, "--hosts", ",".join(NODES), "--link", link, "--set", split]
    done = cluster.outside.run(*command, *further, *APART[link], *OPTIONS, check=False)
    logs = [cluster.outside.run("logs", name, "-n", "40", "--rank", rank, check=False).stdout for rank in "01"]
    assert done.returncode == 0, f"{done.stderr}\n" + "\n---\n".join(logs)
    told = json.loads(done.stdout)["endpoint"]
    return package.Endpoint(told["base_url"], told["model"], told["key_file"])


def failure(cluster: Cluster, name: str) -> Any:
    def look() -> Any:
        found = cluster.outside.json("status", name, check=False)
        return found if found["state"] == "failed" else None

    return until(look, f"the failure of {name}", 240)


def closed_to_strangers(cluster: Cluster, endpoint: package.Endpoint, port: str) -> None:
    """Without the key, and on the head's loopback alone."""
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(endpoint.base_url + "/models", timeout=30)
    refused.value.close()
    knocks = []
    for host, address in (("n1", "127.0.0.1"), ("n2", cluster.hosts.address("n1"))):
        knock = f"import socket; socket.create_connection(('{address}', {port}), 10)"
        knocks.append(cluster.hosts.exec(host, ["python3", "-c", knock], check=False).returncode)
    assert knocks == [0, 1]


def test_over_ssh_the_same_words_and_a_stopped_rank_is_noticed(cluster: Cluster, alone: Alone) -> None:
    """A rank that hangs: its processes are there and do nothing."""
    port = free_port()
    endpoint = up(cluster, "ray", "tensor=2", "hung", "--port", port)
    try:
        assert words(endpoint) == alone.words
        closed_to_strangers(cluster, endpoint, port)
        for pid, line in cluster.hosts.processes("n2"):
            if "agent.py" not in line:
                os.kill(pid, signal.SIGSTOP)
        found = failure(cluster, "hung")
        assert found["reason"] in ("engine_hung", "engine_exited")  # vLLM may notice first
    finally:
        cluster.outside.run("down", "hung")
    assert cluster.left() == []


def test_over_ssh_the_same_words_and_a_lost_worker_ends_requests_in_flight_with_an_error(
    cluster: Cluster, alone: Alone
) -> None:
    endpoint = up(cluster, "native", "pipeline=2", "lost")
    talking = threading.Event()
    outcome: list[str] = []

    def talk() -> None:
        try:
            ask(endpoint, "Once upon a time", 1)
            talking.set()
            while True:
                ask(endpoint, "Once upon a time", 400)
        except (OSError, ValueError, http.client.HTTPException) as error:
            outcome.append(repr(error))
            if isinstance(error, urllib.error.HTTPError):
                error.close()

    try:
        assert words(endpoint) == alone.words
        client = threading.Thread(target=talk, daemon=True)
        client.start()
        assert talking.wait(120)
        cluster.hosts.power_off("n2")
        client.join(120)
        assert outcome, "the request hangs"
        found = failure(cluster, "lost")
        assert found["reason"] == "node_lost"
        assert "n2 stopped answering" in found["text"]
        assert cluster.hosts.processes("n1") == []
    finally:
        if not cluster.hosts.pid("n2"):
            cluster.hosts.power_on("n2")
        cluster.outside.run("down", "lost")
