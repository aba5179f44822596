"""Real Docker, the real agent and a stand-in engine in an image: started, watched, stopped, lost in every way.

The same with Podman.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corral.base.bundle import bundle
from corral.base.record import to_json
from corral.deploy.deployment.events import read_events
from corral.deploy.deployment.state import Patience
from corral.deploy.launch.render import UNSET
from corral.engines.runtimes.base import EngineCommand, NodeSide, make_runtime
from corral.node.processes import descendants, process_table
from tests import testbed
from tests.cluster.bed import FILES, SECRET, Bed, commands_of_everybody
from tests.testbed.containers import Docker
from tests.tiny_llama import make_tiny_llama
from tests.until import free_port, until

pytestmark = pytest.mark.skipif(bool(testbed.missing("containers")), reason=testbed.missing("containers"))

IMAGE = "stand-in:1"


class Podman:
    """Podman with a storage of its own, in the place of the testbed's Docker."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "podman"
        settings = folder / "containers.conf"  # what a small virtual machine permits
        settings.write_text(
            '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        )
        self.runroot = tempfile.mkdtemp(prefix="pm")  # Podman wants 50 characters at most
        own = f"--root {folder}/root --runroot {self.runroot}"
        self.program.write_text(f'#!/bin/sh\nCONTAINERS_CONF={settings} exec podman {own} "$@"\n')
        self.program.chmod(0o755)
        self.env: dict[str, str] = {}

    def run(self, *words: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "timeout": 60} | options
        return subprocess.run(
            [str(self.program), *words], check=check, env={**os.environ, "PATH": testbed.PATH}, **options
        )

    def import_image(self, name: str, files: dict[str, str | bytes | Path]) -> None:
        Docker.import_image(self, name, files)  # type: ignore[arg-type]


@dataclass
class ContainerBed(Bed):
    """On a machine with a Docker (or Podman) of its own."""

    docker: Docker | Podman

    def containers(self, *filters: str) -> list[str]:
        words = [word for text in ("label=corral.launch", *filters) for word in ("--filter", text)]
        return self.docker.run("ps", "-aq", "--no-trunc", *words).stdout.split()

    def inspect(self, container: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.docker.run("inspect", container).stdout)[0]
        return told


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    with Docker(tmp_path_factory.mktemp("docker")) as one:
        one.import_image(IMAGE, FILES)
        yield one


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    one = Podman(tmp_path_factory.mktemp("podman"))
    one.import_image(IMAGE, FILES)
    yield one
    one.run("system", "reset", "--force", check=False)
    shutil.rmtree(one.runroot, ignore_errors=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def make_bed(docker: Docker | Podman, model: Path, home: Path) -> Iterator[ContainerBed]:
    env = {**os.environ, **docker.env, "PATH": testbed.PATH, "HF_TOKEN": SECRET}
    runtime: tuple[str, ...] = ("--runtime", "docker")
    if isinstance(docker, Podman):
        runtime = ("--runtime", "podman", "--runtime-option", f"program={docker.program}")
    made = ContainerBed(home, model, env, runtime, IMAGE, docker)
    yield made
    made.close()
    if left := docker.run("ps", "-aq").stdout.split():
        docker.run("rm", "-f", *left)


@pytest.fixture
def bed(docker: Docker, model: Path, clean_home: Path) -> Iterator[ContainerBed]:
    yield from make_bed(docker, model, clean_home)


@pytest.fixture(params=["docker", "podman"])
def either(request: pytest.FixtureRequest, model: Path, clean_home: Path) -> Iterator[ContainerBed]:
    yield from make_bed(request.getfixturevalue(request.param), model, clean_home)


def test_a_container_from_up_to_down(either: ContainerBed, tmp_path: Path) -> None:
    adapter = tmp_path / 'an "adapter", mine'
    adapter.write_text("weights")
    told = either.up("it's one", "--", "--enable-lora", "--lora-modules", f"mine={adapter}")
    assert told["state"] == "ready"
    assert told["engine"].endswith(IMAGE)
    assert told["first_answer"] == "Paris."
    (container,) = either.containers()
    assert either.docker.run("exec", container, "cat", str(adapter)).stdout == "weights"
    assert either.docker.run("exec", container, "sh", "-c", 'echo >"$1"', "-", str(adapter), check=False).returncode
    assert adapter.read_text() == "weights"
    seen = either.inspect(container)
    assert seen["Name"].lstrip("/").startswith("corral-it-s-one-0-")
    assert seen["Config"]["User"] == "0:0"  # root's own, as the test is
    assert seen["HostConfig"]["NetworkMode"] == "host"
    key = (either.folder("it%27s one") / "key").read_text().strip()
    for secret in (SECRET, key):
        assert secret not in json.dumps(seen)
        assert not any(secret.encode() in command for command in commands_of_everybody())
    either.corral("down", "it's one")
    assert not either.containers()


@pytest.mark.parametrize("how", [("kill",), ("rm", "-f"), ("stop", "-t", "0")])
def test_a_container_ended_behind_our_back(either: ContainerBed, how: tuple[str, ...]) -> None:
    either.up("one")
    either.docker.run(*how, *either.containers())
    told = either.ended("one")
    assert told["reason"] == "engine_exited"
    assert "container" in told["text"]
    assert "`docker kill`" in told["text"]
    assert not either.containers()


def test_an_engine_that_dies_inside_is_told_and_its_container_goes(bed: ContainerBed) -> None:
    bed.up("one", options="die-after-ready=3")
    told = bed.ended("one")
    assert told["reason"] == "engine_exited"
    until(lambda: not bed.containers())


def test_a_container_is_restarted(bed: ContainerBed) -> None:
    bed.up("one", "--restart", "2")
    (first,) = bed.containers()
    bed.docker.run("kill", first)
    until(lambda: bed.status("one")["restarts"] == 1 and bed.status("one")["state"] == "ready")
    (second,) = bed.containers()
    assert second != first


def test_a_strangers_container_of_the_same_name_is_left_alone(either: ContainerBed) -> None:
    either.up("one")
    name = either.inspect(either.containers()[0])["Name"].lstrip("/")
    either.corral("down", "one")
    stranger = either.docker.run("run", "-d", "--network=host", "--name", name, IMAGE, "sleep", "1000").stdout.strip()
    told = either.up("one", code=8)["error"]
    assert told["reason"] == "name_taken"
    assert name in told["message"]
    assert either.inspect(stranger)["State"]["Running"]


def test_what_an_earlier_launch_left_dead_is_replaced(bed: ContainerBed) -> None:
    bed.up("one")
    seen = bed.inspect(bed.containers()[0])
    name, owner = seen["Name"].lstrip("/"), seen["Config"]["Labels"]["corral.owner"]
    bed.corral("down", "one")
    bed.docker.run("create", "--name", name, "--label", f"corral.owner={owner}", IMAGE, "true")
    assert bed.up("one")["state"] == "ready"


def test_an_image_that_is_not_there(bed: ContainerBed) -> None:
    told = bed.up("one", code=8, image="no-such-image:1")["error"]
    assert told["reason"] == "no_image"
    assert "no-such-image:1" in told["message"]


def test_an_image_without_vllm(either: ContainerBed) -> None:
    either.docker.import_image("empty:1", {})
    told = either.up("one", code=8, image="empty:1")["error"]
    assert told["reason"] == "engine_broken"
    assert "the image has no command" in told["message"]


def test_a_daemon_that_is_not_there(bed: ContainerBed) -> None:
    bed.env["DOCKER_HOST"] = "unix:///nowhere/docker.sock"
    told = bed.up("one", code=8)["error"]
    assert told["reason"] == "no_runtime"


@pytest.mark.parametrize("victims", ["worker", "supervisor", "both"])
def test_a_container_does_not_outlive_its_agent(either: ContainerBed, victims: str) -> None:
    either.up("one")
    supervisor = either.pid_of_agent("one")
    (worker,) = [pid for pid, row in process_table().items() if row[0] == supervisor]
    for pid in {"worker": [worker], "supervisor": [supervisor], "both": [supervisor, worker]}[victims]:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not either.containers())
    assert either.ended("one")["reason"] == "agent_killed"


def test_a_container_that_lost_everybody_is_swept(either: ContainerBed) -> None:
    """Agent and client are killed at once: nobody is left who could pass a signal on."""
    either.up("one")
    supervisor = either.pid_of_agent("one")
    everybody = {supervisor} | descendants(supervisor)
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)  # so that none of them sees another one go
    for pid in everybody:
        os.kill(pid, signal.SIGKILL)
    until(lambda: either.status("one")["state"] == "failed")
    assert either.containers()
    either.corral("down", "one")
    assert not either.containers()
    assert either.up("one")["state"] == "ready"


