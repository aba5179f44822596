"""The machine: name, cores, memory, limits, tools, and what an engine needs before it can use the GPUs.

For the GPUs that is the driver, the fabric manager, a container runtime and NVIDIA's toolkit.
"""

import glob
import grp
import json
import os
import platform
import pwd
import re
import resource
import shutil
import socket
import subprocess
import sys
from typing import Any, Dict, List

from ..files import number
from ..files import read_text as read
from ..processes import boot_id

Json = Dict[str, Any]
CONTAINERS = ("docker", "podman", "apptainer", "singularity", "nvidia-ctk", "nvidia-container-cli")
TOOLS = (*CONTAINERS, "conda", "nvidia-smi", "ray", "hf", "sbatch")
MOST_CPUINFO = 16384
PCI = "/sys/bus/pci/devices/*"
OS_RELEASE = "/etc/os-release"
DRIVER = "/proc/driver/nvidia/version"
PROCESSES = "/proc/[0-9]*/comm"
SOCKET = "/var/run/docker.sock"
DOCKER_FILES = ("/etc/docker/daemon.json", "~/.config/docker/daemon.json")
CDI_FILES = ("/etc/cdi/*nvidia*", "/var/run/cdi/*nvidia*")
NVIDIA, GRAPHICS, BRIDGE = "0x10de", "0x03", "0x0680"


def run(argv: List[str], limit_s: float) -> str:
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit_s,
        check=False,
        env=dict(os.environ, LC_ALL="C"),
    )
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        raise OSError("%s: %s" % (argv[0], (text.strip().splitlines() or ["no output"])[-1]))
    return text


def identity(_: Json) -> Json:
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "python_path": sys.executable or "",
        "home": os.path.expanduser("~"),
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "machine": platform.machine(),
        "boot_id": boot_id(),
    }


def cgroup_folders() -> List[str]:
    """The control group of this process and those around it, innermost first."""
    group = "/"
    for line in read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            group = line[3:]
    folders, folder = [], os.path.normpath("/sys/fs/cgroup/" + group)
    while folder.startswith("/sys/fs/cgroup"):
        folders.append(folder)
        folder = os.path.dirname(folder)
    return folders


def cores(_: Json) -> Json:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for folder in cgroup_folders():
        limit = read(folder + "/cpu.max").split()
        if len(limit) == 2 and limit[0].isdigit():
            count = min(count, max(1, -(-int(limit[0]) // int(limit[1]))))
    quota, period = (read("/sys/fs/cgroup/cpu/cpu.cfs_%s_us" % name) for name in ("quota", "period"))
    if quota.isdigit() and number(period):
        count = min(count, max(1, -(-int(quota) // int(period))))
    return {"cores": count}


def cpu(_: Json) -> Json:
    """What the kernel says about the first processor; the caller reads it."""
    return {"cpuinfo": read("/proc/cpuinfo")[:MOST_CPUINFO].split("\n\n")[0]}


def memory(_: Json) -> Json:
    lines = (line.split() for line in read("/proc/meminfo").splitlines())
    info = {row[0].rstrip(":"): int(row[1]) << 10 for row in lines if len(row) > 1 and row[1].isdigit()}
    total = info.get("MemTotal", 0)
    available = info.get("MemAvailable", info.get("MemFree", 0))
    pairs = [(folder + "/memory.max", folder + "/memory.current") for folder in cgroup_folders()]
    old = "/sys/fs/cgroup/memory/memory."
    for limit_file, used_file in [*pairs, (old + "limit_in_bytes", old + "usage_in_bytes")]:
        limit, used = read(limit_file), read(used_file)
        if limit.isdigit() and used.isdigit() and int(limit) < info.get("MemTotal", 0):
            total = min(total, int(limit))
            available = min(available, max(0, int(limit) - int(used)))
    return {"memory_bytes": total, "memory_available_bytes": available}


def limits(_: Json) -> Json:
    found = {}
    for name, kind in (("memlock_bytes", resource.RLIMIT_MEMLOCK), ("nofile", resource.RLIMIT_NOFILE)):
        soft, hard = resource.getrlimit(kind)
        found[name] = -1 if soft == resource.RLIM_INFINITY else soft
        found[name + "_hard"] = -1 if hard == resource.RLIM_INFINITY else hard
    return {"limits": found}


def tools(_: Json) -> Json:
    usual = [os.path.expanduser("~/.local/bin"), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/opt/conda/bin"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *usual])
    return {"tools": {name: where for name, where in ((n, shutil.which(n, path=path)) for n in TOOLS) if where}}


def hf_token(_: Json) -> Json:
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    token = os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")
    named = any(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    return {"hf_token": named or (os.path.isfile(token) and os.path.getsize(token) > 0)}


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
    values = {name: value.strip("\"'") for name, _, value in rows}
    like: List[str] = values.get("ID_LIKE", "").split()
    return {
        "distribution": values.get("ID", ""),
        "like": like,
        "release": values.get("VERSION_ID", ""),
        "codename": values.get("UBUNTU_CODENAME") or values.get("VERSION_CODENAME", ""),
    }


def docker_socket() -> str:
    """How Docker's socket behaves: answers, refuses this user, is silent, or is not there."""
    rootless = os.path.join(os.environ.get("XDG_RUNTIME_DIR", "/nowhere"), "docker.sock")
    if os.environ.get("DOCKER_HOST") or os.path.exists(rootless):
        return "own"  # the user's own daemon, or one elsewhere
    if not os.path.exists(SOCKET):
        return "none"
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(2)
        try:
            client.connect(SOCKET)
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
