"""The slurm target with a real controller and real slurmds; the engine is a stand-in that starts in a second.

Two jobs that must reach their time limits are started first and looked at last, so that nobody waits for them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import corral as package
from corral.deploy.deployment.folder import DeploymentFolder
from corral.deploy.slurm.commands import launch_in
from tests.cluster.conftest import FAILED
from tests.stand_in import install_stand_in
from tests.testbed import missing
from tests.testbed.hosts import Hosts, wait_for
from tests.testbed.slurm import Slurm
from tests.tiny_llama import make_tiny_llama

pytestmark = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))

STUB = Path(__file__).parent.parent / "stub_engine.py"
SMALL = ("--partition", "gpu", "--slurm", "gpus_per_node=0", "--slurm", "cpus_per_task=2", "--slurm", "mem=4G")


PREEMPTION = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}


@dataclass
class Login:
    """A user on the login host."""

    hosts: Hosts
    slurm: Slurm
    home: Path
    model: Path

    @property
    def env(self) -> dict[str, str]:
        source = str(Path(package.__file__).parent.parent)
        return {"CORRAL_HOME": str(self.home), "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_secret"}

    def corral(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "corral", *arguments]
        return self.hosts.exec("login", command, env=self.env, check=False, timeout=180)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "corral", *arguments]
        return self.hosts.popen(
            "login", command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def up(self, name: str, *arguments: str, time_limit: str = "10:00") -> Any:
        words = ["up", str(self.model), "--name", name, *SMALL, "--time", time_limit, *arguments, "--json"]
        done = self.corral(*words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def status(self, name: str) -> Any:
        return json.loads(self.corral("status", name, "--json").stdout)

    def wait(self, name: str, good: Callable[[Any], bool], timeout_s: float = 60) -> Any:
        found: list[Any] = [None]

        def look() -> bool:
            found[0] = self.status(name)
            return "state" in found[0] and good(found[0])

        try:
            wait_for(look, timeout_s, name)
        except TimeoutError:
            raise AssertionError(f"{name} stands at {found[0]}") from None
        return found[0]

    def job(self, name: str) -> str:
        return str(json.loads((self.folder(name) / "job.json").read_text())["id"])

    def folder(self, name: str) -> Path:
        return self.home / "deployments" / name

    def queue(self) -> list[str]:
        """The names of the jobs, without the launch ids in them."""
        names = self.slurm.run("squeue", "-h", "-o", "%j").stdout.split()
        return [name.removesuffix(f".{launch_in(name)}") for name in names]

    def left(self) -> list[tuple[int, str]]:
        return [found for node in self.slurm.nodes for found in self.hosts.processes(node)]

    def deployments(self) -> set[str]:
        return {DeploymentFolder(one).name for one in (self.home / "deployments").iterdir()}

    def jobs(self) -> set[str]:
        return set(self.slurm.run("squeue", "-h", "-o", "%i").stdout.split())


def request(url: str, key: str | None = None, path: str = "/models") -> int:
    """A request from the machine that the test runs on, which is no part of the cluster."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@contextmanager
def logged_in(hosts: Hosts, slurm: Slurm, home: Path, model: Path | None = None) -> Iterator[Login]:
    """A user with stand-in engines in a home that all hosts see; at the end nothing runs."""
    install_stand_in(home, STUB, python="/usr/bin/python3")
    found = Login(hosts, slurm, home, model or make_tiny_llama(home.parent / "tiny"))
    yield found
    found.corral("down", "--all")


@contextmanager
def on_two_nodes(folder: Path) -> Iterator[Login]:
    """The same on a cluster of two nodes that begins and ends with it."""
    folder.parent.chmod(0o755)
    with (
        Hosts(folder / "hosts", ("login", "n1", "n2"), shared=[folder]) as hosts,
        Slurm(hosts) as slurm,
        logged_in(hosts, slurm, folder / "corral") as found,
    ):
        yield found


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    folder = tmp_path_factory.mktemp("slurm")
    folder.parent.chmod(0o755)
    names = ("login", "n1", "n2", "n3")
    with (
        Hosts(folder / "hosts", names, users=("bob",), shared=[folder]) as hosts,
        Slurm(hosts, settings=PREEMPTION) as slurm,
    ):
        home = folder / "corral"
        install_stand_in(home, STUB, python="/usr/bin/python3")
        found = Login(hosts, slurm, home, make_tiny_llama(folder / "tiny"))
        # loading is planned with 30 s, so one minute leaves room for these and no other signals
        found.up("drained", "--slurm", "signal_s=25", "--slurm", "nodelist=n3", time_limit="1:00")
        found.up("overrun", "--slurm", "signal_s=25", "--slurm", "nodelist=n3", time_limit="1:00")
        for pid, line in hosts.processes("n3"):
            if "agent.py" in line and "/overrun/" in line:
                os.kill(pid, signal.SIGSTOP)  # it hears no signal, and writes nothing more
        yield found
        found.corral("down", "--all")


