"""What a node is: one JSON object on stdout, for `corral doctor` and for targets that must choose addresses.

Runs on any python3 >= 3.8 with the standard library alone, its source given on stdin and what is asked as JSON in
the first argument. (An older Python still gets as far as saying its version.) Every part runs in a thread of its
own with a limit in time: a part that fails or hangs is one entry of "errors", never a crash, so that a dead network
file system or a stuck driver does not hide the rest. Nothing is changed on the node, and no secret is read out.
"""

import glob
import json
import os
import platform
import random
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

TOOLS = ("docker", "podman", "apptainer", "singularity", "conda", "nvidia-smi", "ray", "hf", "sbatch")
PORTS = (15000, 30000)  # below the range from which the kernel takes ports for outgoing connections
LIMIT_S = 20.0
SMI_S = 10.0
CONTAINER_BRIDGES = re.compile(r"^(docker|br-[0-9a-f]{12}|cni|podman|lxcbr|lxdbr|incusbr|flannel|cilium|kube)")
Json = Dict[str, Any]


def read(path: str) -> str:
    """A small file's text, or nothing."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65536).strip()
    except (OSError, ValueError):
        return ""


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


# --- the machine -----------------------------------------------------------------------------------------------


def identity(_: Json) -> Json:
    import pwd

    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "python_path": sys.executable or "",
        "home": os.path.expanduser("~"),
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "machine": platform.machine(),
        "boot_id": read("/proc/sys/kernel/random/boot_id"),
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
    places = [os.path.expanduser("~/.local/bin"), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/opt/conda/bin"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *places])
    return {"tools": {name: where for name, where in ((n, shutil.which(n, path=path)) for n in TOOLS) if where}}


def hf_token(_: Json) -> Json:
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    place = os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")
    named = any(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    return {"hf_token": named or (os.path.isfile(place) and os.path.getsize(place) > 0)}


# --- network ---------------------------------------------------------------------------------------------------


def addresses() -> Dict[str, List[Tuple[int, str, int]]]:
    """Interface -> (family, address, prefix length), asked of the kernel: `ip` is not on every machine."""
    found: Dict[str, List[Tuple[int, str, int]]] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.settimeout(3)
        link.send(struct.pack("=IHHIIBBBBi", 24, 22, 0x301, 1, 0, 0, 0, 0, 0, 0))  # RTM_GETADDR, a dump
        while True:
            data = link.recv(1 << 17)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (2, 3) or length < 16:  # an error, or the end
                    return found
                note_address(data[16:length], found)
                data = data[(length + 3) & ~3 :]


def note_address(body: bytes, found: Dict[str, List[Tuple[int, str, int]]]) -> None:
    family, prefix, _, _, index = struct.unpack_from("=BBBBi", body)
    parts, rest = {}, body[8:]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if length < 4:
            break
        parts[kind] = rest[4:length]
        rest = rest[(length + 3) & ~3 :]
    raw = parts.get(2) or parts.get(1)  # IFA_LOCAL, or IFA_ADDRESS where there is no peer
    if raw and family in (socket.AF_INET, socket.AF_INET6):
        where = found.setdefault(socket.if_indextoname(index), [])
        where.append((family, socket.inet_ntop(family, raw), prefix))


def driver_of(name: str) -> str:
    """The driver's name, by ethtool's call: the only way to know a veth or a tun that was renamed."""
    import array
    import fcntl

    answer = array.array("B", struct.pack("=I", 3) + b"\0" * 192)  # ETHTOOL_GDRVINFO
    request = struct.pack("16sP", name.encode()[:15], answer.buffer_info()[0]) + b"\0" * 16
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket.fileno(), 0x8946, request)
    except OSError:
        return ""
    return answer.tobytes()[4:36].split(b"\0")[0].decode("ascii", "replace")


def kind_of(name: str, folder: str, driver: str) -> str:
    kind = number(read(folder + "/type"))
    uevent = read(folder + "/uevent")
    if kind == 772:
        return "loopback"
    if CONTAINER_BRIDGES.match(name):
        return "docker"
    if kind == 32:
        return "infiniband"
    if os.path.isdir(folder + "/bonding") or "DEVTYPE=team" in uevent or driver == "team":
        return "bond"
    if os.path.isdir(folder + "/bridge"):
        return "bridge"
    if driver == "veth":
        return "veth"
    if driver in ("tun", "wireguard") or kind in (65534, 512, 768, 776, 778) or "DEVTYPE=wireguard" in uevent:
        return "tun"
    if driver in ("dummy", "macvtap", "vxlan", "geneve", "ifb") or name.startswith(("dummy", "vxlan", "cali")):
        return "virtual"
    return "ethernet" if kind == 1 else "virtual"


def interfaces(_: Json) -> Json:
    where, rows = addresses(), []
    for name in sorted(os.listdir("/sys/class/net")):
        folder = "/sys/class/net/" + name
        if not os.path.isdir(folder):  # bonding_masters is a file
            continue
        driver = driver_of(name)
        flags = int(read(folder + "/flags") or "0", 16)
        own = where.get(name, [])
        rows.append(
            {
                "name": name,
                "kind": kind_of(name, folder, driver),
                "driver": driver,
                "up": bool(flags & 1),
                "carrier": {"1": True, "0": False}.get(read(folder + "/carrier")),
                "ipv4": ["%s/%d" % (address, bits) for family, address, bits in own if family == socket.AF_INET],
                "ipv6": ["%s/%d" % (address, bits) for family, address, bits in own if family == socket.AF_INET6],
                "mtu": number(read(folder + "/mtu")),
                "speed_mbps": number(read(folder + "/speed")),
            }
        )
    return {"interfaces": rows, "default_interface": default_interface()}


def default_interface() -> str:
    best: Optional[Tuple[int, str]] = None
    for line in read("/proc/net/route").splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == "00000000" and words[7] == "00000000" and int(words[3], 16) & 1:
            best = min(best or (1 << 40, ""), (int(words[6]), words[0]))
    return best[1] if best else ""


def rdma(_: Json) -> Json:
    rows = []
    for folder in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        device, port = folder.split("/")[4], folder.split("/")[6]
        rate = re.match(r"[\d.]+", read(folder + "/rate"))
        beside = sorted(glob.glob("/sys/class/infiniband/%s/device/net/*" % device))
        rows.append(
            {
                "device": device,
                "port": int(port),
                "state": read(folder + "/state").rpartition(":")[2].strip().lower(),
                "link_layer": read(folder + "/link_layer").lower(),
                "rate_gbps": float(rate.group()) if rate else 0.0,
                "netdev": read(folder + "/gid_attrs/ndevs/0") or (os.path.basename(beside[0]) if beside else ""),
            }
        )
    return {"rdma": rows}


# --- ports -----------------------------------------------------------------------------------------------------


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


def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def command_of(pid: int) -> str:
    """The first words of a command: enough to know it, not so much that a secret in its arguments is shown."""
    words = read("/proc/%d/cmdline" % pid).split("\0")
    if not words[0]:
        return read("/proc/%d/comm" % pid)
    shown = [os.path.basename(words[0])]
    for word in words[1:4]:
        if word.startswith("-") and word not in ("-m", "-c"):
            break
        shown.append(word if word != "-c" else "-c …")
        if word == "-c":
            break
    return " ".join(shown)[:80]


def ports(asked: Json) -> Json:
    listening = listeners()
    taken = {port: listening[port] for port in asked.get("ports", []) if port in listening}
    processes = owners([inode for inode, _ in taken.values()])
    rows = []
    for port, (inode, uid) in sorted(taken.items()):
        pid = processes.get(inode, 0)
        rows.append({"port": port, "pid": pid, "user": user_name(uid), "command": command_of(pid) if pid else ""})
    return {"taken_ports": rows, "free_ports": free_ports(asked.get("free_ports", 0), asked.get("ports", []))}


def free_ports(count: int, avoid: List[int]) -> List[int]:
    """Distinct ports that nobody holds, all held at once while they are sought; other seekers start elsewhere."""
    held: List[socket.socket] = []
    found: List[int] = []
    candidates = random.sample(range(*PORTS), 2000) + [0] * 20  # 0: the kernel's choice
    try:
        for port in candidates:
            if len(found) == count:
                break
            if port in avoid:
                continue
            seeker = socket.socket()  # without SO_REUSEADDR: a port in its last wait is not free
            held.append(seeker)
            try:
                seeker.bind(("", port))
                found.append(seeker.getsockname()[1])
            except OSError:
                continue
    finally:
        for seeker in held:
            seeker.close()
    return found


# --- GPUs ------------------------------------------------------------------------------------------------------


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
    places = {row["uuid"]: row["index"] for row in rows}
    processes = []
    text = run([smi, "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", form], SMI_S)
    for uuid, pid, used, name in cells(text, 4):
        processes.append(
            {
                "gpu": places.get(uuid, -1),
                "pid": number(pid),
                "user": owner_of(number(pid)),
                "command": command_of(number(pid)) or name,
                "used_bytes": number(used) << 20,
            }
        )
    cuda = re.search(r"CUDA (?:UMD )?Version\s*:\s*([\d.]+)", run([smi], SMI_S))
    return {"gpus": rows, "gpu_processes": processes, "cuda_driver": cuda.group(1) if cuda else ""}


def owner_of(pid: int) -> str:
    try:
        return user_name(os.stat("/proc/%d" % pid).st_uid)
    except OSError:
        return ""


# --- files -----------------------------------------------------------------------------------------------------


def space(path: str) -> Json:
    """Total and free bytes of the file system that holds the path, or that will once it is made."""
    path = os.path.abspath(os.path.expanduser(path))
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    stat = os.statvfs(path)
    return {"total_bytes": stat.f_blocks * stat.f_frsize, "free_bytes": stat.f_bavail * stat.f_frsize}


def disks(asked: Json) -> Json:
    return {"disks": {path: space(path) for path in asked.get("disks", [])}}


def shm(_: Json) -> Json:
    return {"shm": space("/dev/shm")}  # noqa: S108


def weigh(path: str, limit_s: float) -> Json:
    """Whether a path is there, what it weighs, and whether there was time to count everything."""
    place, until = os.path.expanduser(path), time.monotonic() + limit_s
    if not os.path.exists(place):
        return {"exists": False, "readable": False, "size_bytes": 0, "files": 0, "whole": True}
    readable = os.access(place, os.R_OK)
    if not os.path.isdir(place):
        return {"exists": True, "readable": readable, "size_bytes": os.path.getsize(place), "files": 1, "whole": True}
    size = files = 0
    whole = True
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                size += os.stat(os.path.join(folder, name)).st_size
                files += 1
            except OSError:
                continue
        if time.monotonic() > until:
            whole = False
            break
    return {"exists": True, "readable": readable, "size_bytes": size, "files": files, "whole": whole}


def paths(asked: Json) -> Json:
    return {"paths": {path: weigh(path, 5.0) for path in asked.get("paths", [])}}


def nonces(asked: Json) -> Json:
    """What files of Corral's own say here: one written on one node and read on another shows shared storage."""
    return {"nonces": {path: read(os.path.expanduser(path))[:200] for path in asked.get("nonces", [])}}


