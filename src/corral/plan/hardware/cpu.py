"""What a CPU is, as far as arithmetic goes: its architecture, its name, and the flags that decide how quick it is.

`parse_cpuinfo` is pure; its text is the kernel's `/proc/cpuinfo`. On ARM the kernel prints no name, only the numbers
of implementer and part, so the common server cores are named here.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
