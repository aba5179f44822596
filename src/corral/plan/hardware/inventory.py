"""What the hardware is: kinds of GPU, links between nodes, this machine, and parts of it.

`memory_gib` is what the CUDA driver reports as total (`cudaMemGetInfo`), which is what vLLM multiplies by
`gpu_memory_utilization`; it is less than the box says. Rates are the vendors' dense figures (no sparsity, fp32
accumulation); what of them is reached in practice is `corral.plan.speed`'s business.

A CPU is known by its architecture, its name, and the flags that decide how quick it multiplies. On ARM the kernel
prints no name, only the numbers of implementer and part, so the common server cores are named here. Deployments may
share machines: a `NodeSlice` says which GPUs or cores of which nodes one of them has.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corral.base.errors import UsageError
from corral.base.record import nearest

GIB = 1 << 30
_BOX_SIZES_GB = (16, 24, 32, 40, 48, 80, 94, 96, 141, 144, 192, 256, 288)

# The flags that decide in which number format a CPU multiplies quickly; the many others change nothing here.
_TELLING = {
    "x86_64": ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    "aarch64": ("asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svebf16", "svei8mm"),
}
_ARM_CORES: Mapping[tuple[str, str], str] = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd83"): "Neoverse-V3AE",
    ("0x41", "0xd84"): "Neoverse-V3",
    ("0x41", "0xd8e"): "Neoverse-N3",
    ("0x46", "0x001"): "A64FX",
    ("0x48", "0xd01"): "Kunpeng-920",
    ("0xc0", "0xac3"): "AmpereOne",
    ("0xc0", "0xac4"): "AmpereOne-A",
}


@dataclass(frozen=True)
class CpuFacts:
    """One kind of CPU; `flags` are those that decide in which format it multiplies quickly."""

    architecture: str  # x86_64 | aarch64 | whatever the kernel calls itself
    model: str
    flags: tuple[str, ...] = ()

    def has(self, *flags: str) -> bool:
        """Whether it has all of these flags."""
        return all(flag in self.flags for flag in flags)


def parse_cpuinfo(text: str, machine: str = "") -> CpuFacts:
    """The first processor of a `/proc/cpuinfo`; the architecture of one that prints no flags is `machine`."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if not line.strip():
            if fields:
                break
        elif colon:
            fields.setdefault(key.strip(), value.strip())
    if "flags" in fields:
        architecture, words = "x86_64", fields["flags"]
    elif "Features" in fields:
        architecture, words = "aarch64", fields["Features"]
    else:
        architecture, words = machine or "unknown", ""
    told = set(words.split())
    flags = tuple(flag for flag in _TELLING.get(architecture, ()) if flag in told)
    return CpuFacts(architecture, _model(fields), flags)


def _model(fields: Mapping[str, str]) -> str:
    implementer, part = fields.get("CPU implementer", ""), fields.get("CPU part", "")
    if implementer:
        return _ARM_CORES.get((implementer, part), f"ARM core {implementer}:{part}")
    return fields.get("model name") or "unknown CPU"


def common_cpu(cpus: Sequence[CpuFacts]) -> CpuFacts | None:
    """What several nodes have in common, for one format that suits them all; None where nothing is known of one."""
    if not cpus or len({cpu.architecture for cpu in cpus}) > 1 or any(cpu.architecture == "unknown" for cpu in cpus):
        return None
    names = dict.fromkeys(cpu.model for cpu in cpus)
    shared = tuple(flag for flag in cpus[0].flags if all(cpu.has(flag) for cpu in cpus))
    return CpuFacts(cpus[0].architecture, " and ".join(names), shared)


def read_cpu(root: Path = Path("/")) -> CpuFacts:
    """This machine's CPU."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return parse_cpuinfo(text, platform.machine())


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; rates in 10^9 bytes/s and 10^12 operations/s, 0 where the kind has no such unit."""

    kind: str
    memory_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float
    fp8_tflops: float
    int8_tops: float
    link_gb_s: float  # GPU to GPU inside a node, one direction
    capability: float  # CUDA compute capability; 0 for other vendors
    nvlink: bool
    driver_names: tuple[str, ...]  # how drivers name it, in lower case, longest first
    half: str = "bf16"  # the 16-bit type it computes in
    nvlink_domain: int = 0  # GPUs that NVLink joins beyond the node: 72 of a GB200 rack
    common: bool = True  # listed where nobody named a kind

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def box_gb(self) -> int:
        """The size on the box: 80 for an H100, of which CUDA reports 79.1 GiB."""
        return next(size for size in _BOX_SIZES_GB if size >= self.memory_gib)

    @property
    def flavour(self) -> str:
        """The build of vLLM that runs on it."""
        return "rocm" if "amd" in self.driver_names[0] else "cuda"