@pytest.fixture(autouse=True)
def nothing_left_of_a_failure(request: pytest.FixtureRequest, login: Login) -> Iterator[None]:
    """A test that failed takes its nodes and names with it: no other fails for that, nor its own second try."""
    deployments, jobs = login.deployments(), login.jobs()
    yield
    if not request.node.stash.get(FAILED, False):
        return
    for name in login.deployments() - deployments:
        login.corral("down", name)
    with suppress(subprocess.CalledProcessError):  # there may be no controller
        for job in login.jobs() - jobs:
            login.slurm.run("scancel", job)


def test_what_the_cluster_has(login: Login) -> None:
    found = json.loads(login.corral("slurm", "partitions", "--json").stdout)
    gpu = {partition["name"]: partition for partition in found["partitions"]}["gpu"]
    assert gpu["default"]
    assert gpu["max_time_s"] is None
    assert (gpu["shapes"][0]["gpu"], gpu["shapes"][0]["gpus"], gpu["shapes"][0]["nodes"]) == ("h100", 4, 3)
    table = login.corral("slurm", "partitions").stdout
    assert "4 × H100-SXM" in table
    assert "5 min" in table


def test_what_cannot_be_queued_is_refused_and_leaves_nothing(login: Login) -> None:
    model = str(login.model)
    for words, code, says in (
        (["--partition", "nope"], 3, "known: gpu, debug"),
        (["--slurm", "partiton=gpu"], 2, "unrecognized option '--partiton=gpu'"),
        (["--slurm", "reservation=nope"], 2, "requested reservation is invalid"),
        (["--slurm", "hold=5"], 2, "option '--hold' doesn't allow an argument"),
        (
            ["--partition", "debug", "--slurm", "gpus_per_node=0", "--time", "10:00"],
            5,
            "gives a job 5 min, and 10 min",
        ),
        (["--partition", "gpu", "--time", "1:00"], 5, "loading takes about"),
        (["--partition", "gpu", "--slurm", "gpus_per_node=8"], 5, "no node with 8 gpus"),
        (["--slurm", "array=1-3"], 2, "a deployment is one job"),
    ):
        done = login.corral("up", model, "--name", "refused", *words)
        assert done.returncode == code, done.stderr
        assert says in done.stderr.lower(), done.stderr
    assert "corral-refused" not in login.queue()
    assert not login.folder("refused").exists()


def test_two_on_one_node_and_another_user_gets_nothing(login: Login) -> None:
    ready = [login.up(name, "--slurm", "nodelist=n1") for name in ("one", "it's 100% two")]
    urls = [one["endpoint"]["base_url"] for one in ready]
    keys = [Path(one["endpoint"]["key_file"]).read_text().strip() for one in ready]
    assert all(url.startswith(f"http://{login.hosts.address('n1')}:") for url in urls)
    assert len(set(urls)) == 2
    assert [request(url, key) for url, key in zip(urls, keys, strict=True)] == [200, 200]
    assert request(urls[0], keys[1]) == 401
    ask = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", urls[0] + "/models"]
    probe = (
        f"import urllib.request as u\ntry: u.urlopen({urls[0] + '/models'!r})\nexcept Exception as e: print(e.code)"
    )
    assert login.hosts.exec("n1", ["/usr/bin/python3", "-c", probe], user="bob").stdout.strip() == "401", ask
    for name in ("key", "endpoint.json", "job.sh", "job.log", "rank0/spec.json", "rank0/engine.log"):
        tried = login.hosts.exec("n1", ["cat", str(login.folder("one") / name)], user="bob", check=False)
        assert "Permission denied" in tried.stderr
    assert (login.home / "deployments" / "it%27s 100%25 two" / "job.log").exists()
    shown = login.slurm.run("scontrol", "show", "job", "-dd", login.job("one")).stdout
    shown += login.corral("slurm", "script", "one").stdout
    for pid, line in login.left():
        with suppress(OSError):  # it may have ended meanwhile
            shown += line + Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    assert "nodelist=n1" in shown
    assert not [secret for secret in (*keys, "hf_secret") if secret in shown]
    variables = login.corral("env", "one").stdout
    assert variables == f"export OPENAI_BASE_URL={urls[0]}\nexport OPENAI_API_KEY={keys[0]}\n"
    assert login.corral("down", "one", "it's 100% two").returncode == 0
    assert login.status("one")["reason"] == "requested"
    assert not [line for _, line in login.left() if "/one/" in line or "two" in line]
    assert not [name for name in login.queue() if name in ("corral-one", "corral-it-s-100-two")]


