"""The testbed keeps its promises: hosts to cut and to lose, SLURM over two nodes, Docker with a python3 image."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.testbed import missing
from tests.testbed.containers import Docker
from tests.testbed.hosts import Hosts, wait_for
from tests.testbed.slurm import Slurm

needs_hosts = pytest.mark.skipif(bool(missing()), reason=missing())
needs_slurm = pytest.mark.skipif(bool(missing("slurm")), reason=missing("slurm"))
needs_accounting = pytest.mark.skipif(bool(missing("slurm", "accounting")), reason=missing("slurm", "accounting"))
needs_docker = pytest.mark.skipif(bool(missing("containers")), reason=missing("containers"))


def mounts_below(folder: Path) -> list[str]:
    """The machine's mounts in a folder; others may use the testbed at the same time, so theirs do not count."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if line.split()[1].startswith(str(folder))]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with Hosts(folder, users=("alice",), private=(folder / "local",)) as hosts:
        yield hosts


@needs_hosts
class TestHosts:
    def test_hosts_reach_each_other_by_ssh_under_their_names(self, hosts: Hosts) -> None:
        done = hosts.ssh("node1", "hostname; ssh node2 hostname; ls /sys/class/net")
        assert done.stdout.split() == ["node1", "node2", "eth0", "lo"], done.stderr

    def test_the_machine_outside_is_not_reached(self, hosts: Hosts) -> None:
        code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=9)"
        done = hosts.exec("node1", [sys.executable, "-c", code], check=False)
        assert "Network is unreachable" in done.stderr

    def test_temporary_folders_and_local_disks_are_each_hosts_own_and_the_rest_is_shared(self, hosts: Hosts) -> None:
        places = ("/tmp/mine", "/dev/shm/mine", "/run/mine", f"{hosts.folder}/local/mine", f"{hosts.folder}/ours")
        hosts.exec("node1", ["touch", *places])
        seen = [hosts.exec("node2", ["test", "-e", place], check=False).returncode == 0 for place in places]
        assert seen == [False, False, False, False, True]
        assert not any(Path(place).exists() for place in places[:4])

    def test_another_user_logs_in(self, hosts: Hosts) -> None:
        command = [*hosts.ssh_command, "alice@node1", "id -un; pwd; touch x"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.split() == ["alice", str(hosts.home("alice"))], done.stderr
        assert hosts.exec("node2", ["id", "-un"], user="alice").stdout == "alice\n"
        assert hosts.exec("node2", [sys.executable, "-c", "print(1)"], user="alice").stdout == "1\n"

    def test_a_cut_cable_and_its_repair(self, hosts: Hosts) -> None:
        hosts.cut("node1")
        assert hosts.ssh("node1", "true").returncode == 255
        hosts.heal("node1")
        assert hosts.ssh("node1", "hostname").stdout == "node1\n"

    def test_power_loss_takes_all_processes_without_a_word_to_the_peers(self, hosts: Hosts) -> None:
        process = hosts.popen("node2", ["sleep", "600"])
        wait_for(lambda: [line for _, line in hosts.processes("node2")] == ["sleep 600"], 5, "the process")
        client = subprocess.Popen([*hosts.ssh_command, "node2", "sleep 601"], stdin=subprocess.PIPE)
        wait_for(lambda: len(hosts.processes("node2")) == 2, 5, "the session")
        hosts.power_off("node2")
        assert process.wait(timeout=5)
        assert hosts.processes("node2") == []
        with pytest.raises(subprocess.TimeoutExpired):  # a connection to a dead host stays open
            client.wait(timeout=0.5)
        hosts.power_on("node2")
        assert hosts.ssh("node2", "hostname").stdout == "node2\n"
        client.communicate(b"anybody there?\n", timeout=120)  # nobody knows of this connection any more
        assert client.returncode == 255
        assert hosts.processes("node2") == []

    def test_a_changed_host_key_is_refused_until_it_is_trusted(self, hosts: Hosts) -> None:
        hosts.change_host_key("node1")
        assert "IDENTIFICATION HAS CHANGED" in hosts.ssh("node1", "true").stderr
        hosts.trust("node1")
        assert hosts.ssh("node1", "true").returncode == 0

    def test_a_second_network_reaches_only_its_hosts(self, hosts: Hosts) -> None:
        hosts.add_network("ib0", ["node1", "node2"])
        ask = [sys.executable, "-c", "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=2)"]
        address = hosts.address("node2", "ib0")
        assert hosts.exec("node1", [*ask, address], check=False).returncode == 0
        assert hosts.exec("head", [*ask, address], check=False).returncode != 0
        hosts.add_interface("head", "docker0", "172.29.0.1")
        assert "172.29.0.1" in hosts.exec("head", ["ip", "addr"]).stdout

    def test_a_full_disk(self, hosts: Hosts) -> None:
        place = hosts.folder / "small"
        place.mkdir()
        hosts.limit_disk("node1", place, 65536)
        done = hosts.exec("node1", ["dd", "if=/dev/zero", f"of={place}/x", "bs=1M", "count=1"], check=False)
        assert "No space left" in done.stderr
        assert list(place.iterdir()) == []

    def test_nothing_is_left_even_when_the_test_is_killed(self, tmp_path: Path) -> None:
        code = (
            "import sys, time; from pathlib import Path; from tests.testbed.hosts import Hosts\n"
            "h = Hosts(Path(sys.argv[1]), ('a', 'b')); h.up(); h.popen('a', ['sleep', '602'])\n"
            "print(h.pid('a'), h.link, flush=True); time.sleep(600)"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        owner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert owner.stdout
        first, link = owner.stdout.readline().split()
        assert (Path("/sys/class/net") / link).exists()
        owner.kill()
        owner.wait()
        owner.stdout.close()
        wait_for(lambda: not (Path("/sys/class/net") / link).exists(), 10, "the link to go")
        wait_for(lambda: _gone(int(first)), 10, "the host to go")
        assert mounts_below(tmp_path) == []


def _gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@needs_slurm
class TestSlurm:
    def test_jobs_run_on_two_nodes_with_devices_and_as_other_users(self, hosts: Hosts) -> None:
        with Slurm(hosts) as slurm:
            assert sorted(slurm.run("srun", "-N2", "hostname").stdout.split()) == ["node1", "node2"]
            command = ["srun", "--gpus-per-node=2", "sh", "-c", "id -un; echo $CUDA_VISIBLE_DEVICES"]
            assert slurm.run(*command, user="alice", cwd=hosts.home("alice")).stdout.split() == ["alice", "0,1"]
            job = hosts.ssh("head", "sbatch --parsable -p debug -N2 --wrap 'sleep 603'").stdout.strip()
            wait_for(lambda: any("sleep 603" in line for _, line in hosts.processes("node1")), 10, "the job")
            slurm.stop_controller()
            assert slurm.run("timeout", "1", "squeue", check=False).returncode
            slurm.start_controller()
            slurm.run("scancel", job)
            wait_for(lambda: hosts.processes("node1") == [], 20, "the job's end")
            slurm.wait_idle()
            hosts.power_off("node1")
            slurm.restart_node("node1")
            slurm.wait_idle()

    @needs_accounting
    def test_accounting_knows_jobs_and_accounts(self, hosts: Hosts) -> None:
        with Slurm(hosts, accounting=True) as slurm:
            slurm.run("srun", "--account=proj1", "true")
            ask = ["sacct", "-aXnP", "-o", "Account,State"]
            wait_for(lambda: slurm.run(*ask).stdout == "proj1|COMPLETED\n", 15, "the record")


@needs_docker
class TestDocker:
    def test_python_runs_in_an_image_made_here(self, tmp_path: Path) -> None:
        with Docker(tmp_path / "docker") as docker:
            docker.import_image("stand-in:1", {"/app/hello.py": "import json, ssl, asyncio; print(json.dumps('hi'))"})
            options = ["--rm", "--network=host", "--gpus=all", "--ipc=host", "--ulimit=memlock=-1"]
            assert docker.run("run", *options, "stand-in:1", "python3", "/app/hello.py").stdout == '"hi"\n'
            docker.run("run", "--detach", "--network=host", "stand-in:1", "sleep", "604")
            socket = Path(docker.env["DOCKER_HOST"].removeprefix("unix://"))
        assert not socket.parent.exists()
        assert mounts_below(tmp_path) == mounts_below(socket.parent) == []

    def test_a_host_has_a_docker_of_its_own(self, hosts: Hosts) -> None:
        with Docker(hosts.folder / "docker", hosts, "node1") as docker:
            docker.import_image("stand-in:1")
            code = "import socket; print(socket.gethostname())"
            done = hosts.ssh("node1", f"docker run --rm --network=host --uts=host stand-in:1 python3 -c '{code}'")
            assert done.stdout == "node1\n", done.stderr


@needs_hosts
def test_the_installer_says_what_it_lacks_without_root(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        parent.chmod(parent.stat().st_mode | 0o011)
    (tmp_path / "id").symlink_to("/usr/bin/id")  # a machine that has next to nothing
    installer = tmp_path / "install_testbed.sh"
    installer.write_text((ROOT / "tools" / "install_testbed.sh").read_text())
    command = ["setpriv", "--reuid=65534", "--clear-groups", "env", f"PATH={tmp_path}", "/bin/bash", str(installer)]

    def said(*parts: str) -> str:
        done = subprocess.run([*command, *parts], capture_output=True, text=True)
        assert done.returncode == (2 if "x" in parts else 1)
        return done.stderr

    everything = said()
    assert everything.startswith("install_testbed: not root, and these packages are missing: ")
    assert everything.count("\n") == 1
    assert {"shellcheck", "docker.io", "podman", "chromium"} <= set(everything.split())
    assert said("unit").split(": ")[-1].split() == ["shellcheck", "openssl"]
    assert "there is no part x; parts are unit, cluster and browser" in said("x")
