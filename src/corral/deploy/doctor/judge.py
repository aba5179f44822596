"""NodeFacts -> findings. Pure: what each node lacks, and where nodes differ that must be equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from corral.base.errors import CorralError
from corral.deploy.doctor.finding import Finding, fatal, ok, warning
from corral.node.network import some_of
from corral.plan.hardware.inventory import GIB
from corral.plan.hardware.survey import OLDEST_PYTHON, NodeFacts

LEAST_DISK, GOOD_DISK = 2 * GIB, 20 * GIB
LEAST_TMP, GOOD_TMP = 64 << 20, GIB
LEAST_SHM, GOOD_SHM = 128 << 20, GIB  # Docker's own 64 MiB ends the first NCCL communicator
TMP = "/tmp"  # noqa: S108
GOOD_MEMORY = 2 * GIB
GOOD_FILES = 4096
GOOD_MEMLOCK = GIB
MOST_SKEW_S = 5.0
PARTS = {"gpus": "the GPU driver does not answer", "interfaces": "the network interfaces cannot be read"}
REMEDIES = {"gpus": "Run nvidia-smi there; a node whose driver was updated needs a restart."}
Judge = Callable[[Sequence[NodeFacts]], list[Finding]]


def groups(values: Mapping[str, str]) -> str:
    """Which hosts have which value: `570.1 on a, b; 550.2 on c`; the value alone when all agree."""
    by_value: dict[str, list[str]] = {}
    for host, value in values.items():
        by_value.setdefault(value, []).append(host)
    if len(by_value) == 1:
        return next(iter(by_value))
    return "; ".join(f"{value} on {names(hosts)}" for value, hosts in by_value.items())


def names(hosts: Sequence[str], most: int = 3) -> str:
    return some_of(hosts, most)


def gib(count: int) -> str:
    return f"{count / GIB:.0f} GiB" if count >= 10 * GIB else f"{count / GIB:.1f} GiB"


def judge_answers(answers: Mapping[str, NodeFacts | CorralError]) -> list[Finding]:
    """Who answered, and why others did not."""
    errors = {host: error for host, error in answers.items() if isinstance(error, CorralError)}
    findings = [fatal("ssh", error.message, error.remedy, host) for host, error in errors.items()]
    answered = [facts for facts in answers.values() if isinstance(facts, NodeFacts)]
    if answered:
        last = max(answered, key=lambda facts: facts.asked_s)
        count = (
            f"{len(answered)} of {len(answers)}" if errors else f"all {len(answers)}" if len(answers) > 1 else "it"
        )
        findings.insert(0, ok("ssh", f"{count} answered, the last ({last.host}) after {last.asked_s:.1f} s"))
    return findings


def judge_facts(facts: Sequence[NodeFacts], ports: Sequence[int] = (), ports_needed: bool = False) -> list[Finding]:
    """All findings that follow from the facts alone."""
    judges: tuple[Judge, ...] = (_python, _parts, _gpus, _gpu_use, _memory, _disk, _shm, _limits, _clock, _token)
    return [*(finding for judge in judges for finding in judge(facts)), *_ports(facts, ports, ports_needed)]


def _python(facts: Sequence[NodeFacts]) -> list[Finding]:
    wanted = ".".join(map(str, OLDEST_PYTHON))
    old = [node for node in facts if _version(node.python) < OLDEST_PYTHON]
    remedy = f"Make a python3 of {wanted} or later the first one on the node's PATH."
    findings = [fatal("python", f"python3 is {node.python or 'unknown'}", remedy, node.host) for node in old]
    versions = sorted({node.python for node in facts if node not in old})
    return [*findings, ok("python", ", ".join(versions))] if versions else findings


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(".")[:2] if word.isdigit())


def _parts(facts: Sequence[NodeFacts]) -> list[Finding]:
    """Parts of the survey that failed on a node."""
    findings = []
    for node in facts:
        for part, error in node.errors.items():
            text = PARTS.get(part, f"{part.replace('_', ' ')} could not be looked at")
            kind = fatal if part in PARTS else warning
            remedy = REMEDIES.get(part, "Check it by hand on the node.")
            findings.append(kind(part, f"{text}: {error}", remedy, node.host))
    return findings


def _gpus(facts: Sequence[NodeFacts]) -> list[Finding]:
    able = [node for node in facts if "gpus" not in node.errors]
    kinds = {node.host: _gpu_label(node) for node in able}
    if not able:
        return []
    if len(set(kinds.values())) > 1:
        return [fatal("gpus", f"the nodes differ: {groups(kinds)}", "Name only nodes with the same GPUs.")]
    drivers = {node.host: node.gpus[0].driver for node in able if node.gpus}
    if len(set(drivers.values())) > 1:
        remedy = "Different drivers usually work; if NCCL fails to start, install the same one everywhere."
        return [warning("gpus", f"the drivers differ: {groups(drivers)}", remedy)]
    driver = f", driver {next(iter(drivers.values()))}" if drivers else ""
    cuda = f", CUDA {able[0].cuda_driver}" if able[0].cuda_driver else ""
    return [ok("gpus", next(iter(kinds.values())) + driver + cuda)]


def _gpu_label(node: NodeFacts) -> str:
    kinds = sorted({gpu.name for gpu in node.gpus})
    return f"{len(node.gpus)} × {' / '.join(kinds)}" if kinds else "no GPU"


def _gpu_use(facts: Sequence[NodeFacts]) -> list[Finding]:
    findings = []
    for node in facts:
        for p in node.gpu_processes:
            who = f"{p.command} of {p.user}" if p.user else p.command
            text = f"GPU {p.gpu}: process {p.pid} ({who}) holds {gib(p.used_bytes)}"
            remedy = f"Ask {p.user or 'its owner'}, wait, or use other GPUs; Corral ends nothing it did not start."
            findings.append(warning("gpu use", text, remedy, node.host))
    if not findings and any(node.gpus for node in facts):
        return [ok("gpu use", "no process is using the GPUs")]
    return findings


def _memory(facts: Sequence[NodeFacts]) -> list[Finding]:
    findings = [
        warning(
            "memory",
            f"only {gib(node.memory_available_bytes)} of memory is free",
            "See what uses it: `top` on the node.",
            node.host,
        )
        for node in facts
        if node.memory_bytes and node.memory_available_bytes < GOOD_MEMORY
    ]
    least = min((node.memory_available_bytes for node in facts if node.memory_bytes), default=0)
    return findings or ([ok("memory", f"at least {gib(least)} free")] if least else [])


def _disk(facts: Sequence[NodeFacts]) -> list[Finding]:
    findings, least = [], []
    for node in facts:
        for path, disk in node.disks.items():
            text, remedy = f"{gib(disk.free_bytes)} free at {path}", f"Free some space: ssh {node.host} df -h"
            least_free, good = (LEAST_TMP, GOOD_TMP) if path == TMP else (LEAST_DISK, GOOD_DISK)
            if disk.free_bytes < least_free:
                findings.append(fatal("disk", f"only {text}", remedy, node.host))
            elif disk.free_bytes < good:
                findings.append(warning("disk", f"only {text}", remedy, node.host))
            else:
                least.append(disk.free_bytes)
    return findings or ([ok("disk", f"at least {gib(min(least))} free")] if least else [])


def judge_writing(facts: Sequence[NodeFacts], folders: Sequence[str]) -> list[Finding]:
    """Whether every node can write to these folders, as `corral up` will."""
    remedy = "Free some space, correct its owner, or name another home (`storage.home` of a profile, CORRAL_HOME)."
    findings = [
        fatal("folders", f"{folder} cannot be written to: {why}", remedy, node.host)
        for node in facts
        for folder in folders
        if (why := node.written.get(folder, ""))
    ]
    tried = all(folder in node.written for node in facts for folder in folders)
    return findings or ([ok("folders", f"{' and '.join(folders)} can be written to")] if tried else [])


def _shm(facts: Sequence[NodeFacts]) -> list[Finding]:
    findings = []
    for node in facts:
        if node.shm and node.shm.free_bytes < GOOD_SHM:
            kind = fatal if node.shm.free_bytes < LEAST_SHM else warning
            remedy = "The ranks of a node talk through it: mount -o remount,size=16G /dev/shm (Docker: --ipc=host)."
            findings.append(kind("shm", f"only {gib(node.shm.free_bytes)} free in /dev/shm", remedy, node.host))
    least = min((node.shm.free_bytes for node in facts if node.shm), default=0)
    return findings or ([ok("shm", f"at least {gib(least)} free")] if least else [])


def _limits(facts: Sequence[NodeFacts]) -> list[Finding]:
    findings = []
    for node in facts:
        if 0 <= node.limits.nofile < GOOD_FILES:
            remedy = "Raise nofile in /etc/security/limits.conf to 65536 (ulimit -n)."
            findings.append(warning("limits", f"only {node.limits.nofile} open files", remedy, node.host))
        rdma = any(port.state == "active" for port in node.rdma)
        if rdma and 0 <= node.limits.memlock_bytes < GOOD_MEMLOCK and node.user != "root":
            locked = node.limits.memlock_bytes >> 10
            remedy = "RDMA needs it: set memlock to unlimited in /etc/security/limits.conf (ulimit -l)."
            findings.append(warning("limits", f"only {locked} KiB of memory may be locked", remedy, node.host))
    return findings or [ok("limits", "enough open files and locked memory allowed")]


def _clock(facts: Sequence[NodeFacts]) -> list[Finding]:
    """Whether the clocks agree, as far as the round trip allows to tell."""
    if len(facts) < 2:
        return []
    first = min(facts, key=lambda node: node.clock_ahead_s)
    last = max(facts, key=lambda node: node.clock_ahead_s)
    apart = last.clock_ahead_s - first.clock_ahead_s
    unsure = first.clock_error_s + last.clock_error_s
    if apart - unsure > MOST_SKEW_S:
        text = f"{last.host} is {apart:.0f} s ahead of {first.host}"
        return [
            warning(
                "clock",
                text,
                "Logs and tokens need the same time everywhere: switch NTP on (`timedatectl set-ntp true`).",
            )
        ]
    return [ok("clock", f"within {max(apart, unsure):.1f} s of each other")]


def _token(facts: Sequence[NodeFacts]) -> list[Finding]:
    having = [node.host for node in facts if node.hf_token]
    if len(facts) == 1:
        return [ok("hub token", "found" if having else "none; only gated models need one")]
    where = "on all nodes" if len(having) == len(facts) else f"on {names(having)}" if having else "on no node"
    return [ok("hub token", f"{where}; only gated models need one, and `corral pull` uses this machine's")]


def _ports(facts: Sequence[NodeFacts], ports: Sequence[int], needed: bool) -> list[Finding]:
    findings = []
    for node in facts:
        for taken in node.taken_ports:
            owner = (taken.command or "a process") + (f" of {taken.user}" if taken.user else "")
            number = f" (process {taken.pid})" if taken.pid else ""
            text = f"port {taken.port} is held by {owner}{number}"
            if needed:
                findings.append(
                    fatal("ports", text, "Choose another port, or leave it out and a free one is chosen.", node.host)
                )
            else:
                findings.append(ok("ports", f"{text}; `corral up` takes a free one", node.host))
    numbers = ", ".join(map(str, ports))
    return findings or ([ok("ports", f"{numbers} {'is' if len(ports) == 1 else 'are'} free")] if ports else [])


def judge_versions(versions: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """host -> part -> version: all nodes must have the same version of every part."""
    parts = dict.fromkeys(part for there in versions.values() for part in there)
    findings, same = [], []
    for part in parts:
        values = {host: there.get(part, "") or "none" for host, there in versions.items()}
        if len(set(values.values())) > 1:
            remedy = "All ranks of a deployment need the same version: install one everywhere."
            findings.append(fatal("versions", f"{part} differs: {groups(values)}", remedy))
        elif set(values.values()) != {"none"}:
            same.append(f"{part} {next(iter(values.values()))}")
    return findings or ([ok("versions", ", ".join(same))] if same else [])


def judge_model(facts: Sequence[NodeFacts], path: str) -> list[Finding]:
    """The same model under the same path on every node, and how fast it reads."""
    seen = {node.host: node.paths[path] for node in facts if path in node.paths}
    there = {host: row for host, row in seen.items() if row.exists and row.readable}
    lacking = [host for host in seen if host not in there]
    if not there:
        remedy = "`corral up` copies it to the nodes when it is on this machine; `corral pull` fetches it."
        return [warning("model", f"{path} is on no node", remedy)] if seen else []
    findings = []
    if lacking:
        why = "is there but cannot be read" if any(seen[host].exists for host in lacking) else "is not there"
        remedy = "Mount the same storage on all nodes, or let `corral up` copy it there."
        findings.append(warning("model", f"{path} {why} on {names(lacking)}", remedy))
    sizes = {host: f"{row.files} files, {row.size_bytes:,} bytes" for host, row in there.items() if row.whole}
    if len(set(sizes.values())) > 1:
        text = f"{path} is not the same on all nodes: {groups(sizes)}"
        findings.append(fatal("model", text, "Copy it again where it is incomplete."))
    elif not findings:
        row = next(iter(there.values()))
        findings.append(ok("model", f"{path}: {row.size_bytes / 1e9:.2f} GB in {row.files} files"))
    return [*findings, *_storage(facts, max(row.size_bytes for row in there.values()))]


def _storage(facts: Sequence[NodeFacts], size_bytes: int) -> list[Finding]:
    speeds = {node.host: node.read_speed.bytes_per_s for node in facts if node.read_speed and node.read_speed.seconds}
    if not speeds:
        return []
    host = min(speeds, key=lambda name: speeds[name])
    slowest = speeds[host]
    minutes = size_bytes / slowest / 60
    text = f"reads at {slowest / 1e9:.2f} GB/s or more (slowest: {host}; part of it may come from the page cache)"
    if minutes > 10:
        remedy = "Copy it to local disks first (`corral pull`), or expect to wait."
        return [warning("storage", f"{text}: about {minutes:.0f} min to load", remedy)]
    return [ok("storage", text)]
