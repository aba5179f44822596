"""Which process is meant, for good: its number is given again, so its machine, boot and start belong to it.

Standard library only, Python 3.8 or later, nothing of corral: the source is sent to the node.
"""

import contextlib
import os
import socket
from typing import Any, Dict, Mapping

Json = Dict[str, Any]


def boot_id() -> str:
    """A value that changes with every boot of this machine."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def start_ticks(pid: int) -> int:
    """When the process started, in the kernel's ticks; 0 when there is no such living process."""
    name = "self" if pid == os.getpid() else "%d" % pid  # a namespace may see the numbers of another one in /proc
    with contextlib.suppress(OSError, IndexError, ValueError), open("/proc/%s/stat" % name) as file:
        fields = file.read().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    return 0


def identity(pid: int) -> Json:
    """The process as it is recognised later."""
    return {"pid": pid, "host": socket.gethostname(), "boot_id": boot_id(), "start_ticks": start_ticks(pid)}


def is_running(process: Mapping[str, Any]) -> bool:
    """Whether a process of this machine still runs."""
    return bool(process["boot_id"] == boot_id() and start_ticks(process["pid"]) == process["start_ticks"] != 0)
