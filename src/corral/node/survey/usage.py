"""Processes of other people: whose they are, and what they run, as far as it is nobody's secret.

Ports: who holds those asked for, and which are free.

GPUs and who uses them, as `nvidia-smi` tells.
"""

import glob
import os
import re
import shutil
from typing import Any, Dict, List, Tuple

from ..files import read_text as read
from ..ports import free_ports, reserved_ports
from .machine import number, run


def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def command_of(pid: int) -> str:
    """The first words of a command: enough to know it, not so much that a secret in its arguments is shown."""
    words = read("/proc/%d/cmdline" % pid).rstrip("\0").split("\0")
    if not words[0]:
        return read("/proc/%d/comm" % pid)
    if len(words) == 1:  # it has written its own title: all its arguments in one
        words = words[0].split()
    shown = [os.path.basename(words[0])]
    for word in words[1:4]:
        if word.startswith("-") and word not in ("-m", "-c"):
            break
        shown.append(word if word != "-c" else "-c …")
        if word == "-c":
            break
    return " ".join(shown)[:80]


def owner_of(pid: int) -> str:
    try:
        return user_name(os.stat("/proc/%d" % pid).st_uid)
    except OSError:
        return ""


Json = Dict[str, Any]
RESERVED = "another deployment that is starting"


def listeners() -> Dict[int, Tuple[str, int]]:
    """Port -> (socket inode, user id) of everything that listens here."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                lines = file.readlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == "0A":
                found[int(words[1].rpartition(":")[2], 16)] = (words[9], int(words[7]))
    return found


def owners(inodes: List[str]) -> Dict[str, int]:
    """Socket inode -> process, for processes we may look into."""
    wanted, found = {"socket:[%s]" % inode: inode for inode in inodes}, {}
    for link in glob.glob("/proc/[0-9]*/fd/*") if wanted else ():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target in wanted:
            found[wanted[target]] = int(link.split("/")[2])
    return found


def ports(asked: Json) -> Json:
    listening = listeners()
    taken = {port: listening[port] for port in asked.get("ports", []) if port in listening}
    processes = owners([inode for inode, _ in taken.values()])
    rows = []
    for port, (inode, uid) in sorted(taken.items()):
        pid = processes.get(inode, 0)
        rows.append({"port": port, "pid": pid, "user": user_name(uid), "command": command_of(pid) if pid else ""})
    for port in sorted(reserved_ports() & set(asked.get("ports", [])) - set(taken)):  # it loads, and will listen
        rows.append({"port": port, "pid": 0, "user": "", "command": RESERVED})
    return {"taken_ports": rows, "free_ports": free_ports(asked.get("free_ports", 0), asked.get("ports", []))}


SMI_S = 10.0


def cells(text: str, count: int) -> List[List[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == count]


def gpus(_: Json) -> Json:
    smi = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/bin:/usr/local/bin:/usr/lib/wsl/lib")
    if not smi:
        return {"gpus": [], "gpu_processes": [], "cuda_driver": ""}
    form = "--format=csv,noheader,nounits"
    wanted = "--query-gpu=index,name,uuid,memory.total,memory.used,driver_version"
    rows = [
        {
            "index": number(index),
            "name": name,
            "uuid": uuid,
            "memory_bytes": number(total) << 20,
            "used_bytes": number(used) << 20,
            "driver": driver,
        }
        for index, name, uuid, total, used, driver in cells(run([smi, wanted, form], SMI_S), 6)
    ]
    indices = {row["uuid"]: row["index"] for row in rows}
    processes = []
    text = run([smi, "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", form], SMI_S)
    for uuid, pid, used, name in cells(text, 4):
        processes.append(
            {
                "gpu": indices.get(uuid, -1),
                "pid": number(pid),
                "user": owner_of(number(pid)),
                "command": command_of(number(pid)) or name,
                "used_bytes": number(used) << 20,
            }
        )
    cuda = re.search(r"CUDA (?:UMD )?Version\s*:\s*([\d.]+)", run([smi], SMI_S))
    return {"gpus": rows, "gpu_processes": processes, "cuda_driver": cuda.group(1) if cuda else ""}
