"""Processes of this machine: which one is meant, which belong to a launch, what they use, and how all of them are
ended.

A process number is reused, so a process is identified by its number together with its machine, boot and start time.

Standard library only, nothing of corral: the source is sent to the node. (Part of `survey`, which older Pythons
read.)
"""

import contextlib
import ctypes
import os
import signal
import socket
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Set

from .files import read_json

Json = Dict[str, Any]
MARKER = "CORRAL_LAUNCH"  # environment variable that every process of a launch carries
ENDED = "ZX"  # states of a process that no longer runs


# ---------------------------------------------------------------------------------------------------------- identity
def boot_id() -> str:
    """A value that changes with every boot of this machine."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def stat_fields(process: str) -> List[str]:
    """The fields of /proc/PROCESS/stat after the command's name: state, parent, …; OSError where there is none."""
    with open("/proc/%s/stat" % process, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def start_ticks(pid: int) -> int:
    """When the process started, in the kernel's ticks; 0 when no such process runs."""
    name = "self" if pid == os.getpid() else "%d" % pid  # /proc may show the numbers of another namespace
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = stat_fields(name)
        return 0 if fields[0] in ENDED else int(fields[19])
    return 0


def identity(pid: int) -> Json:
    """What identifies a process for good."""
    return {"pid": pid, "host": socket.gethostname(), "boot_id": boot_id(), "start_ticks": start_ticks(pid)}


def is_running(process: Mapping[str, Any]) -> bool:
    """Whether a process of this machine still runs."""
    return bool(process["boot_id"] == boot_id() and start_ticks(process["pid"]) == process["start_ticks"] != 0)


# -------------------------------------------------------------------------------------------------- parent and child
def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl(36, 1)


def end_with_parent() -> None:
    """In a new process: end when the thread that started it ends, also when that is killed."""
    _prctl(1, signal.SIGTERM)


def prepare_engine() -> None:
    """In the engine's process, before it becomes the engine: end with the agent, and handle signals as usual."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Process(NamedTuple):
    """One row of the process table."""

    parent: int
    session: int
    ticks: int  # of processor time
    state: str


def process_table() -> Dict[int, Process]:
    """Every visible process by its number."""
    table = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = stat_fields(name)
                ticks = int(fields[11]) + int(fields[12])
                table[int(name)] = Process(int(fields[1]), int(fields[3]), ticks, fields[0])
    return table


def descendants(root: int) -> Set[int]:
    """All running processes below `root`."""
    children: Dict[int, List[int]] = {}
    for pid, process in process_table().items():
        if process.state not in ENDED:
            children.setdefault(process.parent, []).append(pid)
    found: Set[int] = set()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


# ----------------------------------------------------------------------------------------- the processes of a launch
def engine_sessions(engine_files: Sequence[str]) -> Set[int]:
    """Sessions that engines were started in; the kernel does not reuse a number while a session has it."""
    sessions = set()
    for path in engine_files:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            engine = read_json(path)
            if engine["boot_id"] == boot_id() and start_ticks(engine["pid"]) in (0, engine["start_ticks"]):
                sessions.add(int(engine["pid"]))
    return sessions


def marked(launch_id: str, engine_files: Sequence[str] = ()) -> Set[int]:
    """Running processes that belong to a launch, by environment or by session.

    Two marks, because one can be lost: vLLM's processes write their titles over their environment, and Ray's have
    sessions of their own.
    """
    wanted = ("%s=%s" % (MARKER, launch_id)).encode()
    table = process_table()
    found = set()
    for pid in table:
        with contextlib.suppress(OSError), open("/proc/%d/environ" % pid, "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.add(pid)
    sessions = {table[pid].session for pid in found} | engine_sessions(engine_files)
    sessions.discard(os.getsid(0))
    found |= {pid for pid, process in table.items() if process.session in sessions}
    return {pid for pid in found if table[pid].state not in ENDED} - {os.getpid(), os.getppid()}


def launches() -> Dict[str, Set[int]]:
    """The running processes of this user that carry a launch id in their environment, by that id."""
    start = ("%s=" % MARKER).encode()
    found: Dict[str, Set[int]] = {}
    for pid, process in process_table().items():
        with contextlib.suppress(OSError), open("/proc/%d/environ" % pid, "rb") as file:
            for variable in file.read().split(b"\0"):
                if variable.startswith(start) and process.state not in ENDED:
                    found.setdefault(variable[len(start) :].decode("utf-8", "replace"), set()).add(pid)
    return found


def end_all(find: Callable[[], Set[int]], grace_s: float) -> None:
    """TERM, wait, KILL whatever `find()` returns, until it returns nothing."""
    deadline = time.monotonic() + grace_s
    _send(find(), signal.SIGTERM)
    _send(find(), signal.SIGCONT)  # a stopped process receives nothing until it continues
    while find() and time.monotonic() < deadline:
        reap()
        time.sleep(0.05)
    hard_deadline = time.monotonic() + 10
    while find() and time.monotonic() < hard_deadline:
        _send(find(), signal.SIGKILL)
        reap()
        time.sleep(0.05)


def _send(pids: Set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap() -> None:
    """Collect ended children, adopted ones included."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


# --------------------------------------------------------------------------------------------------------------- use
def disk_bytes(pids: Set[int]) -> int:
    """Bytes that the processes have read and written so far."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open("/proc/%d/io" % pid) as file:
                values = dict(line.split(": ") for line in file.read().splitlines())
            # system calls, and pages of mapped files, which are read without one
            total += sum(int(values[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
    return total


def kernel_oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since boot."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
