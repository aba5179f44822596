"""What must be there before an engine can use the GPUs of a node: driver, fabric manager, containers, toolkit."""

import glob
import grp
import json
import os
import pwd
import re
import socket
from typing import Any, Dict, List

from ..files import read_text as read

Json = Dict[str, Any]
PCI = "/sys/bus/pci/devices/*"
OS_RELEASE = "/etc/os-release"
DRIVER = "/proc/driver/nvidia/version"
PROCESSES = "/proc/[0-9]*/comm"
SOCKET = "/var/run/docker.sock"
DOCKER_FILES = ("/etc/docker/daemon.json", "~/.config/docker/daemon.json")
CDI_FILES = ("/etc/cdi/*nvidia*", "/var/run/cdi/*nvidia*")
NVIDIA, GRAPHICS, BRIDGE = "0x10de", "0x03", "0x0680"


def readiness(_: Json) -> Json:
    kinds = [read(device + "/class") for device in glob.glob(PCI) if read(device + "/vendor") == NVIDIA]
    driver = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", read(DRIVER))
    found = {
        "nvidia_devices": sum(kind.startswith(GRAPHICS) for kind in kinds),
        "nvswitches": sum(kind.startswith(BRIDGE) for kind in kinds),
        "driver": driver.group(1) if driver else "",
        "fabric_manager": any(read(name).startswith("nv-fabricmanage") for name in glob.glob(PROCESSES)),
        "docker_socket": docker_socket(),
        "docker_group": in_docker_group(),
        "docker_nvidia": any(has_nvidia(os.path.expanduser(name)) for name in DOCKER_FILES),
        "cdi": any(glob.glob(pattern) for pattern in CDI_FILES),
    }
    found.update(distribution())
    return {"readiness": found}


def distribution() -> Json:
    rows = (line.partition("=") for line in read(OS_RELEASE).splitlines())
    said = {name: value.strip("\"'") for name, _, value in rows}
    like: List[str] = said.get("ID_LIKE", "").split()
    return {
        "distribution": said.get("ID", ""),
        "like": like,
        "release": said.get("VERSION_ID", ""),
        "codename": said.get("UBUNTU_CODENAME") or said.get("VERSION_CODENAME", ""),
    }


def docker_socket() -> str:
    """How Docker's socket behaves: answers, refuses this user, is silent, or is not there."""
    own = os.path.join(os.environ.get("XDG_RUNTIME_DIR", "/nowhere"), "docker.sock")
    if os.environ.get("DOCKER_HOST") or os.path.exists(own):
        return "own"  # the user's own daemon, or one elsewhere
    if not os.path.exists(SOCKET):
        return "none"
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(2)
        try:
            line.connect(SOCKET)
        except PermissionError:
            return "refuses"
        except OSError:
            return "silent"
    return "answers"


def in_docker_group() -> bool:
    try:
        return pwd.getpwuid(os.getuid()).pw_name in grp.getgrnam("docker").gr_mem
    except KeyError:
        return False


def has_nvidia(path: str) -> bool:
    try:
        return "nvidia" in json.loads(read(path) or "{}").get("runtimes", {})
    except (ValueError, AttributeError, TypeError):
        return False
