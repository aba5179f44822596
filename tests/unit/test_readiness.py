"""Nodes that are not ready: what the survey sees, what the doctor says, and the script that puts it right."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from corral.base.errors import UsageError
from corral.cli.doctor import command
from corral.deploy.doctor.finding import Level, Report
from corral.deploy.doctor.readiness import (
    HEADER,
    PackageFamily,
    RepairStep,
    commands,
    distribution_of,
    fix_script,
    judge_readiness,
    lacks,
)
from corral.lab.report.doctor import report_lines
from corral.node.survey import machine as part
from corral.plan.hardware.survey import Asked, Here, NodeFacts, Readiness, survey_host
from tests.unit.conftest import Shellcheck

UBUNTU = {"distribution": "ubuntu", "like": ("debian",), "release": "24.04", "codename": "noble"}
RELEASES: dict[str, dict[str, Any]] = {
    "ubuntu": UBUNTU,
    "mint": {"distribution": "linuxmint", "like": ("ubuntu", "debian"), "release": "22", "codename": "noble"},
    "debian": {"distribution": "debian", "release": "12", "codename": "bookworm"},
    "rocky": {"distribution": "rocky", "like": ("rhel", "centos", "fedora"), "release": "9.5"},
    "rhel": {"distribution": "rhel", "like": ("fedora",), "release": "10.1"},
    "fedora": {"distribution": "fedora", "release": "42"},
    "sles": {"distribution": "sles", "like": ("suse",), "release": "15.6"},
    "leap": {"distribution": "opensuse-leap", "like": ("suse", "opensuse"), "release": "15.6"},
}


def bare(host: str = "a", tools: dict[str, str] | None = None, **told: Any) -> NodeFacts:
    """A new machine with 8 GPUs and NVSwitches, on which nothing is installed yet."""
    facts = {**({} if "distribution" in told else UBUNTU), "nvidia_devices": 8, "nvswitches": 4, **told}
    return NodeFacts(host, user="ubuntu", machine="x86_64", tools=tools or {}, readiness=Readiness(**facts))


def steps(node: NodeFacts, runtime: str = "docker") -> list[RepairStep]:
    return [lack.step for lack in lacks(node, runtime)]


DONE = {"docker": "/usr/bin/docker", "nvidia-ctk": "/usr/bin/nvidia-ctk"}
DRIVER: dict[str, Any] = {"driver": "570.124.06"}
ALL: dict[str, Any] = {**DRIVER, "fabric_manager": True, "docker_socket": "answers", "docker_nvidia": True}


@pytest.mark.parametrize(
    ("node", "runtime", "lacking"),
    [
        (
            bare(),
            "docker",
            [RepairStep.DRIVER, RepairStep.DOCKER, RepairStep.GROUP, RepairStep.TOOLKIT, RepairStep.DOCKER_RUNTIME],
        ),
        (bare(), "managed", [RepairStep.DRIVER]),
        (bare(**DRIVER), "managed", [RepairStep.FABRIC_MANAGER]),
        (bare(tools=DONE, **ALL), "docker", []),
        (bare(tools=DONE, **{**ALL, "docker_socket": "silent"}), "docker", [RepairStep.DOCKER_SERVICE]),
        (bare(tools=DONE, **{**ALL, "docker_socket": "refuses"}), "docker", [RepairStep.GROUP]),
        (bare(tools=DONE, **{**ALL, "docker_socket": "refuses", "docker_group": True}), "docker", []),  # log in again
        (bare(tools=DONE, **{**ALL, "docker_socket": "own"}), "docker", []),
        (bare(tools=DONE, **{**ALL, "docker_nvidia": False}), "docker", [RepairStep.DOCKER_RUNTIME]),
        (bare(**{**ALL, "cdi": False}), "podman", [RepairStep.PODMAN, RepairStep.TOOLKIT, RepairStep.CDI]),
        (bare(nvidia_devices=0, nvswitches=0), "docker", [RepairStep.DOCKER, RepairStep.GROUP]),
        (bare(nvidia_devices=0, nvswitches=0), "managed", []),
    ],
)
def test_what_a_node_lacks(node: NodeFacts, runtime: str, lacking: list[RepairStep]) -> None:
    assert steps(node, runtime) == lacking


def test_root_needs_no_group() -> None:
    assert RepairStep.GROUP not in steps(dataclasses.replace(bare(), user="root"))


def test_a_finding_has_the_commands_of_the_nodes_distribution() -> None:
    finding = next(each for each in judge_readiness([bare()], "docker") if "Docker is not" in each.text)
    assert finding.level == Level.FATAL
    assert "sudo apt-get install -y docker-ce docker-ce-cli containerd.io" in finding.commands
    assert any("download.docker.com/linux/ubuntu noble stable" in line for line in finding.commands)
    report = Report(("a",), (finding,), (bare(),), None)
    shown = list(report_lines(report))
    assert [line for line in finding.commands if f"    {line}" not in shown] == []  # whole lines, to be pasted
    (ready,) = judge_readiness([bare(tools=DONE, **ALL)], "docker")
    assert (ready.level, ready.text) == (Level.OK, "ready for docker with GPUs")


@pytest.mark.parametrize(
    ("release", "family", "docker", "cuda"),
    [
        ("ubuntu", PackageFamily.DEBIAN, "ubuntu", "ubuntu2404/x86_64"),
        ("mint", PackageFamily.DEBIAN, "ubuntu", ""),
        ("debian", PackageFamily.DEBIAN, "debian", "debian12/x86_64"),
        ("rocky", PackageFamily.REDHAT, "centos", "rhel9/x86_64"),
        ("rhel", PackageFamily.REDHAT, "rhel", "rhel10/x86_64"),
        ("fedora", PackageFamily.REDHAT, "fedora", "fedora42/x86_64"),
        ("sles", PackageFamily.SUSE, "", "sles15/x86_64"),
        ("leap", PackageFamily.SUSE, "", "opensuse15/x86_64"),
    ],
)
def test_distributions(release: str, family: PackageFamily, docker: str, cuda: str) -> None:
    where = distribution_of(bare(**RELEASES[release]))
    assert where is not None
    assert where.family == family
    assert not docker or where.docker == docker
    assert not cuda or where.cuda == cuda


@pytest.mark.parametrize(
    "told",
    [
        {"distribution": "amzn", "like": ("fedora",), "release": "2023"},
        {"distribution": "gentoo", "release": "2.17"},
        {"distribution": ""},
        {"distribution": "ubuntu; rm -rf /", "like": ("ubuntu",), "release": "24.04"},
        {"codename": "$(reboot)"},
        {"release": "24.04\nreboot"},
    ],
)
def test_what_is_not_known_or_not_to_be_trusted_gives_no_command(told: dict[str, Any]) -> None:
    node = bare(**told)
    assert distribution_of(node) is None
    assert all(not finding.commands for finding in judge_readiness([node], "docker"))
    with pytest.raises(UsageError, match="not known"):
        fix_script([node], "docker")


def test_a_users_name_and_a_drivers_version_are_not_trusted_either() -> None:
    node = dataclasses.replace(bare(), user="x; reboot")
    where = distribution_of(node)
    assert where is not None
    assert commands(RepairStep.GROUP, where, node) == ('sudo usermod -aG docker "${SUDO_USER:-$USER}"',)
    assert commands(RepairStep.FABRIC_MANAGER, where, bare(driver="570.1; reboot")) == ()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("runtime", ["docker", "podman", "managed"])
@pytest.mark.parametrize("driver", ["", "570.124.06"])
def test_shellcheck_likes_the_script(release: str, runtime: str, driver: str, shellcheck: Shellcheck) -> None:
    script = fix_script([bare(driver=driver, **RELEASES[release])], runtime)
    assert HEADER in script
    assert "/tmp/" not in script  # where another user could replace what root installs
    shellcheck(script, "--severity=style")


def test_the_script_serves_all_nodes_of_one_distribution_only() -> None:
    ready, new = bare("a", DONE, **ALL), bare("b")
    assert "docker-ce" in fix_script([ready, new], "docker")
    assert fix_script([ready], "docker") == ""
    with pytest.raises(UsageError, match="different distributions"):
        fix_script([new, bare("c", **RELEASES["rocky"])], "docker")


SYSTEM = ("bash", "id", "grep", "env", "cat")
STAND_INS = (
    "apt-get",
    "install",
    "curl",
    "chmod",
    "tee",
    "systemctl",
    "usermod",
    "sed",
    "gpg",
    "dpkg",
    "pgrep",
    "uname",
)
STAND_IN = """#!/bin/bash
[ -t 0 ] || cat >/dev/null
echo "${0##*/} $*" >>"$LOG"
case "$*" in
    *docker-ce*) cp_tool/docker ;;
    *"install -y nvidia-container-toolkit"*) cp_tool/nvidia-ctk ;;
    --print-architecture) echo amd64 ;;
    is-active*) exit 1 ;;
