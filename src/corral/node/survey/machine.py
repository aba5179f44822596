"""The machine itself: name, cores, memory, limits, tools.

Where facts come from: small files of the kernel's, and other programs.
"""

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from typing import Any, Dict, List

from ..files import read_text as read
from ..identity import boot_id


def number(text: str) -> int:
    """A whole number, or 0 for anything else: sysfs says -1 or an error where it does not know."""
    return int(text) if text.isdigit() else 0


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
        raise OSError("%s: %s" % (argv[0], (text.strip().splitlines() or ["it said nothing"])[-1]))
    return text


Json = Dict[str, Any]
CONTAINERS = ("docker", "podman", "apptainer", "singularity", "nvidia-ctk", "nvidia-container-cli")
TOOLS = (*CONTAINERS, "conda", "nvidia-smi", "ray", "hf", "sbatch")
MOST_CPUINFO = 16384


def identity(_: Json) -> Json:
    import pwd

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
    own = "/"
    for line in read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            own = line[3:]
    folders, folder = [], os.path.normpath("/sys/fs/cgroup/" + own)
    while folder.startswith("/sys/fs/cgroup"):
        folders.append(folder)
        folder = os.path.dirname(folder)
    return folders


def cores(_: Json) -> Json:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for folder in cgroup_folders():
        words = read(folder + "/cpu.max").split()
        if len(words) == 2 and words[0].isdigit():
            count = min(count, max(1, -(-int(words[0]) // int(words[1]))))
    quota, period = (read("/sys/fs/cgroup/cpu/cpu.cfs_%s_us" % name) for name in ("quota", "period"))
    if quota.isdigit() and number(period):
        count = min(count, max(1, -(-int(quota) // int(period))))
    return {"cores": count}


def cpu(_: Json) -> Json:
    """The kernel's words about the first processor; whoever asked reads them."""
    return {"cpuinfo": read("/proc/cpuinfo")[:MOST_CPUINFO].split("\n\n")[0]}


def memory(_: Json) -> Json:
    lines = (line.split() for line in read("/proc/meminfo").splitlines())
    info = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) > 1 and words[1].isdigit()}
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
