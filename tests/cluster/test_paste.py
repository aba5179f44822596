"""What `corral up --dry-run --shell` prints, pasted as it is: two nodes over real sshd, each with a real Docker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.bed import FILES
from tests.fake_hub import FakeHub
from tests.testbed import missing
from tests.testbed.containers import Docker
from tests.testbed.hosts import Hosts
from tests.tiny_llama import make_tiny_llama
from tests.until import free_port, until

pytestmark = pytest.mark.skipif(bool(missing("containers")), reason=missing("containers"))
NODES = ("node1", "node2")
ASK = """
import json, sys, urllib.error, urllib.request
url, headers, body = sys.argv[1] + "/models", {}, None
if len(sys.argv) > 2:
    headers = {"Authorization": "Bearer " + open(sys.argv[2]).read().strip(), "Content-Type": "application/json"}
    body = json.dumps({"model": "tiny", "prompt": "San Francisco is a", "max_tokens": 7}).encode()
    url = sys.argv[1] + "/completions"
try:
    answer = urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=5)
    print(answer.status, len(json.load(answer)["choices"]))
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print(0)
"""


def test_two_nodes_with_docker_serve_from_nothing_what_was_pasted(tmp_path: Path) -> None:
    """The model is on the hub only, which the nodes do not reach."""
    tmp_path.chmod(0o755)
    model, home, port = make_tiny_llama(tmp_path / "repository"), tmp_path / "corral", free_port()
    with (
        FakeHub({"acme/tiny": model}) as hub,
        Hosts(tmp_path / "hosts", NODES, shared=[tmp_path]) as hosts,
        Docker(tmp_path / "d1", hosts, "node1") as one,
        Docker(tmp_path / "d2", hosts, "node2") as two,
    ):
        for docker in (one, two):
            docker.import_image("stand-in:1", FILES)
        env = {**os.environ, "CORRAL_HOME": str(home), "CORRAL_SSH": " ".join(hosts.ssh_command)}
        env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        words = ["up", "acme/tiny", "--hosts", ",".join(NODES), "--port", str(port), "--runtime", "docker"]
        words += ["--runtime-option", "image=stand-in:1", "--dry-run", "--shell"]
        printed = subprocess.run([sys.executable, "-m", "corral", *words], env=env, capture_output=True, text=True)
        assert printed.returncode == 0, printed.stderr
        for node in NODES:  # the very addresses, found on the nodes
            assert f"VLLM_HOST_IP={hosts.address(node)} " in printed.stdout
        shell = subprocess.Popen(["bash"], stdin=subprocess.PIPE, env=env, text=True, start_new_session=True)
        assert shell.stdin
        shell.stdin.write(printed.stdout)
        shell.stdin.close()
        try:
            (folder,) = until(lambda: list((home / "nodes").glob("tiny-*")), "the folder on the nodes")
            url = f"http://127.0.0.1:{port}/v1"

            def asked(*key: str) -> str:
                return hosts.exec("node1", ["python3", "-c", ASK, url, *key]).stdout.strip()

            until(lambda: asked() == "401", "an answer")
            assert asked(str(folder / "key")) == "200 1"
            for docker in (one, two):
                until(lambda docker=docker: docker.run("ps", "-q").stdout.split(), "a container on each node")  # type: ignore[misc]
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            for docker in (one, two):
                if left := docker.run("ps", "-aq").stdout.split():
                    docker.run("rm", "-f", *left)
