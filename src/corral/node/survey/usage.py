"""What other people use on this node: the ports that were request about, and the GPUs as `nvidia-smi` lists them.

A process is shown by its owner and the beginning of its command; the rest of its arguments may hold secrets.
"""

import os
import re
import shutil
from typing import Any, Dict, List

from ..files import number, read_json
from ..files import read_text as read
from ..processes import launches as running_launches
from ..sockets import free_ports, holders, listening, reserved_ports
from .machine import run

Json = Dict[str, Any]
RESERVED = "another deployment that is starting"
SMI_S = 10.0


def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def command_of(pid: int) -> str:
    """The beginning of a command: enough to recognise it, too little to show a secret in its arguments."""
    argv = read("/proc/%d/cmdline" % pid).rstrip("\0").split("\0")
    if not argv[0]:
        return read("/proc/%d/comm" % pid)
    if len(argv) == 1:  # a process that wrote its own title: all arguments in one
        argv = argv[0].split()
    shown = [os.path.basename(argv[0])]
    for argument in argv[1:4]:
        if argument.startswith("-") and argument not in ("-m", "-c"):
            break
        shown.append(argument if argument != "-c" else "-c …")
        if argument == "-c":
            break
    return " ".join(shown)[:80]


def owner_of(pid: int) -> str:
    try:
        return user_name(os.stat("/proc/%d" % pid).st_uid)
    except OSError:
        return ""


def ports(request: Json) -> Json:
    wanted = request.get("ports", [])
    taken = {port: one for port in wanted for one in listening(port)}
    processes = holders({one.inode for one in taken.values()})
    rows = []
    for port, one in sorted(taken.items()):
        pid = processes.get(one.inode, 0)
        rows.append({"port": port, "pid": pid, "user": user_name(one.uid), "command": command_of(pid) if pid else ""})
    for port in sorted(reserved_ports() & set(wanted) - set(taken)):  # its engine still loads, and will listen
        rows.append({"port": port, "pid": 0, "user": "", "command": RESERVED})
    return {"taken_ports": rows, "free_ports": free_ports(request.get("free_ports", 0), wanted)}


def launches(request: Json) -> Json:
    """Processes and agents that carry a launch id; nothing unless that was requested."""
    if not request.get("launches"):
        return {}
    found = running_launches()
    folders: Dict[str, str] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # an agent carries no mark of its own
        argv = read("/proc/%s/cmdline" % name).split("\0")
        script = next((at for at, word in enumerate(argv) if word.endswith("/node/agent.py")), len(argv))
        if argv[script + 1 : script + 2] == ["run"]:
            id = str(read_json(argv[script + 2]).get("launch_id"))
            found.setdefault(id, set()).add(int(name))
            folders[id] = os.path.dirname(os.path.dirname(argv[script + 2]))
    rows = []
    for id, pids in found.items():
        row = {"id": id, "pids": sorted(pids), "command": command_of(min(pids)), "folder": folders.get(id, "")}
        rows.append(row)
    return {"launches": rows}


def containers(request: Json) -> Json:
    """Containers that carry a launch id; nothing unless that was requested. A client that fails is an error."""
    rows = []
    for client in ("docker", "podman") if request.get("launches") else ():
        if shutil.which(client):
            ids = run([client, "ps", "-aq", "--no-trunc", "--filter", "label=corral.launch"], SMI_S).split()
            form = '{{.Id}} {{index .Config.Labels "corral.launch"}}'
            told = run([client, "inspect", "--format", form, *ids], SMI_S) if ids else ""
            rows += [{"client": client, "id": row[0], "launch": row[1]} for row in map(str.split, told.splitlines())]
    return {"containers": rows}


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