esac
[ "${0##*/}" != pgrep ] || exit 1
"""


def test_the_script_runs_in_order_and_skips_what_is_done(tmp_path: Path) -> None:
    """With stand-ins for every program that changes something; sudo is not needed by root."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in SYSTEM:
        (tools / name).symlink_to(str(shutil.which(name)))
    body = STAND_IN.replace("cp_tool", '/bin/cp -f "$0" "${0%/*}"')
    for name in (*STAND_INS, "sudo"):
        (tools / name).write_text(body if name != "sudo" else '#!/bin/bash\nexec "$@"\n')
        (tools / name).chmod(0o755)
    script = tmp_path / "fix.sh"
    script.write_text(fix_script([bare(driver="570.124.06", fabric_manager=True)], "docker"))
    env = {"PATH": str(tools), "LOG": str(tmp_path / "log")}

    def ran() -> list[str]:
        (tmp_path / "log").write_text("")
        done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        assert "Log in again" in done.stdout
        return (tmp_path / "log").read_text().splitlines()

    first = ran()
    wanted = [
        "apt-get install -y docker-ce docker-ce-cli containerd.io",
        "systemctl enable --now docker",
        "usermod -aG docker ubuntu",
        "apt-get install -y nvidia-container-toolkit",
        "nvidia-ctk runtime configure --runtime=docker",
        "systemctl restart docker",
    ]
    assert [line for line in first if line in wanted] == wanted
    again = ran()
    assert not any("install" in line for line in again)  # what is there is left alone


