"""Ports: who holds those asked for, and which are free."""

import glob
import os
from typing import Any, Dict, List, Tuple

from ..ports import free_ports, reserved_ports
from .processes import command_of, user_name

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
