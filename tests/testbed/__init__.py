"""A cluster on one machine: hosts with sshd, SLURM and Docker, made of namespaces, gone without a trace afterwards.

``hosts``       machines on a network of their own: cut their cable, pull their plug, change their key
``slurm``       real SLURM on such hosts: a login host with the controller, one slurmd per node, pretended GPUs
``containers``  a private Docker, and images with busybox and python3, also for Podman and Apptainer

Needs root and the packages of ``tools/install_testbed.sh``; ``missing()`` says what is lacking.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

COMMANDS = {
    "hosts": ("ssh", "sshd", "ip", "unshare", "nsenter"),
    "slurm": ("slurmctld", "slurmd", "munged", "sbatch"),
    "boot": ("systemd-analyze", "crontab", "cron"),
    "accounting": ("mariadbd", "slurmdbd"),
    "containers": ("dockerd", "docker", "runc", "busybox", "podman", "catatonit"),
    "apptainer": ("apptainer", "busybox"),
}
APPTAINER = Path("/opt/corral-testbed/apptainer")  # where tools/install_apptainer.sh puts it
UNAVAILABLE = APPTAINER.with_suffix(".unavailable")  # and where it says why there is none
PATH = ":".join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin", str(APPTAINER / "usr" / "bin")])
NOT_ROOT = "the testbed needs root"
NO_NAMESPACES = "this machine makes no namespaces"


def missing(*parts: str) -> str:
    """Why these parts of the testbed cannot run here, or an empty string."""
    if os.geteuid() != 0:
        return NOT_ROOT
    absent = [name for part in ("hosts", *parts) for name in COMMANDS[part] if not shutil.which(name, path=PATH)]
    if absent == ["apptainer"] and UNAVAILABLE.exists():
        return f"no Apptainer: {UNAVAILABLE.read_text().strip()}"
    if absent:
        return f"run tools/install_testbed.sh: {', '.join(absent)} not found"
    return "" if makes_namespaces() else NO_NAMESPACES


@functools.cache
def makes_namespaces() -> bool:
    command = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "true"]
    return subprocess.run(command, capture_output=True).returncode == 0