def test_pending_interrupted_and_taken_up_again(login: Login) -> None:
    nodes = ["--nodelist=n1,n2", "--exclusive", "-N2"]
    blocker = login.slurm.run("sbatch", "--parsable", *nodes, "-o", "/dev/null", "--wrap", "sleep 600").stdout.strip()
    wait_for(lambda: "R" in login.slurm.run("squeue", "-h", "-j", blocker, "-o", "%t").stdout, 20, "the blocker")
    waiting = login.start(
        "up", str(login.model), "--name", "waits", *SMALL, "--time", "10:00", "--slurm", "nodelist=n1"
    )
    found = login.wait("waits", lambda now: now["state"] == "queued" and "Resources" in now["text"])
    assert "the nodes it asks for are in use (Resources)" in found["text"]
    assert "expected to start" in login.wait("waits", lambda now: "expected" in now["text"])["text"]
    inside = [pid for pid, line in login.hosts.processes("login") if "--name waits" in line]
    for pid in inside:  # what was started is only the way into the host
        os.kill(pid, signal.SIGINT)
    _, said = waiting.communicate(timeout=120)
    assert waiting.returncode == 130
    assert "waits in the queue" in said
    assert "corral up --attach waits" in said
    login.slurm.run("scancel", blocker)
    done = login.corral("up", "--attach", "waits", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["first_answer"] == "Paris."


def test_cancelled_behind_our_back(login: Login) -> None:
    login.slurm.run("scancel", login.job("waits"))
    found = login.wait("waits", lambda now: now["state"] == "stopped")
    assert found["reason"] == "cancelled"
    assert "was cancelled" in found["text"]
    assert login.corral("wait", "waits").returncode == 8


def test_a_job_that_is_requeued_serves_again(login: Login) -> None:
    first = login.up("again", "--slurm", "nodelist=n1")["endpoint"]["base_url"]
    login.slurm.run("scontrol", "requeue", login.job("again"))
    login.wait("again", lambda now: now["state"] == "queued" and ", again," in now["text"])
    done = login.corral("wait", "again")
    assert done.returncode == 0, done.stderr
    second = login.status("again")["endpoint"]["base_url"]
    assert second != first
    key = (login.folder("again") / "key").read_text().strip()
    assert request(second, key) == 200
    assert (login.folder("again") / "rank0" / f"attempt-{login.job('again')}.0" / "events.jsonl").exists()


def test_preempted_for_good_or_to_come_back(login: Login) -> None:
    login.slurm.run("scontrol", "update", "PartitionName=debug", "PriorityTier=10")
    login.up("evicted", "--slurm", "nodelist=n2", "--slurm", "requeue=false")
    login.up("returns", "--slurm", "nodelist=n2")
    rival = ["sbatch", "--parsable", "-p", "debug", "-t5", "-o", "/dev/null", "--exclusive", "--nodelist=n2"]
    rival_job = login.slurm.run(*rival, "--wrap", "sleep 600").stdout.strip()
    found = login.wait("evicted", lambda now: now["state"] == "failed")
    assert found["reason"] == "preempted"
    login.wait("returns", lambda now: now["state"] == "queued" and ", again," in now["text"])
    watching = login.start("wait", "returns")
    login.slurm.run("scancel", rival_job)
    watching.communicate(timeout=120)
    assert watching.returncode == 0
    assert login.corral("down", "returns").returncode == 0


def test_a_controller_that_is_gone_makes_nothing_fail(login: Login) -> None:
    pend = ["up", str(login.model), "--name", "held", *SMALL, "--time", "10:00", "--slurm", "hold=", "--no-wait"]
    assert login.corral(*pend).returncode == 0
    held = login.wait("held", lambda now: now["state"] == "queued" and "JobHeldUser" in now["text"])
    assert "scontrol release" in held["remedy"]
    login.slurm.stop_controller()
    try:
        listed = {one["name"]: one for one in json.loads(login.corral("ps", "--json").stdout)}
        assert listed["again"]["state"] == "ready"  # its agent is heard without the controller
        assert (listed["held"]["state"], listed["held"]["reason"]) == ("unknown", None)
        assert "controller" in listed["held"]["text"]
        told = login.corral("status", "held")  # squeue itself would wait for 11 s
        assert "did not answer `squeue` within" in " ".join(told.stdout.split())
        assert login.corral("down", "held").returncode == 9
    finally:
        login.slurm.start_controller()
    assert login.wait("held", lambda now: now["state"] == "queued")
    assert login.status("again")["state"] == "ready"
    assert login.corral("down", "held", "again").returncode == 0
    assert login.status("held")["reason"] == "requested"


def test_a_lost_node_is_named_and_the_job_comes_back(login: Login) -> None:
    login.up("pair", "--nodes", "2", "--slurm", "nodelist=n1,n2", "--slurm", "requeue=false")
    login.up("single", "--slurm", "nodelist=n2", "--slurm", "requeue=false")
    login.hosts.power_off("n2")
    try:
        found = login.wait("pair", lambda now: now["state"] == "failed", 90)
        assert found["reason"] == "node_lost"
        assert "n2" in found["text"]
        found = login.wait("single", lambda now: now["state"] == "failed", 90)
        assert found["reason"] == "node_lost"
        assert "lost a node of n2" in found["text"]
    finally:
        login.slurm.restart_node("n2")
    assert login.corral("down", "pair", "single").returncode == 0


def test_the_time_limit_drains_and_one_that_cannot_is_told_apart(login: Login) -> None:
    found = login.wait("drained", lambda now: now["state"] == "stopped", 120)
    assert found["reason"] == "walltime"
    assert "all running requests had ended" in found["text"]
    states = [json.loads(line) for line in (login.folder("drained") / "rank0/events.jsonl").read_text().splitlines()]
    assert [one["state"] for one in states if one["kind"] == "state"][-3:] == ["ready", "draining", "stopped"]
    found = login.wait("overrun", lambda now: now["state"] in ("failed", "stopped"), 120)
    assert (found["state"], found["reason"]) == ("failed", "walltime")
    assert "reached its time limit" in found["text"]


def test_down_leaves_an_empty_queue_and_no_process(login: Login) -> None:
    assert login.corral("down", "--all").returncode == 0
    assert login.queue() == []
    wait_for(lambda: not login.left(), 10, f"nothing left, but {login.left()}")


@pytest.mark.skipif(bool(missing("slurm", "accounting")), reason=missing("slurm", "accounting"))
def test_accounts_and_who_cancelled(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> None:
    folder = tmp_path_factory.mktemp("accounting")
    with Hosts(folder / "hosts", ("login", "n1"), shared=[folder]) as hosts, Slurm(hosts, accounting=True) as slurm:
        install_stand_in(folder / "corral", STUB, python="/usr/bin/python3")
        login = Login(hosts, slurm, folder / "corral", make_tiny_llama(folder / "tiny"))
        refused = login.corral("up", str(login.model), *SMALL, "--time", "10:00", "--account", "nobody")
        assert refused.returncode == 2
        assert "Invalid account" in refused.stderr
        assert "--account" in refused.stderr
        login.up("paid", "--account", "proj1")
        slurm.run("sacctmgr", "-i", "modify", "account", "proj1", "set", "MaxSubmitJobs=1")
        more = login.corral("up", str(login.model), "--name", "more", *SMALL, "--time", "10:00", "--account", "proj1")
        assert more.returncode == 2
        assert "AssocMaxSubmitJobLimit" in more.stderr
        assert "no more jobs in the queue" in more.stderr
        assert not login.folder("more").exists()
        slurm.run("scancel", login.job("paid"))
        found = login.wait("paid", lambda now: now["state"] == "stopped")
        assert found["reason"] == "cancelled"
        assert "cancelled by root" in found["text"]


def test_an_environment_that_is_not_there_is_told_before_a_job_is_queued(login: Login) -> None:
    """The login node cannot tell (it has no conda), so a node is asked, by a real srun."""
    words = ["up", str(login.model), "--name", "lacking", *SMALL, "--time", "10:00", "--runtime", "conda"]
    done = login.corral(*words, "--runtime-option", "env=/nowhere/vllm")
    assert done.returncode == 7, done.stderr
    assert "asked on a node: corral: there is no command conda on this node" in done.stderr
    assert "corral engine install --into conda:/nowhere/vllm" in done.stderr
    assert "lacking" not in login.hosts.exec("login", ["squeue", "--format=%j"]).stdout