_PRO_6000 = tuple(
    f"nvidia rtx pro 6000 blackwell {edition}"
    for edition in ("max-q workstation edition", "workstation edition", "server edition")
)
_TABLE = (
    #   kind         GiB    GB/s  bf16  fp8   int8  link   cc  NVLink
    Gpu("A10", 22.06, 600, 125, 0, 250, 32, 8.6, False, ("nvidia a10g", "nvidia a10")),
    Gpu("A40", 44.40, 696, 150, 0, 299, 32, 8.6, False, ("nvidia a40",)),
    Gpu("RTX-A6000", 47.40, 768, 155, 0, 310, 32, 8.6, False, ("nvidia rtx a6000",)),
    Gpu("A100-40", 39.39, 1555, 312, 0, 624, 300, 8.0, True, ("nvidia a100-sxm4-40gb", "nvidia a100-pcie-40gb")),
    Gpu("A100-80", 79.14, 2039, 312, 0, 624, 300, 8.0, True, ("nvidia a100-sxm4-80gb", "nvidia a100 80gb pcie")),
    Gpu("L4", 22.03, 300, 121, 242, 242, 32, 8.9, False, ("nvidia l4",)),
    Gpu("L40S", 44.39, 864, 362, 733, 733, 32, 8.9, False, ("nvidia l40s",)),
    Gpu("H100-SXM", 79.10, 3350, 989, 1979, 1979, 450, 9.0, True, ("nvidia h100 80gb hbm3",)),
    Gpu("H100-PCIe", 79.10, 2039, 756, 1513, 1513, 64, 9.0, False, ("nvidia h100 pcie",)),
    Gpu("H100-NVL", 93.10, 3938, 835, 1671, 1671, 300, 9.0, True, ("nvidia h100 nvl",)),
    Gpu("H20", 95.10, 4000, 148, 296, 296, 450, 9.0, True, ("nvidia h20",), common=False),
    Gpu("GH200-96", 95.10, 4000, 989, 1979, 1979, 450, 9.0, True, ("nvidia gh200 480gb",), common=False),
    Gpu("GH200-144", 142.70, 4900, 989, 1979, 1979, 450, 9.0, True, ("nvidia gh200 144g hbm3e",), common=False),
    Gpu("H200", 139.80, 4800, 989, 1979, 1979, 450, 9.0, True, ("nvidia h200",)),
    Gpu("B200", 178.35, 7700, 2250, 4500, 4500, 900, 10.0, True, ("nvidia b200",)),
    Gpu("B300", 267.25, 7750, 2250, 4500, 153, 900, 10.3, True, ("nvidia b300 sxm6 ac", "nvidia b300")),
    Gpu("GB200", 184.10, 8000, 2500, 5000, 5000, 900, 10.0, True, ("nvidia gb200",), nvlink_domain=72, common=False),
    Gpu("GB300", 276.16, 8000, 2500, 5000, 165, 900, 10.3, True, ("nvidia gb300",), nvlink_domain=72, common=False),
    Gpu("MI300X", 191.98, 5300, 1307, 2615, 2615, 448, 0.0, True, ("amd instinct mi300x",)),
    Gpu("MI325X", 255.98, 6000, 1307, 2615, 2615, 448, 0.0, True, ("amd instinct mi325x",), common=False),
    Gpu("MI355X", 287.98, 8000, 2516, 5033, 5033, 538, 0.0, True, ("amd instinct mi355x",)),
    Gpu("RTX-3090", 23.69, 936, 71, 0, 284, 16, 8.6, False, ("nvidia geforce rtx 3090",)),
    Gpu("RTX-4090", 23.64, 1008, 165, 330, 660, 16, 8.9, False, ("nvidia geforce rtx 4090",)),
    Gpu("RTX-5090", 31.36, 1792, 210, 419, 838, 32, 12.0, False, ("nvidia geforce rtx 5090",)),
    Gpu("RTX-PRO-6000", 95.11, 1792, 468, 936, 936, 64, 12.0, False, _PRO_6000),
    Gpu("T4", 14.56, 320, 65, 0, 130, 16, 7.5, False, ("tesla t4", "nvidia t4"), "fp16"),
    Gpu("V100-16", 15.77, 900, 125, 0, 0, 150, 7.0, True, ("tesla v100-sxm2-16gb",), "fp16"),
    Gpu("V100-32", 31.74, 900, 125, 0, 0, 150, 7.0, True, ("tesla v100-sxm2-32gb",), "fp16"),
)

