"""The commands that make a node ready, for the distribution it runs. Pure; Corral runs none of them.

Docker and NVIDIA publish packages for all of these; SUSE's own Docker is taken, as is usual there.
What a node says about itself becomes part of commands for root, so each word must be of the expected form.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from corral.plan.hardware.survey import NodeFacts

CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"
TOOLKIT_REPOSITORY = "https://nvidia.github.io/libnvidia-container"
KEYRING = "/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg"
FORMS = {"name": r"[a-z][a-z0-9_-]{0,30}", "release": r"\d{1,4}(\.\d{1,3}){0,2}", "codename": r"[a-z]{0,30}"}
USER, DRIVER = r"[a-z_][a-z0-9_-]{0,31}", r"\d{3,4}(\.\d{1,3}){1,2}"


class PackageFamily(enum.StrEnum):
    """Who packages for whom."""

    DEBIAN = "debian"
    REDHAT = "redhat"
    SUSE = "suse"


class RepairStep(enum.StrEnum):
    """One thing to put right, in the order in which they are done."""

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
        """Under which name Docker publishes for it."""
        if self.family == PackageFamily.DEBIAN:
            return "ubuntu" if self.name == "ubuntu" else "debian"
        return self.name if self.name in ("fedora", "rhel") else "centos"

    @property
    def cuda(self) -> str:
        """Under which name NVIDIA publishes drivers for it."""
        where = {
            PackageFamily.DEBIAN: "ubuntu" + self.release.replace(".", "")
            if self.name == "ubuntu"
            else f"debian{self.major}",
            PackageFamily.REDHAT: f"fedora{self.major}" if self.name == "fedora" else f"rhel{self.major}",
            PackageFamily.SUSE: f"{'opensuse' if self.name.startswith('opensuse') else 'sles'}{self.major}",
        }[self.family]
        return f"{where}/{'sbsa' if self.machine == 'aarch64' else 'x86_64'}"


def distribution_of(node: NodeFacts) -> Distribution | None:
    """What the node runs, where its commands are known and its words have the expected form."""
    told = node.readiness
    words = {"name": told.distribution, "release": told.release, "codename": told.codename}
    if told.distribution == "amzn" or not all(re.fullmatch(FORMS[key], word) for key, word in words.items()):
        return None  # Amazon's looks like Fedora and has other packages
    kin = {told.distribution, *told.like}
    name = "ubuntu" if "ubuntu" in kin else told.distribution
    for family, members in (
        (PackageFamily.DEBIAN, {"debian", "ubuntu"}),
        (PackageFamily.SUSE, {"suse", "sles", "opensuse"}),
        (PackageFamily.REDHAT, {"rhel", "centos", "fedora"}),
    ):
        if kin & members:
            derived = family == PackageFamily.DEBIAN and told.distribution not in members
            return Distribution(family, name, told.release, told.codename, node.machine, derived)
    return None


def commands(step: RepairStep, where: Distribution, node: NodeFacts) -> tuple[str, ...]:
    """What to type on the node, line by line; empty where it is not known."""
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
            f"curl -fsSL {source}/cuda-keyring_1.1-1_all.deb -o /tmp/cuda-keyring.deb",
            "sudo dpkg -i /tmp/cuda-keyring.deb",
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
    """Of exactly the driver's version; the package's name has the branch in it, or since 580 has not."""
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