def test_a_server_that_nobody_may_look_into_is_still_ours(docker: Docker, tmp_path: Path) -> None:
    """An agent of a plain user, and a container of root's: its sockets cannot be compared."""
    folder = tmp_path / "rank0"
    folder.mkdir()
    port = free_port()
    (folder / "key").write_text("k" * 32)
    launch_id = secrets.token_hex(8)
    runtime = make_runtime("docker", {"image": IMAGE, "user": "image"}, NodeSide(str(folder), "cpu", "0.32.0"))
    wrapped = runtime.wrap(
        EngineCommand(
            "d", launch_id, 0, (*runtime.serve, "m", "--port", str(port)), {"CORRAL_KEY_FILE": str(folder / "key")},
            str(folder), (str(folder / "key"),), (str(folder),),
        )
    )  # fmt: skip
    names = {"events": "events.jsonl", "log": "engine.log", "heartbeat": "h.json", "agent_file": "agent.json",
             "engine_file": "engine.json", "stop_file": "stop"}  # fmt: skip
    spec = {
        "launch_id": launch_id, "deployment": "d", "rank": 0, "argv": wrapped.argv, "env": wrapped.env,
        "unset_env": UNSET, "cwd": str(folder),
        "patience": to_json(Patience(hung_s=600, grace_s=5)),
        "serve": {"host": "127.0.0.1", "port": port, "model": "m", "key_file": str(folder / "key")},
        "cleanup": wrapped.cleanup, "pid_query": wrapped.pid_query,
        **{key: str(folder / name) for key, name in names.items()},
    }  # fmt: skip
    (folder / "spec.json").write_text(json.dumps(spec))
    (folder / "agent.py").write_text(bundle("node/agent"))
    for path in (folder, *folder.iterdir()):
        os.chown(path, 65534, 65534)
    for parent in (*folder.parents, Path(docker.env["DOCKER_HOST"].removeprefix("unix://")).parent):
        parent.chmod(parent.stat().st_mode | 0o011)
    Path(docker.env["DOCKER_HOST"].removeprefix("unix://")).chmod(0o666)
    process = subprocess.Popen(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-I",
         str(folder / "agent.py"), "run", str(folder / "spec.json")],
        env={"PATH": testbed.PATH, "HOME": str(folder), **docker.env},
    )  # fmt: skip

    def state() -> str:
        states = [event for event in read_events(folder / "events.jsonl") if event.kind == "state"]
        return str(states[-1].get("state")) if states else ""

    until(lambda: state() in ("ready", "failed"))
    assert state() == "ready", (folder / "engine.log").read_text() + (folder / "events.jsonl").read_text()
    process.terminate()
    process.wait(120)
    assert state() == "stopped"
    assert not docker.run("ps", "-aq").stdout
