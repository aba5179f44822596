"""Whether nodes are ready for GPUs and containers, and the commands and the script that make them so.

Pure: Corral runs none of these commands. Docker and NVIDIA publish packages for all of these distributions; on SUSE,
SUSE's own Docker is used, as is usual there. What a node says about itself becomes part of commands for root, so each
word must have the expected form.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from corral.base.errors import UsageError
from corral.base.untrusted import plain
from corral.deploy.doctor.finding import Finding, Level, ok
from corral.plan.hardware.survey import NodeFacts

CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"
TOOLKIT_REPOSITORY = "https://nvidia.github.io/libnvidia-container"
KEYRING = "/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg"
FORMS = {"name": r"[a-z][a-z0-9_-]{0,30}", "release": r"\d{1,4}(\.\d{1,3}){0,2}", "codename": r"[a-z]{0,30}"}
USER, DRIVER = r"[a-z_][a-z0-9_-]{0,31}", r"\d{3,4}(\.\d{1,3}){1,2}"


class PackageFamily(enum.StrEnum):
    """Distributions that use the same packages."""

    DEBIAN = "debian"
    REDHAT = "redhat"
    SUSE = "suse"


class RepairStep(enum.StrEnum):
    """One thing to repair, in the order of the repairs."""

    DRIVER = "the NVIDIA driver"
    FABRIC_MANAGER = "NVIDIA's fabric manager"
    DOCKER = "Docker"
    DOCKER_SERVICE = "Docker's service"
    GROUP = "the group docker"
    TOOLKIT = "the NVIDIA container toolkit"
    DOCKER_RUNTIME = "the toolkit in Docker's configuration"
    PODMAN = "Podman"
    CDI = "a CDI description of the GPUs"


@dataclass(frozen=True)
class Distribution:
    """A distribution whose commands are known."""

    family: PackageFamily
    name: str
    release: str
    codename: str
    machine: str  # as `uname -m` says
    derived: bool = False  # from Debian or Ubuntu, with release numbers of its own

    @property
    def major(self) -> str:
        return self.release.partition(".")[0]

    @property
    def docker(self) -> str:
        """Its name in Docker's repositories."""
        if self.family == PackageFamily.DEBIAN:
            return "ubuntu" if self.name == "ubuntu" else "debian"
        return self.name if self.name in ("fedora", "rhel") else "centos"

    @property
    def cuda(self) -> str:
        """Its name in NVIDIA's driver repositories."""
        where = {
            PackageFamily.DEBIAN: "ubuntu" + self.release.replace(".", "")
            if self.name == "ubuntu"
            else f"debian{self.major}",
            PackageFamily.REDHAT: f"fedora{self.major}" if self.name == "fedora" else f"rhel{self.major}",
            PackageFamily.SUSE: f"{'opensuse' if self.name.startswith('opensuse') else 'sles'}{self.major}",
        }[self.family]
        return f"{where}/{'sbsa' if self.machine == 'aarch64' else 'x86_64'}"


def distribution_of(node: NodeFacts) -> Distribution | None:
    """The node's distribution; None where its commands are not known, or its name has not the expected form."""
    readiness = node.readiness
    names = {"name": readiness.distribution, "release": readiness.release, "codename": readiness.codename}
    if readiness.distribution == "amzn" or not all(re.fullmatch(FORMS[key], text) for key, text in names.items()):
        return None  # Amazon's looks like Fedora and has other packages
    kin = {readiness.distribution, *readiness.like}
    name = "ubuntu" if "ubuntu" in kin else readiness.distribution
    for family, members in (
        (PackageFamily.DEBIAN, {"debian", "ubuntu"}),
        (PackageFamily.SUSE, {"suse", "sles", "opensuse"}),
        (PackageFamily.REDHAT, {"rhel", "centos", "fedora"}),
    ):
        if kin & members:
            derived = family == PackageFamily.DEBIAN and readiness.distribution not in members
            return Distribution(family, name, readiness.release, readiness.codename, node.machine, derived)
    return None


