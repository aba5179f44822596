"""What a user of SLURM runs into by hand: wishes that a cluster cannot fulfil, homes that nodes do not see, ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.test_slurm import SMALL, Login, logged_in, request
from tests.testbed import missing
from tests.testbed.hosts import Hosts, wait_for
from tests.testbed.slurm import Slurm

pytestmark = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))
PROFILE = """target = "slurm"
[slurm]
partition = "gpu"
nodes = {nodes}
cpus_per_task = {cpus}
time = "10:00"
[hardware]
gpus = "4xH100"
"""


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    folder = tmp_path_factory.mktemp("slurm-hand")
    folder.parent.chmod(0o755)
    own = folder / "own"  # on every host: empty, and its own
    own.mkdir()
    names = ("login", "n1", "n2", "n3")
    with (
        Hosts(folder / "hosts", names, shared=[folder], private=[own]) as hosts,
        Slurm(hosts, settings={"SlurmdTimeout": "300"}) as slurm,  # as on most clusters
        logged_in(hosts, slurm, folder / "corral") as found,
    ):
        yield found


def test_a_profile_is_held_against_the_cluster(login: Login) -> None:
    profiles = login.hosts.home() / ".config" / "corral" / "profiles"
    profiles.mkdir(parents=True)
    for nodes, cpus, says in ((1, 96, "no node with 4 H100-SXM, 96 CPUs"), (4, 8, "has 3 nodes with")):
        (profiles / "wide.toml").write_text(PROFILE.format(nodes=nodes, cpus=cpus))
        done = login.corral("up", str(login.model), "--on", "wide", "--name", "wide")
        assert done.returncode == 5, done.stderr
        assert says in done.stderr, done.stderr
    assert not login.folder("wide").exists()
    assert login.queue() == []


def test_a_partition_of_one_node_is_counted_in_numbers(login: Login) -> None:
    login.slurm.run("scontrol", "create", "PartitionName=solo", "Nodes=n1")
    found = json.loads(login.corral("slurm", "partitions", "--json").stdout)
    (shape,) = {one["name"]: one for one in found["partitions"]}["solo"]["shapes"]
    assert [type(shape[key]) for key in ("nodes", "usable_nodes", "idle_nodes")] == [int, int, int]
    table = login.corral("slurm", "partitions").stdout
    assert "True" not in table
    assert "False" not in table
    login.slurm.run("scontrol", "delete", "PartitionName=solo")


def test_what_can_never_start_ends_up_with_its_remedy(login: Login) -> None:
    failed = login.slurm.run("sbatch", "--parsable", "--wait", "-o", "/dev/null", "--wrap", "exit 1", check=False)
    words = ["up", str(login.model), "--name", "never", *SMALL, "--time", "10:00"]
    done = login.corral(*words, "--slurm", f"dependency=afterok:{failed.stdout.strip()}")
    assert done.returncode == 8, done.stderr
    assert "'never' cannot start: job" in done.stderr
    assert "(DependencyNeverSatisfied)" in done.stderr
    assert "takes it out of the queue" in done.stderr
    assert login.queue() == []


def test_what_waits_for_a_drained_node_is_queued_and_told(login: Login) -> None:
    login.slurm.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=fan")
    try:
        words = ["up", str(login.model), "--name", "all", *SMALL, "--time", "10:00", "--nodes", "3", "--no-wait"]
        done = login.corral(*words)
        assert done.returncode == 0, done.stderr
        assert "has 2 of 3 such nodes up, and 3 were requested" in done.stderr
        assert login.wait("all", lambda now: "down, drained" in now["text"])["state"] == "queued"
        assert login.corral("down", "all").returncode == 0
    finally:
        login.slurm.run("scontrol", "update", "NodeName=n3", "State=RESUME")


def test_a_home_that_the_nodes_do_not_see(login: Login) -> None:
    own = login.home.parent / "own" / "corral"
    login.hosts.exec("login", ["cp", "-a", str(login.home), str(own)])
    login.hosts.exec("login", ["rm", "-f", str(own / ".seen-by-the-nodes")])
    there = replace(login, home=own)
    words = ["up", str(login.model), "--name", "unseen", *SMALL, "--time", "10:00"]
    done = there.corral(*words)
    assert done.returncode == 2, done.stderr
    assert f"the nodes do not see Corral's home {own}" in done.stderr
    assert login.queue() == []
    login.hosts.exec("login", ["touch", str(own / ".seen-by-the-nodes")])  # as where no node could be asked
    done = there.corral(*words)
    assert done.returncode == 8, done.stderr
    assert f"the nodes do not see {own}/deployments/unseen" in done.stderr
    assert "Set CORRAL_HOME to a folder that login and compute nodes share" in done.stderr
    assert there.status("unseen")["reason"] == "home_not_shared"


def test_cancelled_while_loading_says_so(login: Login) -> None:
    words = ["up", str(login.model), "--name", "loads", *SMALL, "--time", "10:00", "--env", "STUB_OPTIONS=slow=100"]
    waiting = login.start(*words)
    login.wait("loads", lambda now: now["state"] == "loading")
    login.slurm.run("scancel", login.job("loads"))
    _, said = waiting.communicate(timeout=120)
    assert waiting.returncode == 8, said
    assert f"'loads' stopped: job {login.job('loads')} was cancelled" in said
    assert ": ." not in said


def test_down_with_the_head_cut_off_does_not_wait_until_slurm_gives_it_up(login: Login) -> None:
    """What is left is named; the same command works once the node is back."""
    login.up("severed", "--nodes", "2", "--slurm", "nodelist=n1,n2", "--slurm", "requeue=false")
    login.hosts.cut("n1")
    try:
        found = login.wait("severed", lambda now: now["state"] == "failed", 90)
        assert found["reason"] == "node_lost"
        done = login.corral("down", "severed")
        assert done.returncode == 9, done.stderr
        assert "a node does not answer" in " ".join(done.stderr.split())
    finally:
        login.hosts.heal("n1")
    wait_for(lambda: login.corral("down", "severed").returncode == 0, 90, "the node is back")
    wait_for(lambda: "corral-severed" not in login.queue(), 60, "the queue is empty")


def test_a_killed_agent_is_named_with_its_node(login: Login) -> None:
    login.up("pair", "--nodes", "2", "--slurm", "nodelist=n1,n2", "--slurm", "requeue=false")
    for pid, line in login.hosts.processes("n2"):
        if "agent.py" in line and "/pair/" in line:
            os.kill(pid, signal.SIGKILL)
    found = login.wait("pair", lambda now: now["state"] in ("failed", "stopped"))
    assert (found["state"], found["reason"]) == ("failed", "agent_killed"), found
    assert "the agent of rank 1 on n2 disappeared without writing why" in found["text"]
    wait_for(lambda: not [line for _, line in login.left() if "/pair/" in line], 20, "nothing of it left")
    assert not list(login.folder("pair").rglob("*.tmp"))
    assert login.corral("down", "pair").returncode == 0


def answers(url: str, key: str) -> bool:
    try:
        return request(url, key) == 200
    except (urllib.error.URLError, OSError):
        return False


def test_a_tunnel_follows_a_requeued_job_and_says_when_the_server_is_gone(login: Login, tmp_path: Path) -> None:
    first = login.up("moves")["endpoint"]["base_url"]
    node = next(node for node in login.slurm.nodes if f"//{login.hosts.address(node)}:" in first)
    there = ["env", *(f"{name}={value}" for name, value in login.env.items()), sys.executable, "-m", "corral"]
    words = [sys.executable, "-m", "corral", "tunnel", "moves", "--through", "login", "--corral", shlex.join(there)]
    own = {"CORRAL_HOME": str(tmp_path / "here"), "CORRAL_SSH": shlex.join(login.hosts.ssh_command)}
    with (tmp_path / "said").open("w") as said:
        tunnel = subprocess.Popen(words, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=said, text=True)
    try:
        assert tunnel.stdout is not None
        url = tunnel.stdout.readline().strip().partition("=")[2]
        key = Path(tunnel.stdout.readline().partition("$(cat ")[2].partition(")")[0]).read_text().strip()
        wait_for(lambda: answers(url, key), 30, "an answer through the tunnel")
        login.slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=fan")
        login.slurm.run("scontrol", "requeue", login.job("moves"))
        now = login.wait("moves", lambda now: now["state"] == "ready" and now["endpoint"]["base_url"] != first, 120)
        wait_for(lambda: answers(url, key), 60, "an answer from where the job is now")
        assert (
            f"moves on login is now at {now['endpoint']['base_url']}; the tunnel leads there"
            in (tmp_path / "said").read_text()
        )
        assert login.corral("down", "moves").returncode == 0
        assert tunnel.wait(120) == 3
        assert "the server is gone: moves on login is stopped" in (tmp_path / "said").read_text()
        assert not answers(url, key)
    finally:
        tunnel.kill()
        tunnel.communicate()
        login.slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