GPUS: Mapping[str, Gpu] = {gpu.kind: gpu for gpu in _TABLE}

_ALIASES = {
    "a10g": "A10", "a6000": "RTX-A6000", "a100": "A100-80", "a100-40gb": "A100-40", "a100-80gb": "A100-80",
    "h100": "H100-SXM", "h100-80": "H100-SXM", "h100-80gb": "H100-SXM", "h100-sxm5": "H100-SXM",
    "h200-sxm": "H200", "3090": "RTX-3090", "4090": "RTX-4090", "5090": "RTX-5090",
    "rtx3090": "RTX-3090", "rtx4090": "RTX-4090", "rtx5090": "RTX-5090", "v100": "V100-16", "mi300": "MI300X",
    "mi325": "MI325X", "mi355": "MI355X", "gh200": "GH200-96", "gh200-480gb": "GH200-96",
    "rtxpro6000": "RTX-PRO-6000", "rtx-pro-6000-blackwell": "RTX-PRO-6000",
}  # fmt: skip


@dataclass(frozen=True)
class Link:
    """How nodes reach each other: bytes per second per GPU, one direction, and the time of one small message."""

    name: str
    gb_s_per_gpu: float
    latency_s: float
    note: str

    @property
    def fast(self) -> bool:
        """Whether all-reduces between nodes are worth a thought: RDMA, an adapter per GPU."""
        return self.latency_s < 20e-6


_IB = "one InfiniBand adapter per GPU"
LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link("ib-ndr", 50.0, 8e-6, f"NDR 400 Gb/s, {_IB}"),
        Link("ib-hdr", 25.0, 8e-6, f"HDR 200 Gb/s, {_IB}"),
        Link("ethernet-100", 1.5, 30e-6, "one 100 Gb/s port shared by 8 GPUs, TCP"),
        Link("ethernet-25", 0.4, 50e-6, "one 25 Gb/s port shared by 8 GPUs, TCP"),
    )
}


@dataclass(frozen=True)
class Inventory:
    """What a plan may use: `nodes` equal nodes of `gpus_per_node` GPUs of one kind, or one CPU machine."""

    gpu: str | None
    gpus_per_node: int
    nodes: int
    memory_bytes_per_gpu: int
    cpu_cores: int = 0
    host_memory_bytes: int = 0
    host_available_bytes: int = 0
    link: str = "ib-ndr"
    source: str = "named"  # named | probed
    driver: str = ""
    note: str = ""  # what was taken for granted when it was named
    cpu: CpuFacts | None = None  # None: nobody looked

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def kind(self) -> Gpu | None:
        """The table's row, or None for a CPU or a GPU nobody described."""
        return GPUS.get(self.gpu or "")

    @property
    def joined(self) -> int:
        """GPUs that the links inside a node, or NVLink between nodes, join."""
        domain = self.kind.nvlink_domain if self.kind else 0
        return max(self.gpus_per_node, min(self.gpus, domain))

    @property
    def label(self) -> str:
        """`2 nodes × 8 × H100-SXM`, for people."""
        if self.gpu is None:
            named = f"{self.cpu.model}, " if self.cpu else "CPU, "
            return f"{named}{self.cpu_cores} core{'s' * (self.cpu_cores != 1)}"
        inside = f"{self.gpus_per_node} × {self.gpu}"
        return inside if self.nodes == 1 else f"{self.nodes} nodes × {inside}"


def find_gpu(name: str) -> Gpu:
    """The kind that a user or a driver calls `name`."""
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    by_kind = {kind.lower(): gpu for kind, gpu in GPUS.items()}
    if plain in by_kind:
        return by_kind[plain]
    if plain in _ALIASES:
        return GPUS[_ALIASES[plain]]
    for gpu in GPUS.values():
        if name.strip().lower() in gpu.driver_names:
            return gpu
    guesses = nearest(plain, [*by_kind, *_ALIASES]) or list(GPUS)
    known = ", ".join(dict.fromkeys(find_gpu(g).kind for g in guesses))
    raise UsageError(f"{name!r} is not a kind of GPU Corral knows.", f"Closest: {known}.")


_COUNT = re.compile(r"^\s*(-?\d+)\s*[x*×]\s*(.+)$", re.IGNORECASE)
_NODES = re.compile(r"^(.*\S)\s*[x*×]\s*(-?\d+)\s*$", re.IGNORECASE)