def commands(step: RepairStep, where: Distribution, node: NodeFacts) -> tuple[str, ...]:
    """The commands of a step, line by line; empty where they are not known."""
    user = node.user if re.fullmatch(USER, node.user) else '"${SUDO_USER:-$USER}"'
    match step:
        case RepairStep.DRIVER:
            return _driver(where)
        case RepairStep.FABRIC_MANAGER:
            return _fabric_manager(where, node.readiness.driver)
        case RepairStep.DOCKER:
            return (*_docker(where), "sudo systemctl enable --now docker")
        case RepairStep.DOCKER_SERVICE:
            return ("sudo systemctl enable --now docker",)
        case RepairStep.GROUP:
            return (f"sudo usermod -aG docker {user}",)
        case RepairStep.TOOLKIT:
            return _toolkit(where)
        case RepairStep.DOCKER_RUNTIME:
            return ("sudo nvidia-ctk runtime configure --runtime=docker", "sudo systemctl restart docker")
        case RepairStep.PODMAN:
            return (_install(where, "podman"),)
        case RepairStep.CDI:
            return ("sudo mkdir -p /etc/cdi", "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")


def _install(where: Distribution, *packages: str) -> str:
    how = {
        PackageFamily.DEBIAN: "apt-get install -y",
        PackageFamily.REDHAT: "dnf install -y",
        PackageFamily.SUSE: "zypper --non-interactive --gpg-auto-import-keys install",
    }
    return f"sudo {how[where.family]} {' '.join(packages)}"


def _docker(where: Distribution) -> tuple[str, ...]:
    source = f"https://download.docker.com/linux/{where.docker}"
    packages = _install(where, "docker-ce", "docker-ce-cli", "containerd.io")
    if where.family == PackageFamily.SUSE:
        return (_install(where, "docker"),)
    if where.family == PackageFamily.REDHAT:
        return (f"sudo curl -fsSL {source}/docker-ce.repo -o /etc/yum.repos.d/docker-ce.repo", packages)
    key = "/etc/apt/keyrings/docker.asc"
    line = f"deb [arch=$(dpkg --print-architecture) signed-by={key}] {source} {where.codename} stable"
    return (
        "sudo apt-get update",
        _install(where, "ca-certificates", "curl"),
        "sudo install -m 0755 -d /etc/apt/keyrings",
        f"sudo curl -fsSL {source}/gpg -o {key}",
        f"sudo chmod a+r {key}",
        f'echo "{line}" | sudo tee /etc/apt/sources.list.d/docker.list',
        "sudo apt-get update",
        packages,
    )


def _toolkit(where: Distribution) -> tuple[str, ...]:
    package = _install(where, "nvidia-container-toolkit")
    repository = f"{TOOLKIT_REPOSITORY}/stable/rpm/nvidia-container-toolkit.repo"
    if where.family == PackageFamily.REDHAT:
        return (f"sudo curl -fsSL {repository} -o /etc/yum.repos.d/nvidia-container-toolkit.repo", package)
    if where.family == PackageFamily.SUSE:
        return (f"sudo zypper --non-interactive addrepo --refresh {repository}", package)
    signed = f"sed 's#deb https://#deb [signed-by={KEYRING}] https://#g'"
    listed = "/etc/apt/sources.list.d/nvidia-container-toolkit.list"
    return (
        "sudo apt-get update",
        _install(where, "ca-certificates", "curl", "gnupg"),
        f"curl -fsSL {TOOLKIT_REPOSITORY}/gpgkey | sudo gpg --dearmor --yes -o {KEYRING}",
        f"curl -fsSL {TOOLKIT_REPOSITORY}/stable/deb/nvidia-container-toolkit.list | {signed} | sudo tee {listed}",
        "sudo apt-get update",
        package,
    )


def _driver(where: Distribution) -> tuple[str, ...]:
    """NVIDIA's own packages with the open kernel modules, which Hopper and later need or prefer."""
    if where.derived:
        return ()
    source = f"{CUDA}/{where.cuda}"
    name = where.cuda.partition("/")[0]
    if where.family == PackageFamily.DEBIAN:
        return (
            "sudo apt-get update",
            _install(where, "ca-certificates", "curl", '"linux-headers-$(uname -r)"'),
            "keyring=$(mktemp -d)",  # in /tmp itself another user could replace the package before root installs it
            f'curl -fsSL {source}/cuda-keyring_1.1-1_all.deb -o "$keyring/cuda-keyring.deb"',
            'sudo dpkg -i "$keyring/cuda-keyring.deb"',
            'rm -r "$keyring"',
            "sudo apt-get update",
            _install(where, "nvidia-open"),
        )
    if where.family == PackageFamily.SUSE:
        return (
            f"sudo zypper --non-interactive addrepo --refresh {source}/cuda-{name}.repo",
            _install(where, "kernel-default-devel", "nvidia-open"),
        )
    module = ("sudo dnf module enable -y nvidia-driver:open-dkms",) if where.major in ("8", "9") else ()
    return (
        f"sudo curl -fsSL {source}/cuda-{name}.repo -o /etc/yum.repos.d/cuda-{name}.repo",
        _install(where, '"kernel-devel-$(uname -r)"', '"kernel-headers-$(uname -r)"'),
        *module,
        _install(where, "nvidia-open"),
    )


