"""Processes: who they are, which belong to a launch, what they use, and how all of them are ended.

Sockets: who listens on a port of this node, and which processes hold what listens.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from ..identity import boot_id, start_ticks
from ..tcp_table import LISTEN, tcp_sockets, written

MARKER = "CORRAL_LAUNCH"  # environment variable that every process of a launch carries


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    _prctl(36, 1)


def end_with_parent() -> None:
    """In a new process: be ended with the thread that started it, also when that is killed."""
    _prctl(1, signal.SIGTERM)


def prepare_engine() -> None:
    """In the engine's process, before it becomes the engine: end with us, and take signals as usual."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def process_table() -> Dict[int, Tuple[int, int, int, str]]:
    """pid -> (parent, session, processor ticks used, state) of every process that can be seen."""
    table = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open("/proc/%s/stat" % name) as file:
                    fields = file.read().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])
                table[int(name)] = (int(fields[1]), int(fields[3]), ticks, fields[0])
    return table


def descendants(root: int) -> Set[int]:
    """All living processes below `root`."""
    table = process_table()
    children: Dict[int, List[int]] = {}
    for pid, (parent, _, _, state) in table.items():
        if state not in "ZX":
            children.setdefault(parent, []).append(pid)
    found: Set[int] = set()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def engine_sessions(engine_files: Sequence[str]) -> Set[int]:
    """Sessions that engines were started in; the kernel gives no number again while a session has it."""
    found = set()
    for path in engine_files:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError), open(path) as file:
            engine = json.load(file)
            if engine["boot_id"] == boot_id() and start_ticks(engine["pid"]) in (0, engine["start_ticks"]):
                found.add(int(engine["pid"]))
    return found


def marked(launch_id: str, engine_files: Sequence[str] = ()) -> Set[int]:
    """Processes that belong to a launch, by environment or by session.

    Two signs, because one can be lost: vLLM's processes write their titles over their environment, and Ray's have
    sessions of their own.
    """
    wanted = ("%s=%s" % (MARKER, launch_id)).encode()
    table = process_table()
    found = set()
    for pid in table:
        with contextlib.suppress(OSError), open("/proc/%d/environ" % pid, "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.add(pid)
    sessions = {table[pid][1] for pid in found if pid in table} | engine_sessions(engine_files)
    sessions.discard(os.getsid(0))
    found |= {pid for pid, row in table.items() if row[1] in sessions}
    return {pid for pid in found if table.get(pid, (0, 0, 0, "X"))[3] not in "ZX"} - {os.getpid(), os.getppid()}


def send(pids: Set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def reap() -> None:
    """Collect ended children that were handed to us."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_all(find: Any, grace_s: float) -> None:
    """TERM, wait, KILL whatever `find()` returns, until it returns nothing."""
    deadline = time.monotonic() + grace_s
    send(find(), signal.SIGTERM)
    send(find(), signal.SIGCONT)  # a stopped process hears nothing until it goes on
    while find() and time.monotonic() < deadline:
        reap()
        time.sleep(0.05)
    hard_deadline = time.monotonic() + 10
    while find() and time.monotonic() < hard_deadline:
        send(find(), signal.SIGKILL)
        reap()
        time.sleep(0.05)


def disk_bytes(pids: Set[int]) -> int:
    """Bytes the processes read and wrote so far."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open("/proc/%d/io" % pid) as file:
                values = dict(line.split(": ") for line in file.read().splitlines())
            # system calls, and what mapped files brought in behind their back
            total += sum(int(values[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
    return total


def kernel_oom_kills() -> int:
    """How many processes the kernel has ended for lack of memory since boot."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def listeners(host: str, port: int) -> Set[str]:
    """Inodes of the sockets that answer on this address and port: bound to it, or to every address."""
    own = written(host) if ":" not in host else set()  # IPv6: any listener on the port counts
    found = [one for one in tcp_sockets(port) if one.state == LISTEN]
    return {one.inode for one in found if not own or one.address in own or not one.address.strip("0")}


def sockets_of(pids: Set[int]) -> Set[str]:
    """Inodes of all sockets that these processes hold."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir("/proc/%d/fd" % pid):
                with contextlib.suppress(OSError):
                    link = os.readlink("/proc/%d/fd/%s" % (pid, name))
                    if link.startswith("socket:["):
                        found.add(link[8:-1])
    return found


def listener_users(port: int, inodes: Optional[Set[str]] = None) -> Set[int]:
    """Users whose sockets listen on a port; with `inodes`, of these sockets only."""
    found = [one for one in tcp_sockets(port) if one.state == LISTEN]
    return {one.uid for one in found if inodes is None or one.inode in inodes}