def parse_gpus(text: str, nodes: int | None = None, link: str = "ib-ndr") -> Inventory:
    """Read `8xH100`, `H100`, or `8xH100x2` (two nodes)."""
    counted = _COUNT.match(text)
    count, rest = (int(counted[1]), counted[2].strip()) if counted else (1, text.strip())
    if not re.search("[a-wyz]", rest, re.IGNORECASE) and _without_nodes(rest) not in _ALIASES:
        raise UsageError(f"{text!r} does not name GPUs.", "Write a number and a kind, for example 8xH100.")
    gpu, written_nodes = _kind_and_nodes(rest)
    if nodes is not None and written_nodes is not None and nodes != written_nodes:
        raise UsageError(f"{text!r} says {written_nodes} nodes and --nodes says {nodes}.", "Give the nodes once.")
    wanted_nodes = next((n for n in (nodes, written_nodes) if n is not None), 1)
    for what, number, most in (("GPUs per node", count, 128), ("nodes", wanted_nodes, 4096)):
        if not 1 <= number <= most:
            raise UsageError(f"{number} is not a possible number of {what}.", f"Give 1 to {most}.")
    if link not in LINKS:
        raise UsageError(f"{link!r} is not a link Corral knows.", f"Known: {', '.join(LINKS)}.")
    name = next((word for word in (rest, _without_nodes(rest)) if word.lower() in _ALIASES), "")
    return Inventory(gpu.kind, count, wanted_nodes, gpu.memory_bytes, link=link, note=_smaller(name, gpu))


def _smaller(name: str, gpu: Gpu) -> str:
    """A word about kinds of the same name with less memory: an A100 may have 40 GB."""
    others = [kind for kind, other in GPUS.items()
              if name and kind.startswith(f"{name.upper()}-") and other.memory_gib < gpu.memory_gib]  # fmt: skip
    return f"{name} was read as {gpu.kind}; there is also {' and '.join(others)}, with less memory" if others else ""


def _without_nodes(text: str) -> str:
    split = _NODES.match(text)
    return split[1] if split else text


def _kind_and_nodes(text: str) -> tuple[Gpu, int | None]:
    """A kind, or a kind and a number of nodes: `RTX4090` is the first, `H100x2` the second."""
    try:
        return find_gpu(text), None
    except UsageError:
        split = _NODES.match(text)
        if split is None:
            raise
    return find_gpu(split[1]), int(split[2])


def recognise(name: str, memory_bytes: int) -> tuple[str, int]:
    """Kind and memory of a GPU as a driver calls it; a kind the table lacks is planned by its memory alone."""
    try:
        gpu = find_gpu(name)
    except UsageError:
        return name, memory_bytes
    near = abs(memory_bytes - gpu.memory_bytes) < 0.02 * memory_bytes  # the table has what CUDA reports
    return gpu.kind, gpu.memory_bytes if near else memory_bytes


def probe() -> Inventory:
    """This machine's own hardware: its GPUs, or its CPU when there are none."""
    from corral.plan.hardware.probe import cpu_facts, gpu_facts

    cores, total, available = cpu_facts()
    seen = gpu_facts()
    base = Inventory(None, 1, 1, 0, cores, total, available, source="probed", cpu=read_cpu())
    if seen is None:
        return base
    kind, memory = recognise(seen.name, seen.memory_bytes)
    return replace(base, gpu=kind, gpus_per_node=seen.count, memory_bytes_per_gpu=memory, driver=seen.driver)


@dataclass(frozen=True)
class NodeSlice:
    """What one of several deployments may use; what is left empty is not divided."""

    nodes: tuple[str, ...] = ()  # as the target names them
    gpus: tuple[int, ...] = ()  # by number, on each of its nodes
    cores: tuple[int, ...] = ()  # by number, of machines without GPUs
    memory_bytes: int = 0  # of the memory that was free when the machine was divided; 0: all

    def env(self) -> dict[str, str]:
        """What keeps an engine within its part of a machine."""
        if self.gpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))}
        if self.cores:
            return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.cores))}
        return {}


def within(inventory: Inventory, share: NodeSlice) -> Inventory:
    """The inventory as a plan may use it: some of the GPUs, or some of the cores and of the memory."""
    if share.gpus:
        inventory = replace(inventory, gpus_per_node=len(share.gpus))
    if share.cores:
        inventory = replace(inventory, cpu_cores=len(share.cores))
    if share.memory_bytes and inventory.gpu is None:
        return replace(
            inventory,
            host_memory_bytes=min(inventory.host_memory_bytes, share.memory_bytes),
            host_available_bytes=min(inventory.host_available_bytes, share.memory_bytes),
        )
    return inventory