def _fabric_manager(where: Distribution, driver: str) -> tuple[str, ...]:
    """The fabric manager of exactly the driver's version; before 580, the package's name has the branch in it."""
    if not re.fullmatch(DRIVER, driver):
        return ()
    branch = driver.partition(".")[0]
    exact = {
        PackageFamily.DEBIAN: f'"nvidia-fabricmanager={driver}*"',
        PackageFamily.REDHAT: f"nvidia-fabricmanager-{driver}",
        PackageFamily.SUSE: f'"nvidia-fabricmanager={driver}"',
    }[where.family]
    older = f"nvidia-fabricmanager-{branch}" + ("" if where.family != PackageFamily.DEBIAN else f'="{driver}*"')
    return (
        f"{_install(where, exact)} || {_install(where, older)}",
        "sudo systemctl enable --now nvidia-fabricmanager",
    )


HEADER = "# Written by `corral doctor --fix-script`. Read it before you run it."
# whether a step is still needed on the node where the script runs: it may be run on every node, and again
GUARDS = {
    RepairStep.DRIVER: "[ ! -e /proc/driver/nvidia/version ]",
    RepairStep.FABRIC_MANAGER: "! pgrep -f nv-fabricmanager >/dev/null",
    RepairStep.DOCKER: "! command -v docker >/dev/null",
    RepairStep.DOCKER_SERVICE: "! systemctl is-active --quiet docker",
    RepairStep.GROUP: "true",
    RepairStep.TOOLKIT: "! command -v nvidia-ctk >/dev/null",
    RepairStep.DOCKER_RUNTIME: "! grep -qs nvidia /etc/docker/daemon.json",
    RepairStep.PODMAN: "! command -v podman >/dev/null",
    RepairStep.CDI: "[ ! -e /etc/cdi/nvidia.yaml ]",
}
AFTER = {
    RepairStep.DRIVER: "Restart the machine (sudo reboot), then run `corral doctor` again.",
    RepairStep.GROUP: "Log in again (or run: newgrp docker). Members of this group can become root through Docker.",
}
TOOLKIT_COMMANDS = {"nvidia-ctk", "nvidia-container-cli"}  # the first is missing from old ones
UNKNOWN = (
    "The commands for this distribution are not known here: see docs.docker.com/engine/install and NVIDIA's guides."
)


@dataclass(frozen=True)
class Lack:
    """One thing that a node lacks."""

    step: RepairStep
    text: str
    level: Level = Level.FATAL


def lacks(node: NodeFacts, runtime: str) -> Iterator[Lack]:
    """What the node lacks for this runtime, in the order of the repairs."""
    readiness = node.readiness
    if readiness.nvidia_devices and not readiness.driver and not node.gpus:
        yield Lack(
            RepairStep.DRIVER, f"{readiness.nvidia_devices} NVIDIA GPUs on its PCI bus, but no driver is loaded"
        )
    if readiness.nvswitches and readiness.driver and not readiness.fabric_manager:
        text = "it has NVSwitches, but no fabric manager was seen running (from inside a container it cannot be seen)"
        yield Lack(RepairStep.FABRIC_MANAGER, f"{text}: CUDA fails without it", Level.WARNING)
    if runtime == "docker":
        yield from _lacks_for_docker(node)
    elif runtime == "podman":
        yield from _lacks_for_podman(node)


