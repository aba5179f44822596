"""One model over two hosts with real vLLM on the CPU: both links, both splits, the same words as on one host.

Float32 and one request at a time, because in bf16 batching alone changes greedy words.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Corral, free_port
from tests.testbed import missing
from tests.testbed.hosts import Hosts

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
OPTIONS = ("--set", "eager=true", "--set", "max_model_len=512", "--patience", "30")
FLOAT32 = ("--", "--dtype", "float32")
PROMPTS = ("Once upon a time", "The capital of France is", "1 2 3 4")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, corral: Corral, tiny_model: Path) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    kept = (corral.home / "engines").resolve().parent
    with Hosts(folder, shared=[corral.home.parent, tiny_model.parent, kept]) as hosts:
        corral.env["CORRAL_SSH"] = " ".join(hosts.ssh_command)
        yield hosts
        del corral.env["CORRAL_SSH"]


def ask(endpoint: dict[str, str], prompt: str, tokens: int = 16) -> Any:
    body = {"model": endpoint["model"], "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1}
    key = Path(endpoint["key_file"]).read_text().strip()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(endpoint["base_url"] + "/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]


def words(endpoint: dict[str, str]) -> list[list[str]]:
    return [ask(endpoint, prompt)["logprobs"]["tokens"] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(corral: Corral, tiny_model: Path) -> list[list[str]]:
    done = corral.run("up", str(tiny_model), "--name", "one", "--port", free_port(), "--json", *OPTIONS, *FLOAT32)
    try:
        return words(json.loads(done.stdout)["endpoint"])
    finally:
        corral.run("down", "one")


def up(corral: Corral, model: Path, link: str, split: str, name: str) -> Any:
    arguments = ["up", str(model), "--name", name, "--hosts", "node1,node2", "--link", link, "--set", split, "--json"]
    done = corral.run(*arguments, *OPTIONS, *FLOAT32, check=False)
    logs = [corral.run("logs", name, "-n", "40", "--rank", rank, check=False).stdout for rank in "01"]
    assert done.returncode == 0, f"{done.stderr}\n" + "\n---\n".join(logs)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("link", "split"), [("native", "tensor=2"), ("ray", "pipeline=2")])
def test_the_same_words_as_on_one_host(
    corral: Corral, hosts: Hosts, tiny_model: Path, expected: list[list[str]], link: str, split: str
) -> None:
    name = f"{link}-{split[:2]}"
    endpoint = up(corral, tiny_model, link, split, name)["endpoint"]
    try:
        assert words(endpoint) == expected
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(endpoint["base_url"] + "/models", timeout=30)
        refused.value.close()
        knock = f"import socket; socket.create_connection(('{hosts.address('node1')}', 8000), 3)"
        assert hosts.exec("node2", ["python3", "-c", knock], check=False).returncode  # on the head's loopback only
    finally:
        corral.run("down", name)
    assert hosts.processes("node1") == []
    assert hosts.processes("node2") == []


def status(corral: Corral, name: str) -> Any:
    return json.loads(corral.run("status", name, "--json", check=False).stdout)


def failure(corral: Corral, name: str, limit_s: float = 240) -> Any:
    deadline = time.monotonic() + limit_s
    while (found := status(corral, name))["state"] != "failed":
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    return found


def test_the_same_words_and_a_lost_worker_ends_requests_in_flight_with_an_error(
    corral: Corral, hosts: Hosts, tiny_model: Path, expected: list[list[str]]
) -> None:
    endpoint = up(corral, tiny_model, "native", "pipeline=2", "lost")["endpoint"]
    outcome: list[str] = []

    def talk() -> None:
        try:
            while True:
                ask(endpoint, "Once upon a time", 400)
        except (OSError, ValueError, http.client.HTTPException) as error:
            outcome.append(repr(error))
            if isinstance(error, urllib.error.HTTPError):
                error.close()

    try:
        assert words(endpoint) == expected
        client = threading.Thread(target=talk, daemon=True)
        client.start()
        time.sleep(2)
        began = time.time()
        hosts.power_off("node2")
        client.join(120)
        assert outcome, "the request hangs"
        print(f"\nthe client had its error {time.time() - began:.1f} s after the node was gone")
        found = failure(corral, "lost")
        assert found["reason"] == "node_lost"
        assert "node2 stopped answering" in found["text"]
        assert hosts.processes("node1") == []
    finally:
        if not hosts.pid("node2"):
            hosts.power_on("node2")
        corral.run("down", "lost")


def test_the_same_words_and_a_stopped_rank_is_noticed(
    corral: Corral, hosts: Hosts, tiny_model: Path, expected: list[list[str]]
) -> None:
    """A rank that hangs: its processes are there and do nothing."""
    endpoint = up(corral, tiny_model, "ray", "tensor=2", "hung")["endpoint"]
    try:
        assert words(endpoint) == expected
        began = time.time()
        for pid, line in hosts.processes("node2"):
            if "agent.py" not in line:
                os.kill(pid, signal.SIGSTOP)
        found = failure(corral, "hung")
        print(f"\ntaken down after {found['since_s'] - began:.1f} s: {found['text']}")
        assert found["reason"] in ("engine_hung", "engine_exited")  # vLLM may notice first
    finally:
        corral.run("down", "hung")
    assert hosts.processes("node2") == []