def test_a_file_of_somebody_elses_is_not_overwritten(tmp_path: Path, clean_home: Path) -> None:
    mine = tmp_path / "notes.sh"
    mine.write_text("echo mine\n")
    words = ["--quick", "--runtime", "docker", "--fix-script", str(mine)]
    env = {"PATH": str(tmp_path), "DOCKER_HOST": ""}
    done = CliRunner().invoke(command, words, env=env, standalone_mode=False)
    if "is not written" not in done.output:  # this machine lacks something
        assert "was not written by `corral doctor`" in str(done.exception)
    assert mine.read_text() == "echo mine\n"


def test_the_survey_sees_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x030200"), ("0x10de", "0x068000"), ("0x15b3", "0x020700")]
    ):
        write(f"pci/{number}/vendor", vendor)
        write(f"pci/{number}/class", kind)
    monkeypatch.setattr(part, "PCI", str(tmp_path / "pci/*"))
    monkeypatch.setattr(part, "PROCESSES", str(tmp_path / "proc/*/comm"))
    monkeypatch.setattr(part, "SOCKET", str(tmp_path / "docker.sock"))
    monkeypatch.setattr(part, "CDI_FILES", (str(tmp_path / "cdi/*"),))
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (x)"
    monkeypatch.setattr(part, "DRIVER", write("driver", text))
    daemon = write("daemon.json", '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}')
    monkeypatch.setattr(part, "DOCKER_FILES", (daemon,))
    release = 'ID=ubuntu\nID_LIKE="debian"\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n'
    monkeypatch.setattr(part, "OS_RELEASE", write("os-release", release))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    found = part.readiness({})["readiness"]
    assert (found["nvidia_devices"], found["nvswitches"], found["driver"]) == (2, 1, "570.124.06")
    assert (found["distribution"], found["release"], found["codename"]) == ("ubuntu", "24.04", "noble")
    assert found["docker_nvidia"]
    assert not found["fabric_manager"]
    assert found["docker_socket"] == "none"
    write("proc/7/comm", "nv-fabricmanage\n")
    write("cdi/nvidia.yaml", "")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "docker.sock"))
        assert part.docker_socket() == "silent"
        listener.listen()
        found = part.readiness({})["readiness"]
    assert (found["docker_socket"], found["fabric_manager"], found["cdi"]) == ("answers", True, True)
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:2375")
    assert part.docker_socket() == "own"
    for broken in ("[]", "{", '{"runtimes": 5}', '{"runtimes": null}'):
        assert not part.has_nvidia(write("broken.json", broken))


def test_this_machine_says_what_it_runs() -> None:
    told = survey_host(Here(), "here", Asked()).readiness
    said = Path("/etc/os-release").read_text()
    assert f"ID={told.distribution}\n" in said.replace('"', "")