def largest_file(place: str) -> str:
    if os.path.isfile(place):
        return place
    found = []
    for folder, _, names in os.walk(place):
        found += [os.path.join(folder, name) for name in names]
        if len(found) > 5000:
            break
    return max(found, key=lambda path: os.path.getsize(path) if os.path.exists(path) else 0, default="")


def read_speed(asked: Json) -> Json:
    """How fast the storage of a path reads: at most 1 GiB or 3 s. Caches are left as they are."""
    place = asked.get("read", "")
    path = largest_file(os.path.expanduser(place)) if place else ""
    if not path:
        return {"read_speed": None}
    done, began, piece = 0, time.monotonic(), bytearray(8 << 20)
    with open(path, "rb", buffering=0) as file:
        while done < (1 << 30) and time.monotonic() - began < 3.0:
            got = file.readinto(piece)
            if not got:
                break
            done += got
    took = max(time.monotonic() - began, 1e-6)
    return {"read_speed": {"file": path, "read_bytes": done, "seconds": took}}


# --- all of it -------------------------------------------------------------------------------------------------

PARTS: Dict[str, Callable[[Json], Json]] = {
    "identity": identity,
    "cores": cores,
    "memory": memory,
    "limits": limits,
    "tools": tools,
    "hf_token": hf_token,
    "interfaces": interfaces,
    "rdma": rdma,
    "ports": ports,
    "gpus": gpus,
    "disks": disks,
    "shm": shm,
    "paths": paths,
    "nonces": nonces,
    "read_speed": read_speed,
}


def survey(asked: Json, limit_s: float) -> Json:
    """All parts at once, each guarded."""
    report: Json = {"began_s": time.time(), "errors": {}}
    answers: Dict[str, Json] = {}
    errors: Dict[str, str] = {}

    def work(name: str) -> None:
        try:
            answers[name] = PARTS[name](asked)
        except Exception as error:
            errors[name] = "%s: %s" % (type(error).__name__, error)

    threads = {name: threading.Thread(target=work, args=(name,), daemon=True) for name in PARTS}
    until = time.monotonic() + limit_s
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            errors.setdefault(name, "no answer within %g s" % limit_s)
    for name in PARTS:
        report.update(answers.get(name, {}))
    report["errors"] = dict(errors)
    report["ended_s"] = time.time()
    return report


def main() -> None:
    asked = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    print(json.dumps(survey(asked, float(asked.get("limit_s", LIMIT_S)))))  # noqa: T201
    sys.stdout.flush()
    os._exit(0)  # a part that hangs must not hold the connection


if __name__ == "__main__":
    main()