def _lacks_for_docker(node: NodeFacts) -> Iterator[Lack]:
    readiness = node.readiness
    there = "docker" in node.tools
    if not there:
        yield Lack(RepairStep.DOCKER, "Docker is not installed")
    elif readiness.docker_socket in ("none", "silent"):
        yield Lack(RepairStep.DOCKER_SERVICE, "Docker is installed, but its service is not running")
    if node.user != "root" and not readiness.docker_group and (not there or readiness.docker_socket == "refuses"):
        yield Lack(RepairStep.GROUP, f"{node.user or 'you'} may not use Docker")
    if readiness.nvidia_devices and not TOOLKIT_COMMANDS & set(node.tools):
        yield Lack(RepairStep.TOOLKIT, "the NVIDIA container toolkit is not installed")
    if readiness.nvidia_devices and not readiness.docker_nvidia:
        yield Lack(RepairStep.DOCKER_RUNTIME, "Docker's configuration does not name NVIDIA's runtime", Level.WARNING)


def _lacks_for_podman(node: NodeFacts) -> Iterator[Lack]:
    if "podman" not in node.tools:
        yield Lack(RepairStep.PODMAN, "Podman is not installed")
    if node.readiness.nvidia_devices and "nvidia-ctk" not in node.tools:
        yield Lack(RepairStep.TOOLKIT, "the NVIDIA container toolkit is not installed")
    if node.readiness.nvidia_devices and not node.readiness.cdi:
        yield Lack(RepairStep.CDI, "there is no CDI description of the GPUs, by which Podman finds them")


def judge_readiness(facts: Sequence[NodeFacts], runtime: str) -> list[Finding]:
    """A finding for each thing that a node lacks, with the commands for its distribution."""
    findings = [_finding(node, lack) for node in facts for lack in lacks(node, runtime)]
    if findings:
        return findings
    if runtime in ("docker", "podman"):
        return [ok("node", f"ready for {runtime}" + (" with GPUs" if facts[0].readiness.nvidia_devices else ""))]
    having = [name for name in ("docker", "podman", "apptainer") if all(name in node.tools for node in facts)]
    text = f"has {' and '.join(having)}" if having else "has no container runtime"
    return [ok("node", f"{text}; only --runtime docker, podman or apptainer needs one")]


def _finding(node: NodeFacts, lack: Lack) -> Finding:
    where = distribution_of(node)
    lines = commands(lack.step, where, node) if where else ()
    remedy = f"On the node, then: {AFTER[lack.step]}" if lack.step in AFTER else "On the node:"
    return Finding(lack.level, "node", lack.text, node.host, remedy if lines else UNKNOWN, lines)


def fix_script(facts: Sequence[NodeFacts], runtime: str) -> str:
    """A script for all of these nodes, to be read and run by their administrator; empty where nothing is lacking."""
    wanted: dict[RepairStep, NodeFacts] = {}
    for node in facts:
        for lack in lacks(node, runtime):
            wanted.setdefault(lack.step, node)
    if not wanted:
        return ""
    where = _one_distribution([node for node in facts if any(lacks(node, runtime))])
    lines = [
        "#!/usr/bin/env bash",
        HEADER,
        f"# For {where.name} {where.release} on {', '.join(node.host for node in facts)}.",
        "# Each step is left out where it is done already.",
        "set -euo pipefail",
        'sudo() { if [ "$(id -u)" -eq 0 ]; then "$@"; else command sudo "$@"; fi; }',
        "",
    ]
    for step in RepairStep:
        if step in wanted and (repair := commands(step, where, wanted[step])):
            lines += [f"# {step.value}", f"if {GUARDS[step]}; then", *(f"    {line}" for line in repair)]
            lines += [f'    echo "{AFTER[step].replace("`", "")}"'] if step in AFTER else []
            lines += ["fi", ""]
    return "\n".join(lines)


def _one_distribution(nodes: Sequence[NodeFacts]) -> Distribution:
    distributions = {distribution_of(node) for node in nodes}
    known = [one for one in distributions if one]
    if len(distributions) == 1 and known:
        return known[0]
    names = ", ".join(sorted(f"{node.host}: {plain(node.readiness.distribution, 40) or 'unknown'}" for node in nodes))
    if known:
        raise UsageError(
            f"the nodes run different distributions ({names}).", "Write one script for each: --hosts NODE."
        )
    raise UsageError(f"the commands for this distribution are not known ({names}).", UNKNOWN)
