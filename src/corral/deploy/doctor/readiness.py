"""Whether nodes are ready for GPUs and containers, and the script that makes them so. Pure; nothing is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from corral.base.errors import UsageError
from corral.base.untrusted import plain
from corral.deploy.doctor.distribution import Distribution, RepairStep, commands, distribution_of
from corral.deploy.doctor.finding import Finding, Level, ok
from corral.plan.hardware.survey import NodeFacts

HEADER = "# Written by `corral doctor --fix-script`. Read it before you run it."
# whether a step is still wanted on the node where the script runs: it may be run on every node, and again
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
    """What the node lacks for this runtime, in the order in which it is put right."""
    told = node.readiness
    if told.nvidia_devices and not told.driver and not node.gpus:
        yield Lack(RepairStep.DRIVER, f"{told.nvidia_devices} NVIDIA GPUs on its PCI bus, but no driver is loaded")
    if told.nvswitches and told.driver and not told.fabric_manager:
        text = "it has NVSwitches, but no fabric manager was seen running (from inside a container it cannot be seen)"
        yield Lack(RepairStep.FABRIC_MANAGER, f"{text}: CUDA fails without it", Level.WARNING)
    if runtime == "docker":
        yield from _lacks_for_docker(node)
    elif runtime == "podman":
        yield from _lacks_for_podman(node)


def _lacks_for_docker(node: NodeFacts) -> Iterator[Lack]:
    told = node.readiness
    there = "docker" in node.tools
    if not there:
        yield Lack(RepairStep.DOCKER, "Docker is not installed")
    elif told.docker_socket in ("none", "silent"):
        yield Lack(RepairStep.DOCKER_SERVICE, "Docker is installed, but its service is not running")
    if node.user != "root" and not told.docker_group and (not there or told.docker_socket == "refuses"):
        yield Lack(RepairStep.GROUP, f"{node.user or 'you'} may not use Docker")
    if told.nvidia_devices and not TOOLKIT_COMMANDS & set(node.tools):
        yield Lack(RepairStep.TOOLKIT, "the NVIDIA container toolkit is not installed")
    if told.nvidia_devices and not told.docker_nvidia:
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
    found = [_finding(node, lack) for node in facts for lack in lacks(node, runtime)]
    if found:
        return found
    if runtime in ("docker", "podman"):
        return [ok("node", f"ready for {runtime}" + (" with GPUs" if facts[0].readiness.nvidia_devices else ""))]
    having = [name for name in ("docker", "podman", "apptainer") if all(name in node.tools for node in facts)]
    said = f"has {' and '.join(having)}" if having else "has no container runtime"
    return [ok("node", f"{said}; only --runtime docker, podman or apptainer needs one")]


def _finding(node: NodeFacts, lack: Lack) -> Finding:
    where = distribution_of(node)
    words = commands(lack.step, where, node) if where else ()
    remedy = f"On the node, then: {AFTER[lack.step]}" if lack.step in AFTER else "On the node:"
    remedy = remedy if words else UNKNOWN
    return Finding(lack.level, "node", lack.text, node.host, remedy, words)


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
        if step in wanted and (words := commands(step, where, wanted[step])):
            lines += [f"# {step.value}", f"if {GUARDS[step]}; then", *(f"    {word}" for word in words)]
            lines += [f'    echo "{AFTER[step].replace("`", "")}"'] if step in AFTER else []
            lines += ["fi", ""]
    return "\n".join(lines)


def _one_distribution(nodes: Sequence[NodeFacts]) -> Distribution:
    found = {distribution_of(node) for node in nodes}
    known = [each for each in found if each]
    if len(found) == 1 and known:
        return known[0]
    told = ", ".join(sorted(f"{node.host}: {plain(node.readiness.distribution, 40) or 'unknown'}" for node in nodes))
    if known:
        raise UsageError(
            f"the nodes run different distributions ({told}).", "Write one script for each: --hosts NODE."
        )
    raise UsageError(f"the commands for this distribution are not known ({told}).", UNKNOWN)
